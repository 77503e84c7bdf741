"""What a person sees while a run works: a bar with rate and ETA on a terminal, plain lines otherwise."""

from __future__ import annotations

import time
from collections import Counter
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from extractor import protocol
from extractor.estimate import eta
from extractor.families import unverified_note
from extractor.quantities import bytes_words, duration_words

if TYPE_CHECKING:
    from extractor.commands.output import Output
    from extractor.protocol import AnyReport

LINE_EVERY_S = 10.0
STAGES = {"load": "loading the model", "proof": "proving the capture", "warm-up": "warming up the kernels"}


class RunProgress:
    """Shows one run. Use as a context manager."""

    def __init__(self, out: Output, *, device: str, total_tokens: int, total_shards: int) -> None:
        """Starts with nothing done.

        Args:
            out: where to print.
            device: where the model runs.
            total_tokens: that this run will compute.
            total_shards: likewise.
        """
        self._out = out
        self._device = device
        self._total_tokens = total_tokens
        self._total_shards = total_shards
        self._tokens = 0
        self._in_hand: Counter[int] = Counter()
        self._shards = 0
        self._started_at: float | None = None
        self._line_at = 0.0
        console = Console(file=out.stderr)
        self._bar: Progress | None = None
        if console.is_terminal:
            self._bar = Progress(
                TextColumn("{task.description}"),
                BarColumn(),
                TextColumn("{task.percentage:>3.0f} %"),
                TextColumn("{task.fields[rate]}"),
                TimeRemainingColumn(),
                console=console,
                transient=True,
            )
            self._task = self._bar.add_task("starting", total=total_tokens, rate="")

    def __enter__(self) -> RunProgress:
        """Starts the bar."""
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Ends the bar."""
        if self._bar is not None:
            self._bar.stop()

    def on_report(self, report: AnyReport) -> None:
        """Takes a report of the worker."""
        match report:
            case protocol.Stage():
                self._say(STAGES.get(report.name, report.name))
            case protocol.Ready():
                self._started_at = time.monotonic()
                worst = max((line.max_rel_err for line in report.proof), default=0.0)
                self._say(
                    f"model ready after {report.load_s:.0f} s; start-up proof passed "
                    f"({len(report.proof)} checks, largest error {worst:.1e}); "
                    f"host buffers {bytes_words(report.buffer_bytes)}"
                )
                warning = unverified_note(report.versions.get("sglang", "unknown"), self._device)
                if warning is not None:
                    self._say(f"warning: {warning}")
            case protocol.BatchDone():
                self._tokens += report.num_tokens
                self._in_hand[report.shard] += report.num_tokens
                self._show()
            case protocol.ShardDone():
                self._shards += 1
                self._show()
            case protocol.ShardFailed():
                # Its batches will be computed, and counted, again.
                self._tokens -= self._in_hand.pop(report.shard, 0)
                self._say(f"shard {report.shard} failed: {report.error}")
            case _:
                pass

    def stopping(self) -> None:
        """Says that the run stops after the batch in flight."""
        self._say("stopping after the batch in flight (again to stop at once)")

    def _say(self, text: str) -> None:
        if self._bar is None:
            self._out.note(text)
        else:
            self._bar.console.print(text, markup=False, highlight=False)

    def _show(self) -> None:
        now = time.monotonic()
        elapsed = now - (self._started_at or now)
        rate = f"{self._tokens / elapsed:,.0f} tokens/s" if elapsed > 0 else ""
        done = f"{self._shards}/{self._total_shards} shards"
        if self._bar is not None:
            self._bar.update(self._task, completed=self._tokens, description=done, rate=rate)
            return
        # The last shard always gets its line.
        if now - self._line_at < LINE_EVERY_S and self._shards < self._total_shards:
            return
        self._line_at = now
        left = eta(tokens_left=self._total_tokens - self._tokens, tokens_done=self._tokens, running_s=elapsed)
        until = "" if left is None else f", {duration_words(left.mean_s)} left"
        self._out.note(f"{done}, {self._tokens:,} of {self._total_tokens:,} tokens, {rate}{until}")
