"""Lines of files: where they end, which are records, and how damage is reported."""

from __future__ import annotations

import json
import tracemalloc

import pytest

from extractor.dataset import readers
from extractor.dataset.readers import RawRecord, RecordReader, check_files
from extractor.dataset.rejects import Reject
from extractor.errors import AccessError, DatasetError, PreflightError


def read(tmp_path, content: bytes):
    path = tmp_path / "f.jsonl"
    path.write_bytes(content)
    return list(RecordReader([path]))


def test_lines_end_at_lf_only(tmp_path):
    text = "a\u2028b\u2029c\x85d\x0be\x0c\x1cf"

    records = read(tmp_path, json.dumps({"t": text}, ensure_ascii=False).encode() + b"\n" + b'{"t": 2}\n')

    assert [(record.source_line, record.value["t"]) for record in records] == [(1, text), (2, 2)]


def test_bom_and_crlf_are_no_part_of_records(tmp_path):
    assert [record.value for record in read(tmp_path, b"\xef\xbb\xbf1\r\n2\r\n3")] == [1, 2, 3]


def test_blank_lines_count_as_lines_but_not_as_records(tmp_path):
    records = read(tmp_path, b"\n \t\r\n1\n\n2\n\n")

    assert [(record.source_line, record.value) for record in records] == [(3, 1), (5, 2)]


@pytest.mark.parametrize(
    "damaged",
    [
        b'{"a": 1,}',
        b"plain",
        b'{"a":',
        b'{"a": "\xff"}',
        b'{"a": "\\ud800"}',
        b'{"a": NaN}',
        b"[" * 100_000,
        b"\x00",
    ],
)
def test_a_damaged_line_is_one_reject_and_disturbs_no_other(tmp_path, damaged):
    first, second, third = read(tmp_path, b'{"a": 1}\n' + damaged + b'\n{"a": 2}')

    assert isinstance(first, RawRecord)
    assert isinstance(third, RawRecord)
    assert isinstance(second, Reject)
    assert (second.source_file, second.source_line, second.code) == ("f.jsonl", 2, "json")


def test_line_numbers_start_again_in_each_file(tmp_path):
    paths = [tmp_path / "a.jsonl", tmp_path / "b.jsonl"]
    for path in paths:
        path.write_bytes(b"1\nx\n")

    places = [(record.source_file, record.source_line) for record in RecordReader(paths)]

    assert places == [("a.jsonl", 1), ("a.jsonl", 2), ("b.jsonl", 1), ("b.jsonl", 2)]


def test_progress_reaches_the_size_of_all_files(tmp_path):
    paths = [tmp_path / "a.jsonl", tmp_path / "b.jsonl"]
    for path in paths:
        path.write_bytes(b"1\n22\n\n")
    reader = RecordReader(paths)

    done = [reader.bytes_done for _ in reader]

    assert done == sorted(done)
    assert reader.bytes_done == reader.bytes_total == 12


def test_a_line_without_end_is_a_reject_and_not_a_full_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(readers, "MAX_RECORD_BYTES", 100)

    records = read(tmp_path, b'"' + b"x" * 5000 + b'"\n"ok"\n')

    assert [getattr(record, "code", "fine") for record in records] == ["record_too_long", "fine"]
    assert records[1].source_line == 2


def test_memory_does_not_grow_with_the_file(tmp_path):
    path = tmp_path / "big.jsonl"
    with path.open("wb") as file:
        for _ in range(20_000):
            file.write(b'{"t": "' + b"x" * 500 + b'"}\n')
    tracemalloc.start()
    try:
        count = sum(1 for _ in RecordReader([path]))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()

    assert count == 20_000
    assert peak < 500_000


@pytest.mark.parametrize(
    ("head", "kind"),
    [
        (b"PAR1....", "Parquet"),
        (b"ARROW1\0\0", "Arrow"),
        (b"\x1f\x8b\x08", "gzip"),
        (b"\x28\xb5\x2f\xfd", "zstd"),
        (b'[\n  {"messages": []}\n]', "JSON array"),
        (b'[{"messages": []}]', "JSON array"),
        (b"\xff\xfe{\x00", "UTF-16"),
    ],
)
def test_files_of_another_kind_are_refused_by_their_content(tmp_path, head, kind):
    path = tmp_path / "looks-fine.jsonl"
    path.write_bytes(head)

    with pytest.raises(DatasetError, match=kind):
        check_files([path])


def test_a_missing_file_is_refused_by_name(tmp_path):
    with pytest.raises(PreflightError, match=r"nowhere\.jsonl"):
        check_files([tmp_path / "nowhere.jsonl"])
    with pytest.raises(PreflightError):
        check_files([tmp_path])


def test_an_unreadable_file_is_refused(tmp_path, monkeypatch):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b"1\n")

    def deny(*_args, **_kwargs):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(type(path), "open", deny)
    with pytest.raises(AccessError, match="Permission denied"):
        check_files([path])
