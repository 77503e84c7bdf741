import errno
import os
import resource
from pathlib import Path

import numpy as np
import pytest
import torch
from store_support import HIDDEN, TAPS, Dataset, iter_samples, make_states

from extractor.errors import StoreError
from extractor.plan import Geometry
from extractor.store import names
from extractor.store.reader import MappedStates, PlainStates, ShardReader, open_states
from extractor.store.verify import check

DATASET = Dataset([8, 6, 8, 5, 3], geometry=Geometry(max_tokens=8, shard_tokens=16))


def no_mapping(path):
    raise OSError(errno.ENODEV, os.strerror(errno.ENODEV), str(path))


def assert_is(sample, dataset=DATASET):
    planned = dataset.samples[sample.sample_index]
    assert sample.input_ids.tolist() == planned.input_ids.tolist()
    assert sample.loss_mask.tolist() == planned.loss_mask.tolist()
    assert (sample.input_ids.dtype, sample.loss_mask.dtype) == (torch.int32, torch.uint8)
    for tap, states in sample.states.items():
        expected = make_states(tap, planned).reshape(-1)
        assert states.dtype == torch.bfloat16
        assert states.shape == (planned.input_ids.size, HIDDEN)
        assert np.array_equal(states.reshape(-1).view(torch.uint8).numpy(), expected)


def test_every_sample_comes_back_as_it_was_given(tmp_path):
    DATASET.write(tmp_path)
    samples = list(iter_samples(tmp_path))
    assert [s.sample_index for s in samples] == [i for shard in DATASET.shards for i in shard.samples]
    for sample in samples:
        assert tuple(sample.states) == TAPS.names
        assert_is(sample)


def test_taps_can_be_chosen_and_keep_their_order(tmp_path):
    DATASET.write(tmp_path)
    for sample in iter_samples(tmp_path, ["final", "layer_003"]):
        assert tuple(sample.states) == ("layer_003", "final")
        assert_is(sample)


def test_without_mapping_plain_reads_give_the_same_tensors(tmp_path):
    DATASET.write(tmp_path)
    folder = names.shard_folder(tmp_path, 0)
    with ShardReader(folder) as mapped, ShardReader(folder, mapped=no_mapping) as plain:
        for a, b in zip(mapped, plain, strict=True):
            assert_is(b)
            for tap in TAPS.names:
                assert torch.equal(a.states[tap].view(torch.int16), b.states[tap].view(torch.int16))
    path = folder / "final.safetensors"
    for kind, opened in ((MappedStates, open_states(path)), (PlainStates, open_states(path, no_mapping))):
        assert isinstance(opened, kind)
        opened.close()


def test_states_own_their_memory(tmp_path):
    DATASET.write(tmp_path)
    with ShardReader(names.shard_folder(tmp_path, 0)) as shard:
        sample = shard.sample(1)
    sizes = {states.untyped_storage().nbytes() for states in sample.states.values()}
    assert sizes == {sample.input_ids.numel() * HIDDEN * 2}
    assert_is(sample)


@pytest.mark.parametrize("name", ["final.safetensors", "tokens.safetensors", "shard.json"])
def test_a_damaged_shard_is_refused_before_anything_is_mapped(tmp_path, name):
    DATASET.write(tmp_path)
    path = names.shard_folder(tmp_path, 0) / name
    path.write_bytes(path.read_bytes()[:-2])
    with pytest.raises(StoreError, match=name):
        list(iter_samples(tmp_path))


def test_a_tap_that_is_not_stored_is_refused_with_those_that_are(tmp_path):
    DATASET.write(tmp_path)
    with pytest.raises(StoreError, match="tap normed is not stored here, but layer_001, layer_003"):
        list(iter_samples(tmp_path, ["normed"]))


def test_a_position_outside_the_shard_is_an_index_error(tmp_path):
    DATASET.write(tmp_path)
    with ShardReader(names.shard_folder(tmp_path, 0)) as shard, pytest.raises(IndexError):
        shard.sample(len(shard))


def test_any_number_of_shards_needs_few_open_files(tmp_path):
    dataset = Dataset([1] * 60, geometry=Geometry(max_tokens=1, shard_tokens=1))
    dataset.write(tmp_path)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest = len(list(Path("/proc/self/fd").iterdir())) + 12
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest, hard))
    try:
        assert sum(1 for _ in iter_samples(tmp_path)) == 60
        assert check(tmp_path).is_complete
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
