"""Samples to shards to batches to chunks: pure functions of the token counts and the geometry.

Nothing here looks at a clock, a disk, a GPU count or at what is already done. That is what makes a run
that was killed byte-identical to one that was not: a shard always holds the same samples, in the same
row order, computed in the same batches.

A shard's membership depends on `shard_tokens` and `seed` alone; its batches also on `max_tokens`. Rows
of a shard stand in batch order, so a batch is one contiguous range of rows of every tap file.

A sample longer than `max_tokens` is a batch of its own. It is computed in chunks of `chunk_tokens`, each over
the keys and values of those before it, and its rows stand in the order of its tokens like any other's.
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import msgspec

from extractor.errors import BugError, ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence


class Geometry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What the plan depends on besides the token counts; recorded in every shard.

    Attributes:
        max_tokens: token budget of one batch.
        shard_tokens: a shard is closed before it would hold more tokens than this.
        seed: None keeps the order of the input; a number shuffles the samples first.
        chunk_tokens: samples longer than `max_tokens` are computed in chunks of so many tokens. Left out
            (and not written) where none may be longer: such a plan is that of a release without chunks.
    """

    max_tokens: int
    shard_tokens: int
    seed: int | None = None
    chunk_tokens: int | msgspec.UnsetType = msgspec.UNSET

    def __post_init__(self) -> None:
        """Refuses chunks that are no batches."""
        if self.chunk_tokens is not msgspec.UNSET and not 1 <= self.chunk_tokens <= self.max_tokens:
            raise ValueError(
                f"chunk_tokens = {self.chunk_tokens}: expected 1 to max_tokens = {self.max_tokens}"
            )


class Shard(msgspec.Struct, frozen=True):
    """The unit of work, retry and commit.

    Attributes:
        index: its number, from 0; shards are committed in any order.
        batches: sample indices of each batch, in the order in which they are computed and stored.
        num_tokens: tokens of all its samples.
    """

    index: int
    batches: tuple[tuple[int, ...], ...]
    num_tokens: int

    @property
    def samples(self) -> tuple[int, ...]:
        """Sample indices in row order."""
        return tuple(sample for batch in self.batches for sample in batch)


def plan_shards(lengths: Sequence[int], geometry: Geometry) -> list[Shard]:
    """Cuts the samples into shards and each shard into batches.

    Args:
        lengths: tokens of sample i, at least 1; more than `geometry.max_tokens` only with `chunk_tokens`.
        geometry: budgets, in tokens.

    Returns:
        Shards that together hold each sample index exactly once.

    Raises:
        ConfigError: a sample is empty, or longer than a batch may be and there are no chunks.
    """
    has_chunks = geometry.chunk_tokens is not msgspec.UNSET
    for index, length in enumerate(lengths):
        if length < 1 or (length > geometry.max_tokens and not has_chunks):
            raise ConfigError(
                f"sample {index} has {length} tokens; a batch holds 1 to {geometry.max_tokens}",
                remedy="raise batch.max_tokens, or lower data.max_len",
                code="sample_too_long",
            )
    order = list(range(len(lengths)))
    if geometry.seed is not None:
        random.Random(geometry.seed).shuffle(order)  # noqa: S311 - reproducible order, not a secret
    shards: list[Shard] = []
    members: list[int] = []
    num_tokens = 0
    for sample in order:
        if members and num_tokens + lengths[sample] > geometry.shard_tokens:
            shards.append(_make_shard(len(shards), members, lengths, geometry))
            members, num_tokens = [], 0
        members.append(sample)
        num_tokens += lengths[sample]
    if members:
        shards.append(_make_shard(len(shards), members, lengths, geometry))
    return shards


def plan_batches(samples: Sequence[int], lengths: Sequence[int], max_tokens: int) -> list[tuple[int, ...]]:
    """Packs samples into batches of at most `max_tokens` tokens, first fit by decreasing length.

    A longer sample is a batch of its own.

    Long samples first: a batch that is too big for the machine then fails at once, not after hours.
    Ties are broken by sample index, so the result is a function of its arguments alone.
    """
    batches: list[list[int]] = []
    room: list[int] = []
    for sample in sorted(samples, key=lambda s: (-lengths[s], s)):
        for slot, free in enumerate(room):
            if lengths[sample] <= free:
                batches[slot].append(sample)
                room[slot] -= lengths[sample]
                break
        else:
            batches.append([sample])
            room.append(max_tokens - lengths[sample])
    return [tuple(batch) for batch in batches]


def chunk_edges(length: int, geometry: Geometry) -> tuple[tuple[int, int], ...]:
    """Where a sample is cut for computing: (first token, end) of each chunk, in order.

    A sample that fits a batch is one chunk. A longer one is cut every `chunk_tokens`; its last chunk is what
    is left, and may be a single token.

    Args:
        length: tokens of the sample, accepted by `plan_shards` with this geometry.
        geometry: budgets, in tokens.

    Raises:
        BugError: the sample is longer than a batch, and the geometry has no chunks.
    """
    if length <= geometry.max_tokens:
        return ((0, length),)
    step = geometry.chunk_tokens
    if step is msgspec.UNSET:
        raise BugError(f"a sample of {length} tokens, a budget of {geometry.max_tokens}, and no chunks")
    return tuple((begin, min(begin + step, length)) for begin in range(0, length, step))


def shard_tokens_for(shard_bytes: int, bytes_per_token: int) -> int:
    """Tokens whose states fill `shard_bytes`; at least 1, since a shard holds at least one sample."""
    return max(1, shard_bytes // bytes_per_token)


def _make_shard(index: int, members: list[int], lengths: Sequence[int], geometry: Geometry) -> Shard:
    batches = plan_batches(members, lengths, geometry.max_tokens)
    return Shard(index, tuple(batches), sum(lengths[sample] for sample in members))
