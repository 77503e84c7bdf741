"""The writing of one shard by several threads: one lane per tap file, and the step that ends it.

Owns the state of a shard between `open_shard` and its commit or failure. A lane is served by at most one
thread at a time and takes its batches in order, so the hash of a file can grow with it. The states:

    OPEN -> FINISHING -> PUBLISHING -> COMMITTED
      |         |            |
      `---------+------------+--------> FAILED      an error, or abandoned

A shard that several ranks write together (`extractor.store.shares`) has a writer on each, with the lanes of its
own taps. Those of rank 1 and on end with `on_share` in place of publishing; that of rank 0 publishes when its own
files are complete and every share has come (`take_share`), and fails with the first share that failed.

Invariants: `on_commit` (or `on_share`) or `on_error` is called once, never both for the same fault, and neither
for an abandoned shard; once FAILED, nothing more is written, and every batch is still settled and released;
`on_error` comes after the part folder is gone, so the shard can be opened again from there. A share that failed
is handed over too, in place of `on_error`, also after its part folder is gone.
"""

from __future__ import annotations

import enum
import logging
import threading
from collections import deque
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import msgspec
import xxhash

from extractor.errors import BugError
from extractor.store.block import Batch
from extractor.store.folder import PartFolder
from extractor.store.record import FileRecord, Quarantined, ShardRecord, ShardSpec
from extractor.store.shares import Share, WriteError, require_agreement
from extractor.store.tensors import ITEM_BYTES

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from extractor.store.block import HostBlock, Sample
    from extractor.store.filesystem import FileSystem
    from extractor.store.tensors import StatesWriter

__all__ = [
    "FileRecord",
    "Lane",
    "Quarantined",
    "Scheduler",
    "ShardRecord",
    "ShardSpec",
    "ShardState",
    "ShardWriter",
]

_log = logging.getLogger(__name__)


class ShardState(enum.Enum):
    """Where a shard stands."""

    OPEN = "open"
    FINISHING = "finishing"
    PUBLISHING = "publishing"
    COMMITTED = "committed"
    FAILED = "failed"


class Scheduler(Protocol):
    """Who gives lanes their threads."""

    def schedule(self, lane: Lane) -> None:
        """Has a thread call `lane.shard.serve(lane)` soon. Never blocks on work."""


class Lane:
    """The file of one tap and the batches that wait for it. Guarded by its shard's lock."""

    def __init__(self, shard: ShardWriter, tap: str) -> None:
        self.shard = shard
        self.tap = tap
        self.pending: deque[Batch] = deque()
        self.is_scheduled = False
        self.is_complete = False
        self.states: StatesWriter | None = None


class ShardWriter:
    """One shard that is being written. All methods may be called from any thread; none blocks on a disk."""

    def __init__(
        self,
        spec: ShardSpec,
        files: FileSystem,
        scheduler: Scheduler,
        on_commit: Callable[[ShardRecord], None],
        on_error: Callable[[int, BaseException], None],
        *,
        on_share: Callable[[Share], None],
        attempt: int = 0,
    ) -> None:
        """Made by `WriterPool.open_shard`. Touches no disk."""
        self.attempt = attempt
        self._spec = spec
        self._scheduler = scheduler
        self._on_commit = on_commit
        self._on_error = on_error
        self._on_share = on_share
        self._files = files
        self._folder = PartFolder(spec, files, attempt)
        self._row_bytes = spec.hidden_size * ITEM_BYTES[spec.dtype]
        self._lanes = [Lane(self, tap.name) for tap in spec.own_taps]
        self._compared = [tap.name for tap in spec.taps] if spec.num_ranks > 1 else []
        self._awaited = set(range(1, spec.num_ranks)) if spec.rank == 0 else set()
        self._shares: dict[int, Share] = {}
        self._batches: list[Batch] = []
        self._lock = threading.Lock()
        self._prepare_lock = threading.Lock()
        self._is_prepared = False
        self._is_cleaned_up = False
        self._num_in_step = 0
        self._state = ShardState.OPEN
        self._error: BaseException | None = None

    @property
    def index(self) -> int:
        """Number of the shard."""
        return self._spec.index

    @property
    def state(self) -> ShardState:
        """Where it stands."""
        return self._state

    def submit(self, block: HostBlock, samples: Sequence[Sample]) -> None:
        """Hands over the next batch. Never blocks: what bounds it is the engine's pool of blocks.

        Args:
            block: its rows; released once every tap has them. Also taken when the shard has failed.
            samples: its samples in row order.

        Raises:
            BugError: block and samples do not fit, or `finish` was called; the block is not taken.
        """
        batch = Batch(block, samples, len(self._lanes), self._compared)
        with self._lock:
            if self._state not in {ShardState.OPEN, ShardState.FAILED}:
                raise BugError(f"shard {self.index}: a batch was submitted after finish()")
            if self._state is ShardState.OPEN:
                self._batches.append(batch)
            for lane in self._lanes:
                lane.pending.append(batch)
                self._schedule(lane)

    def finish(self) -> None:
        """Says that no more batches come; the shard is committed when its files are complete."""
        with self._lock:
            if self._state is ShardState.OPEN:
                self._state = ShardState.FINISHING
                for lane in self._lanes:
                    self._schedule(lane)

    def abandon(self) -> None:
        """Gives the shard up: its files are removed and its blocks released, without a call of `on_error`.

        Too late once the last step runs: then the shard is committed and `on_commit` is called.
        """
        with self._lock:
            if self._state in {ShardState.OPEN, ShardState.FINISHING}:
                self._state = ShardState.FAILED
                # A lane that is through with its work has nobody to remove the folder after it.
                self._schedule(self._lanes[0])

    def take_share(self, share: Share) -> bool:
        """Takes what another rank has written of this shard, or why it has not.

        Returns:
            Whether it was taken; if not, this shard has ended, and the share is the caller's to remove.

        Raises:
            BugError: no share of this rank is awaited.
        """
        with self._lock:
            if share.rank not in self._awaited or share.rank in self._shares:
                raise BugError(f"shard {self.index}: a share of rank {share.rank} came, which none waits for")
            if self._state not in {ShardState.OPEN, ShardState.FINISHING}:
                return False
            self._shares[share.rank] = share
            if share.error is not None:
                self._state = ShardState.FAILED
                self._error = share.error.as_exception(share.rank)
            # It may be the last thing that was missing, and all lanes may be through with their work.
            self._schedule(self._lanes[0])
        return True

    def serve(self, lane: Lane) -> None:
        """One step of one lane: a batch, or the end of its file. Called by a thread of the pool. Blocking.

        A border handler: whatever goes wrong moves the shard to FAILED and is handed to `on_error`.
        """
        try:
            self._step(lane)
        except BaseException as error:  # noqa: BLE001 - border handler of the writer threads
            self._fail(error, self._folder.tap_path(lane.tap))
        if self._is_last_lane(lane):
            self._publish()
        if self._must_clean_up():
            self._clean_up()

    def _step(self, lane: Lane) -> None:
        with self._lock:
            self._num_in_step += 1
            has_failed = self._state is ShardState.FAILED
            is_finishing = self._state is ShardState.FINISHING
            batch = lane.pending.popleft() if lane.pending else None
        if batch is None:
            if is_finishing and not lane.is_complete:
                self._folder.finish_tap(lane.tap, self._file_of(lane))
                lane.is_complete = True
            return
        try:
            batch.settle()
            if not has_failed:
                states = self._file_of(lane)
                for piece in batch.pieces(lane.tap, self._row_bytes):
                    states.append(piece)
        finally:
            batch.leave()

    def _file_of(self, lane: Lane) -> StatesWriter:
        """The open file of a lane; the first lane to ask makes the folder."""
        if lane.states is None:
            with self._prepare_lock:
                if not self._is_prepared:
                    self._folder.prepare()
                    self._is_prepared = True
            lane.states = self._folder.create_tap(lane.tap)
        return lane.states

    def _is_last_lane(self, lane: Lane) -> bool:
        """Ends a step; true for the one lane after which the shard is ready to be published."""
        with self._lock:
            self._num_in_step -= 1
            lane.is_scheduled = False
            if lane.pending or (self._state is ShardState.FINISHING and not lane.is_complete):
                self._schedule(lane)
            elif self._state is ShardState.FINISHING and self._is_whole():
                self._state = ShardState.PUBLISHING
                return True
            return False

    def _is_whole(self) -> bool:
        return self._awaited <= self._shares.keys() and all(lane.is_complete for lane in self._lanes)

    def _publish(self) -> None:
        try:
            planned = self._spec.samples
            given = tuple(index for batch in self._batches for index in batch.sample_indices)
            if given != planned:
                raise BugError(  # noqa: TRY301 - it takes the same way as an error of the disk
                    f"shard {self.index}: {len(given)} samples came, not the {len(planned)} planned ones"
                )
            quarantined = [entry for batch in self._batches for entry in batch.quarantined()]
            magnitudes = {tap: self._digest(tap) for tap in self._compared}
            if self._spec.rank:
                self._hand_over(quarantined, magnitudes)
                return
            for share in self._shares.values():
                require_agreement(share, quarantined, magnitudes)
                self._folder.adopt(Path(share.folder), share.files)
            stored = [sample for batch in self._batches for sample in batch.stored()]
            record = self._folder.publish(
                [(sample.index, sample.input_ids, sample.loss_mask) for sample in stored], quarantined
            )
        except BaseException as error:  # noqa: BLE001 - border handler of the writer threads
            self._fail(error, self._folder.path)
            return
        with self._lock:
            self._state = ShardState.COMMITTED
            self._batches.clear()
        try:
            self._on_commit(record)
        except BaseException as error:  # noqa: BLE001 - the shard is on the disk, but the run must hear of it
            self._report(error)

    def _hand_over(self, quarantined: Sequence[Quarantined], magnitudes: dict[str, str]) -> None:
        share = msgspec.structs.replace(
            self._empty_share(),
            files=self._folder.files,
            quarantined=tuple(quarantined),
            magnitudes=magnitudes,
        )
        with self._lock:
            self._state = ShardState.COMMITTED
            self._batches.clear()
        # The folder is no longer ours, so whatever this raises must not remove it.
        try:
            self._on_share(share)
        except BaseException as error:  # noqa: BLE001 - the share is complete, but the run must hear of it
            self._report(error)

    def _empty_share(self) -> Share:
        return Share(
            index=self.index, attempt=self.attempt, rank=self._spec.rank, folder=str(self._folder.path)
        )

    def _digest(self, tap: str) -> str:
        return str(xxhash.xxh3_128_hexdigest(b"".join(batch.magnitudes(tap) for batch in self._batches)))

    def _fail(self, error: BaseException, path: Path) -> None:
        if isinstance(error, OSError) and error.filename is None:
            # Calls on a descriptor do not know their file; whoever reads the message must.
            error.filename = str(path)
        with self._lock:
            if self._state not in {ShardState.FAILED, ShardState.COMMITTED}:
                self._state = ShardState.FAILED
                self._error = error

    def _must_clean_up(self) -> bool:
        """True once, when the shard has failed and no thread writes to it any more."""
        with self._lock:
            if self._state is not ShardState.FAILED or self._num_in_step or self._is_cleaned_up:
                return False
            self._is_cleaned_up = True
            return True

    def _clean_up(self) -> None:
        try:
            for lane in self._lanes:
                if lane.states is not None:
                    lane.states.close()
            self._folder.discard()
            for share in self._shares.values():
                self._files.remove_tree(Path(share.folder))
        except BaseException:  # noqa: BLE001 - what is left is removed by `listing.clean_parts`
            _log.warning(
                "part folder of a failed shard not removed", extra={"shard": self.index}, exc_info=True
            )
        self._batches.clear()
        if self._error is not None:
            self._report(self._error)

    def _report(self, error: BaseException) -> None:
        try:
            if self._spec.rank and self._state is ShardState.FAILED:
                self._on_share(msgspec.structs.replace(self._empty_share(), error=WriteError.of(error)))
                return
            self._on_error(self.index, error)
        except BaseException:  # noqa: BLE001 - the thread has other shards to write
            _log.exception("on_error failed", extra={"shard": self.index})

    def _schedule(self, lane: Lane) -> None:
        """Has a lane served unless it already will be. Called with the lock held."""
        if not lane.is_scheduled:
            lane.is_scheduled = True
            self._scheduler.schedule(lane)
