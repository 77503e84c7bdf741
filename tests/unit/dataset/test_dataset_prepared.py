"""Reading a prepared data set."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest

from extractor.dataset import writer as writer_module
from extractor.dataset.prepared import PreparedDataset
from extractor.dataset.records import Conversation
from extractor.dataset.writer import SampleWriter
from extractor.errors import BugError, StoreError


def line(number: int, words: int) -> dict:
    return {
        "id": f"r{number}",
        "messages": [
            {"role": "user", "content": "q"},
            {"role": "assistant", "content": "w " * words + "end"},
        ],
    }


def test_samples_are_read_in_any_order_across_record_batches(prepare_lines, tokenizer, monkeypatch):
    monkeypatch.setattr(writer_module, "BATCH_TOKENS", 100)
    prepared = prepare_lines([line(number, number) for number in range(30)])
    assert len(prepared._batches) > 5

    for index in (29, 0, 17, 17, 3):
        sample = prepared.sample(index)
        assert (sample.index, sample.sample_id, sample.source_line) == (index, f"r{index}", index + 1)
        assert sample.source_file == "lines.jsonl"
        assert sample.input_ids.dtype == np.int32
        assert sample.loss_mask.dtype == np.uint8
        assert "w " * index + "end" in tokenizer.decode(sample.input_ids.tolist())
        assert len(sample.input_ids) == len(sample.loss_mask) == prepared.lengths[index]
        assert sample.loss_mask.sum() == prepared.supervised[index]


def test_totals_of_the_meta_are_those_of_the_samples(prepare_lines):
    prepared = prepare_lines([line(number, number) for number in range(10)] + [b"broken"], reject_limit=1.0)

    counts = prepared.meta.counts
    assert prepared.lengths.dtype == prepared.supervised.dtype == np.int64
    assert (counts.records, counts.accepted, counts.rejected) == (11, 10, {"json": 1})
    assert (counts.tokens, counts.supervised_tokens) == (prepared.lengths.sum(), prepared.supervised.sum())
    assert counts.longest == prepared.lengths.max()
    assert len(prepared.rejected_path.read_bytes().splitlines()) == 1


def test_an_index_out_of_range_is_an_error(prepare_lines):
    prepared = prepare_lines([line(0, 1)])

    for index in (-1, 1):
        with pytest.raises(IndexError, match=f"sample {index} of 1"):
            prepared.sample(index)


def test_stored_arrays_cannot_be_changed(prepare_lines):
    sample = prepare_lines([line(0, 1)]).sample(0)

    with pytest.raises(ValueError, match="read-only"):
        sample.loss_mask[0] = 1


def test_a_missing_folder_is_refused_with_the_remedy(tmp_path):
    with pytest.raises(StoreError, match="tapdeck prepare"):
        PreparedDataset.open(tmp_path / "nothing")


def test_a_cut_file_is_refused_without_reading_it(prepare_lines):
    prepared = prepare_lines([line(0, 1)])
    path = prepared.path / "samples.arrow"
    path.write_bytes(path.read_bytes()[:-1])

    with pytest.raises(StoreError, match=r"samples\.arrow has \d+ bytes, expected \d+"):
        PreparedDataset.open(prepared.path)


def test_the_writer_takes_no_mask_without_a_supervised_token(tmp_path):
    conversation = Conversation("x", "f", 1, ())
    with SampleWriter(tmp_path) as writer, pytest.raises(BugError):
        writer.add(conversation, np.arange(3, dtype=np.int32), np.zeros(3, np.uint8))
    with SampleWriter(tmp_path) as writer, pytest.raises(BugError):
        writer.add(conversation, np.arange(3, dtype=np.int32), np.ones(2, np.uint8))


def test_reading_needs_neither_transformers_nor_torch():
    code = (
        "import sys, extractor.dataset.prepared, extractor.dataset; extractor.dataset.PreparedDataset;"
        "print(sorted({'torch', 'transformers', 'tokenizers', 'sglang', 'jinja2'} & set(sys.modules)))"
    )

    found = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )

    assert found.stdout.strip() == "[]"


def test_the_package_exports_what_it_says():
    import extractor.dataset as package

    assert {name: getattr(package, name).__name__ for name in package.__all__} == {
        name: name for name in package.__all__
    }
    with pytest.raises(AttributeError, match="no attribute nothing"):
        _ = package.nothing
