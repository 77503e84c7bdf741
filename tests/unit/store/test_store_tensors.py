import itertools
import struct
from pathlib import Path

import numpy as np
import pytest
import torch
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from store_support import CASES

from extractor.errors import BugError, StoreError
from extractor.store.faults import FaultyFileSystem, fail_on
from extractor.store.filesystem import RealFileSystem
from extractor.store.tensors import (
    DATA_OFFSET,
    StatesWriter,
    arrays_bytes,
    header_bytes,
    read_array,
    read_header,
)

TORCH = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


def as_bytes(tensor: torch.Tensor) -> memoryview:
    return memoryview(tensor.reshape(-1).view(torch.uint8).numpy())


def write(path: Path, states: torch.Tensor, cuts=(), *, planned=None, files=None) -> tuple[int, str]:
    """Writes [T, H] rows in pieces that end at the rows `cuts`."""
    num_tokens, hidden = states.shape
    writer = StatesWriter(
        files or RealFileSystem(),
        path,
        num_tokens=num_tokens if planned is None else planned,
        hidden_size=hidden,
        dtype=str(states.dtype).removeprefix("torch."),
    )
    edges = [0, *sorted(cuts), num_tokens]
    for begin, end in itertools.pairwise(edges):
        writer.append(as_bytes(states[begin:end].contiguous()))
    return writer.finish()


@pytest.mark.parametrize("dtype", TORCH)
def test_a_file_holds_what_save_file_would_hold(tmp_path, dtype):
    states = torch.randn(11, 6).to(TORCH[dtype])
    write(tmp_path / "ours.safetensors", states, (3, 4))
    save_file({"states": states}, tmp_path / "theirs.safetensors", metadata={"format": "pt"})
    ours, theirs = load_file(tmp_path / "ours.safetensors"), load_file(tmp_path / "theirs.safetensors")
    assert ours.keys() == theirs.keys()
    assert ours["states"].dtype == theirs["states"].dtype
    assert torch.equal(ours["states"], theirs["states"])
    with safe_open(tmp_path / "ours.safetensors", framework="pt") as opened:
        assert opened.metadata() == {"format": "pt"}
        assert torch.equal(opened.get_slice("states")[2:5], states[2:5])


def test_data_starts_at_a_page_border(tmp_path):
    states = torch.arange(12, dtype=torch.float32).reshape(3, 4)
    write(tmp_path / "a.safetensors", states)
    data = (tmp_path / "a.safetensors").read_bytes()
    assert struct.unpack("<Q", data[:8])[0] == DATA_OFFSET - 8
    assert data[DATA_OFFSET:] == states.numpy().tobytes()
    assert data[8:DATA_OFFSET].rstrip(b" ").endswith(b"}")


def test_every_byte_of_a_small_file_is_as_specified(tmp_path):
    write(tmp_path / "a.safetensors", torch.tensor([[1.0, -2.0]], dtype=torch.bfloat16))
    header = b'{"__metadata__":{"format":"pt"},"states":{"dtype":"BF16","shape":[1,2],"data_offsets":[0,4]}}'
    expected = struct.pack("<Q", 4088) + header + b" " * (4088 - len(header)) + bytes.fromhex("803f00c0")
    assert (tmp_path / "a.safetensors").read_bytes() == expected


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_the_split_into_blocks_leaves_no_trace(tmp_path_factory, data):
    folder = tmp_path_factory.mktemp("splits")
    num_tokens = data.draw(st.integers(0, 40))
    hidden = data.draw(st.integers(1, 9))
    dtype = data.draw(st.sampled_from(sorted(TORCH)))
    seed = data.draw(st.integers(0, 2**31))
    states = torch.randn(num_tokens, hidden, generator=torch.Generator().manual_seed(seed)).to(TORCH[dtype])
    cuts = data.draw(st.lists(st.integers(0, num_tokens), max_size=6))
    size, digest = write(folder / "whole.safetensors", states)
    assert write(folder / "split.safetensors", states, cuts) == (size, digest)
    contents = (folder / "split.safetensors").read_bytes()
    assert contents == (folder / "whole.safetensors").read_bytes()
    assert (len(contents), xxhash.xxh3_128_hexdigest(contents)) == (size, digest)
    assert torch.equal(load_file(folder / "split.safetensors")["states"], states)


@pytest.mark.parametrize("planned", [6, 100])
def test_fewer_rows_than_planned_give_the_same_file_as_planned_so(tmp_path, planned):
    states = torch.randn(5, 3)
    expected = write(tmp_path / "exact.safetensors", states)
    assert write(tmp_path / "fewer.safetensors", states, planned=planned) == expected
    assert (tmp_path / "fewer.safetensors").read_bytes() == (tmp_path / "exact.safetensors").read_bytes()


def test_a_complete_file_is_never_read_back(tmp_path):
    files = FaultyFileSystem(fail_on("read_at"))
    write(tmp_path / "a.safetensors", torch.randn(5, 3), files=files)
    with pytest.raises(OSError, match=r"b\.safetensors"):
        write(tmp_path / "b.safetensors", torch.randn(5, 3), planned=6, files=files)


def test_more_rows_than_planned_are_refused(tmp_path):
    with pytest.raises(BugError, match="within the plan"):
        write(tmp_path / "a.safetensors", torch.randn(5, 3), planned=4)


def test_a_part_of_a_row_is_refused(tmp_path):
    writer = StatesWriter(RealFileSystem(), tmp_path / "a", num_tokens=4, hidden_size=3, dtype="float32")
    with pytest.raises(BugError, match="whole rows of 12 bytes"):
        writer.append(memoryview(b"12345"))
    writer.close()


def test_short_writes_are_completed(tmp_path):
    states = torch.randn(50, 7)
    expected = write(tmp_path / "a.safetensors", states)
    one_third = FaultyFileSystem(
        lambda call: max(1, call.num_bytes // 3) if call.name == "write_at" else None
    )
    assert write(tmp_path / "b.safetensors", states, files=one_third) == expected
    assert (tmp_path / "a.safetensors").read_bytes() == (tmp_path / "b.safetensors").read_bytes()


def test_a_disk_that_takes_no_bytes_is_an_error(tmp_path):
    stuck = FaultyFileSystem(lambda call: 0 if call.name == "write_at" else None)
    with pytest.raises(OSError, match="took no bytes"):
        write(tmp_path / "a.safetensors", torch.randn(5, 3), files=stuck)


@pytest.mark.parametrize("method", ["create", "allocate", "write_at", "sync", "close"])
def test_no_error_of_the_disk_is_swallowed(tmp_path, method):
    files = FaultyFileSystem(fail_on(method))
    with pytest.raises(OSError, match="Input/output error"):
        write(tmp_path / "a.safetensors", torch.randn(5, 3), files=files)
    files.close_all()


def test_space_is_reserved_before_the_first_row(tmp_path):
    writer = StatesWriter(RealFileSystem(), tmp_path / "a", num_tokens=1000, hidden_size=64, dtype="float32")
    stat = (tmp_path / "a").stat()
    writer.close()
    # A file system without fallocate leaves the file as short as its header.
    assert stat.st_size in {DATA_OFFSET + 256_000, DATA_OFFSET}


def test_arrays_of_several_types_are_read_back(tmp_path):
    arrays = {
        "a": np.array([1, -2], dtype=np.int64),
        "b": np.arange(3, dtype=np.int32),
        "c": np.zeros(0, np.uint8),
    }
    (tmp_path / "t.safetensors").write_bytes(arrays_bytes(arrays))
    infos = read_header(tmp_path / "t.safetensors")
    for name, array in arrays.items():
        assert np.array_equal(read_array(tmp_path / "t.safetensors", infos[name]), array)
        assert np.array_equal(load_file(tmp_path / "t.safetensors")[name].numpy(), array)


def test_a_header_that_does_not_fit_is_a_bug():
    with pytest.raises(BugError, match="does not fit"):
        header_bytes([("x" * 5000, "int64", (1,))])


def test_the_intact_file_of_the_case_is_valid():
    assert read_header(CASES / "store-truncated-shard" / "good.safetensors")


@pytest.mark.parametrize(
    ("name", "kind", "words"),
    [
        ("cut_data", "data_truncated", "16 of 337 bytes are missing"),
        ("cut_header", "header_truncated", "the header is cut off"),
        ("empty", "empty_file", "the file is empty"),
    ],
)
def test_each_damaged_file_of_the_case_is_named_with_its_reason(name, kind, words):
    with pytest.raises(StoreError, match=words) as caught:
        read_header(CASES / "store-truncated-shard" / f"{name}.safetensors")
    assert caught.value.code == kind
    assert f"{name}.safetensors" in caught.value.message


@pytest.mark.parametrize("length", range(0, 4096 + 33, 7))
def test_a_file_cut_anywhere_is_damaged(tmp_path, length):
    path = tmp_path / "a.safetensors"
    write(path, torch.ones(2, 4))
    path.write_bytes(path.read_bytes()[:length])
    with pytest.raises(StoreError) as caught:
        read_header(path)
    assert caught.value.code in {"empty_file", "header_truncated", "data_truncated"}


@pytest.mark.parametrize(
    ("data", "code"),
    [
        (b"\xff" * 100, "header_invalid"),
        (struct.pack("<Q", 4) + b"nope", "header_invalid"),
        (struct.pack("<Q", 2) + b"[]", "header_invalid"),
        (struct.pack("<Q", 2) + b"\xff\xff", "header_invalid"),
        (struct.pack("<Q", 2) + b"{}" + b"more", "trailing_bytes"),
        (
            struct.pack("<Q", 52) + b'{"a":{"dtype":"I8","shape":[3],"data_offsets":[0,9]}}'[:52],
            "header_invalid",
        ),
        (
            struct.pack("<Q", 53) + b'{"a":{"dtype":"I8","shape":[3],"data_offsets":[0,9]}}' + b"123456789",
            "header_invalid",
        ),
        (
            struct.pack("<Q", 53) + b'{"a":{"dtype":"?8","shape":[3],"data_offsets":[0,3]}}' + b"123",
            "header_invalid",
        ),
    ],
)
def test_hostile_headers_are_refused(tmp_path, data, code):
    (tmp_path / "a").write_bytes(data)
    with pytest.raises(StoreError) as caught:
        read_header(tmp_path / "a")
    assert caught.value.code == code


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(StoreError, match=r"gone\.safetensors: the file is missing"):
        read_header(tmp_path / "gone.safetensors")
