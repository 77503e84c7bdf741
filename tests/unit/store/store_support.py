"""Small data sets and fake blocks for the tests of the store."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from extractor.plan import Geometry, Shard, plan_shards
from extractor.store import manifest, names
from extractor.store.listing import shard_indices
from extractor.store.pipeline import ShardRecord, ShardSpec, WriterPool
from extractor.store.tensors import ITEM_BYTES
from extractor.taps import TapSelection, select

if TYPE_CHECKING:
    import threading
    from collections.abc import Iterator

    from extractor.store.reader import StoredSample

CASES = Path(__file__).resolve().parents[2] / "data" / "cases"
NUM_LAYERS = 8
HIDDEN = 8
GEOMETRY = Geometry(max_tokens=16, shard_tokens=24)
TAPS = select(
    num_layers=NUM_LAYERS, layers=(1, 3, 5), embed=False, final=True, normed=False, convention="after"
)


class Sample(msgspec.Struct, frozen=True):
    index: int
    sample_id: str
    input_ids: np.ndarray
    loss_mask: np.ndarray
    source_file: str = "data.jsonl"
    source_line: int = 1


def make_sample(index: int, length: int) -> Sample:
    rng = np.random.default_rng([7, index])
    return Sample(
        index,
        f"id-{index}",
        rng.integers(0, 1000, length, dtype=np.int32),
        rng.integers(0, 2, length, dtype=np.uint8),
        source_line=index + 1,
    )


def make_states(tap: str, sample: Sample, dtype: str = "bfloat16", hidden: int = HIDDEN) -> np.ndarray:
    """Finite states of one sample, [t, H * bytes per value] as uint8."""
    rng = np.random.default_rng([sample.index, *tap.encode()])
    values = rng.standard_normal((sample.input_ids.size, hidden)).astype(np.float32)
    words = (values.view(np.uint32) >> 16).astype(np.uint16) if dtype == "bfloat16" else values.astype(dtype)
    return words.view(np.uint8).reshape(sample.input_ids.size, hidden * ITEM_BYTES[dtype])


@dataclass
class FakeBlock:
    """A block in host memory that counts what is done with it."""

    samples: list[Sample]
    taps: tuple[str, ...]
    reasons: dict[int, str] = field(default_factory=dict)
    dtype: str = "bfloat16"
    hidden: int = HIDDEN
    wait_error: Exception | None = None
    gate: threading.Event | None = None
    off_in: str | None = None
    waits: int = 0
    releases: int = 0

    @property
    def num_tokens(self) -> int:
        return sum(sample.input_ids.size for sample in self.samples)

    def wait(self) -> None:
        self.waits += 1
        if self.gate is not None:
            assert self.gate.wait(30)
        if self.wait_error is not None:
            raise self.wait_error

    def verdicts(self) -> list[str | None]:
        assert self.waits == 1
        return [self.reasons.get(sample.index) for sample in self.samples]

    def magnitudes(self, tap: str) -> memoryview:
        assert self.releases == 0, "magnitudes() after release()"
        values = [make_states(tap, s, self.dtype, self.hidden).max(axis=1) for s in self.samples]
        rows = np.concatenate(values).astype(np.float32)
        rows[0] += tap == self.off_in
        return rows.view(np.uint8).data

    def rows(self, tap: str) -> memoryview:
        assert self.releases == 0, "rows() after release()"
        rows = np.concatenate([make_states(tap, s, self.dtype, self.hidden) for s in self.samples])
        return memoryview(rows.reshape(-1))

    def release(self) -> None:
        self.releases += 1


@dataclass
class Outcome:
    """What a pool reported."""

    commits: list[ShardRecord] = field(default_factory=list)
    errors: list[tuple[int, BaseException]] = field(default_factory=list)
    blocks: list[FakeBlock] = field(default_factory=list)

    def commit(self, record: ShardRecord) -> None:
        self.commits.append(record)

    def error(self, index: int, error: BaseException) -> None:
        self.errors.append((index, error))

    def assert_released_once(self) -> None:
        assert [block.releases for block in self.blocks] == [1] * len(self.blocks)


@dataclass
class Dataset:
    """A plan with its samples and manifest."""

    lengths: list[int]
    geometry: Geometry = GEOMETRY
    taps: TapSelection = TAPS
    dtype: str = "bfloat16"
    hidden: int = HIDDEN

    def __post_init__(self) -> None:
        self.samples = [make_sample(index, length) for index, length in enumerate(self.lengths)]
        self.shards: list[Shard] = plan_shards(self.lengths, self.geometry)
        self.manifest = make_manifest(self)
        self.fingerprint = manifest.fingerprint(self.manifest)

    def spec(
        self, output: Path, shard: Shard, replica: int | str = 0, *, rank: int = 0, num_ranks: int = 1
    ) -> ShardSpec:
        return ShardSpec(
            output=output,
            index=shard.index,
            samples=shard.samples,
            num_tokens=shard.num_tokens,
            geometry=self.geometry,
            taps=self.taps.taps,
            dtype=self.dtype,
            hidden_size=self.hidden,
            fingerprint=self.fingerprint,
            replica=replica,
            rank=rank,
            num_ranks=num_ranks,
        )

    def blocks(self, shard: Shard, reasons: dict[int, str] | None = None) -> list[FakeBlock]:
        return [
            FakeBlock(
                [self.samples[index] for index in batch],
                self.taps.names,
                reasons or {},
                self.dtype,
                self.hidden,
            )
            for batch in shard.batches
        ]

    def write_shard(
        self, pool: WriterPool, outcome: Outcome, output: Path, shard: Shard, reasons=None
    ) -> None:
        writer = pool.open_shard(self.spec(output, shard))
        for block in self.blocks(shard, reasons):
            outcome.blocks.append(block)
            writer.submit(block, block.samples)
        writer.finish()

    def write(
        self, output: Path, *, files=None, threads=3, only=None, reasons=None, with_manifest=True
    ) -> Outcome:
        """Writes (some of) the shards and the manifest; returns what the pool reported."""
        outcome = Outcome()
        pool = WriterPool(threads, outcome.commit, outcome.error, files=files)
        for shard in self.shards:
            if only is None or shard.index in only:
                self.write_shard(pool, outcome, output, shard, reasons)
        pool.close()
        if with_manifest:
            output.mkdir(parents=True, exist_ok=True)
            manifest.write(output, self.manifest)
        return outcome


def make_manifest(dataset: Dataset, **changes) -> manifest.Manifest:
    fields = {
        "model": manifest.ModelRecord(
            path="/models/tiny",
            revision=None,
            config_hash="c0",
            weights_hash="w0",
            architecture="LlamaForCausalLM",
            num_layers=NUM_LAYERS,
            hidden_size=dataset.hidden,
        ),
        "tokenizer_hash": "t0",
        "template_hash": "p0",
        "data_hash": "d0",
        "samples_hash": "s0",
        "prepared_key": "k0",
        "data": {"max_len": 2048},
        "mask": {"turns": "all", "end_of_turn": True},
        "geometry": dataset.geometry,
        "taps": manifest.TapsRecord.of(dataset.taps),
        "dtype": dataset.dtype,
        "compute_dtype": dataset.dtype,
        "device": "cpu",
        "attention_backend": None,
        "sglang_args": {},
        "totals": manifest.Totals(
            samples=len(dataset.lengths),
            tokens=sum(dataset.lengths),
            supervised_tokens=sum(int(s.loss_mask.sum()) for s in dataset.samples),
            shards=len(dataset.shards),
            rejected=0,
        ),
    }
    return manifest.Manifest(**(fields | changes))


def tree(folder: Path) -> dict[str, bytes]:
    """Every file below a folder."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def kill_dataset() -> Dataset:
    """Some shards with several batches each, for tests that kill a writer."""
    return Dataset([8, 7, 5, 8, 6, 8, 4, 8], geometry=Geometry(max_tokens=8, shard_tokens=24))


def iter_samples(output: Path, taps: list[str] | None = None) -> Iterator[StoredSample]:
    """All stored samples, shard by shard in row order, with one shard open at a time."""
    # Not at the top: it imports torch, and the tests that kill a writer start many processes with this module.
    from extractor.store.reader import ShardReader

    for index in sorted(shard_indices(output)):
        with ShardReader(names.shard_folder(output, index), taps) as shard:
            yield from shard
