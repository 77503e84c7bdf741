"""Samples to shards to batches: pure functions of the token counts and the geometry.

Nothing here looks at a clock, a disk, a GPU count or at what is already done. That is what makes a run
that was killed byte-identical to one that was not: a shard always holds the same samples, in the same
row order, computed in the same batches.

A shard's membership depends on `shard_tokens` and `seed` alone; its batches also on `max_tokens`. Rows
of a shard stand in batch order, so a batch is one contiguous range of rows of every tap file.
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import msgspec

from extractor.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence


class Geometry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What the plan depends on besides the token counts; recorded in every shard.

    Attributes:
        max_tokens: token budget of one batch.
        shard_tokens: a shard is closed before it would hold more tokens than this.
        seed: None keeps the order of the input; a number shuffles the samples first.
    """

    max_tokens: int
    shard_tokens: int
    seed: int | None = None


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
        lengths: tokens of sample i, all in 1..geometry.max_tokens.
        geometry: budgets, in tokens.

    Returns:
        Shards that together hold each sample index exactly once.

    Raises:
        ConfigError: a sample is empty or longer than a batch may be.
    """
    for index, length in enumerate(lengths):
        if not 1 <= length <= geometry.max_tokens:
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


def shard_tokens_for(shard_bytes: int, bytes_per_token: int) -> int:
    """Tokens whose states fill `shard_bytes`; at least 1, since a shard holds at least one sample."""
    return max(1, shard_bytes // bytes_per_token)


def _make_shard(index: int, members: list[int], lengths: Sequence[int], geometry: Geometry) -> Shard:
    batches = plan_batches(members, lengths, geometry.max_tokens)
    return Shard(index, tuple(batches), sum(lengths[sample] for sample in members))
