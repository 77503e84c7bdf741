"""Runs as plain lines of text: what `status`, `list` and `events` print. Pure.

Owns the order and the labels; signs, units and roundings are from `console.words`. A line begins with a label, so
that it can be found and compared: `changed` gives the lines that differ from an earlier report. No line contains
a control character, whatever a name, a reason or an event says: text from outside is data.
"""

from __future__ import annotations

import datetime
import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from console import words
from console.widgets.lines import visible
from extractor.protocol.api import Unavailable
from extractor.protocol.states import State
from extractor.quantities import UNKNOWN, bytes_words, duration_words

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from extractor.protocol.api import (
        Disk,
        EventLine,
        Progress,
        Rates,
        ReplicaInfo,
        Snapshot,
        StateInfo,
        Telemetry,
    )

NUM_EVENTS = 5
LABEL_WIDTH = 9


@dataclass(frozen=True, kw_only=True)
class Style:
    """How to write.

    Attributes:
        now_utc: the present: moments near it are written shorter.
        zone: of the times; None: the machine's.
        ascii_only: no sign beyond ASCII.
    """

    now_utc: float
    zone: datetime.tzinfo | None = None
    ascii_only: bool = False

    def when(self, utc: float) -> str:
        """A moment in local time."""
        return words.when_words(utc, now_utc=self.now_utc, zone=self.zone)

    def safe(self, text: str) -> str:
        """Text that a terminal shows and does not obey."""
        return visible(text, ascii_only=self.ascii_only)


def status(snapshot: Snapshot, style: Style, *, is_live: bool) -> list[str]:
    """A run on some twenty lines.

    Args:
        snapshot: the last one.
        style: how to write.
        is_live: whether it comes from a supervisor; else the first line says that none runs, and how old it is.
    """
    run, info = snapshot.run, snapshot.state
    state = words.state_words(info, ascii_only=style.ascii_only)
    head = f"{state} since {style.when(info.since_utc)}"
    if not is_live:
        head = f"not running; last known state, of {style.when(snapshot.time_utc)}: {head}"
    lines = [f"{run.name}  {head}"]
    lines += _labelled("why", _why(info))
    for pause in info.pauses:
        lines += _labelled("paused", [words.pause_words(pause, now_utc=style.now_utc, zone=style.zone)])
    if snapshot.progress is not None:
        lines += _labelled("progress", _progress(snapshot.progress))
    if snapshot.rates is not None:
        lines += _labelled("speed", [_speed(snapshot.rates)])
        if info.state != State.FINISHED:
            lines += _labelled("finish", _finish(snapshot.rates, style))
    if snapshot.disk is not None:
        lines += _labelled("disk", _disk(snapshot.disk, is_prepared=snapshot.progress is not None))
    lines += _labelled("gpus", _gpus(snapshot.telemetry))
    lines += _labelled("replicas", [_replica(replica) for replica in snapshot.replicas])
    lines += _labelled("taps", _taps(snapshot))
    lines += _labelled("output", [run.output])
    lines += _labelled("events", [_event(event, style) for event in snapshot.events[-NUM_EVENTS:]])
    return [style.safe(line) for line in lines]


def changed(old: Sequence[str], new: Sequence[str]) -> list[str]:
    """The lines of a report that an earlier one does not have."""
    known = set(old)
    return [line for line in new if line not in known]


def _labelled(label: str, values: Iterable[str]) -> list[str]:
    # Each line has its label, also the second of its kind: a line must mean the same when it is printed alone.
    return [f"  {label:{LABEL_WIDTH}}{value}" for value in values]


def _why(info: StateInfo) -> list[str]:
    return [line for line in info.why.splitlines() if line.strip()]


def _progress(progress: Progress) -> list[str]:
    shards = f"{progress.shards_done:,} / {progress.shards_total:,} shards"
    more = [
        f"{count:,} {what}"
        for count, what in (
            (progress.shards_running, "running"),
            (progress.shards_failed, "failed"),
            (progress.quarantined, "samples quarantined"),
            (progress.rejected, "samples rejected"),
        )
        if count
    ]
    tokens = words.of_words(progress.tokens_done, progress.tokens_total)
    return [f"{tokens} tokens; {', '.join([shards, *more])}"]


def _speed(rates: Rates) -> str:
    return f"{words.rate_words(rates.tokens_per_s_now)} now, {words.rate_words(rates.tokens_per_s_mean)} in the mean"


def _finish(rates: Rates, style: Style) -> list[str]:
    if rates.eta_s is None:
        return ["not known"]
    band = ""
    if rates.eta_low_s is not None and rates.eta_high_s is not None:
        low, high = duration_words(rates.eta_low_s), duration_words(rates.eta_high_s)
        band = f" ({low} to {high})"
    moment = "" if rates.finish_utc is None else f", at {style.when(rates.finish_utc)}"
    return [f"{duration_words(rates.eta_s)} of computing left{band}{moment}"]


def _disk(disk: Disk, *, is_prepared: bool) -> list[str]:
    if not is_prepared:
        # What the run needs and keeps free is not known yet: zeros would read like facts.
        return [f"{disk.path}: {bytes_words(disk.free_bytes)} free", disk.verdict]
    rate = (
        ""
        if disk.write_bytes_per_s is None
        else f"; writes {bytes_words(disk.write_bytes_per_s)}/s in the mean"
    )
    full = "" if disk.full_in_s is None else f"; full in {duration_words(disk.full_in_s)} at this rate"
    return [
        f"{disk.path}: {bytes_words(disk.free_bytes)} free, {bytes_words(disk.reserve_bytes)} "
        f"reserved; this run has {bytes_words(disk.run_bytes)} and needs "
        f"{bytes_words(disk.needed_bytes)} more{rate}{full}",
        disk.verdict,
    ]


def _gpus(telemetry: Telemetry | None) -> list[str]:
    if telemetry is None:
        return ["not sampled yet"]
    if isinstance(telemetry.gpus, Unavailable):
        return [f"none: {words.unavailable_words(telemetry.gpus)}"]
    return [words.gpu_words(gpu) for gpu in telemetry.gpus] or ["none"]


def _replica(replica: ReplicaInfo) -> str:
    parts = [f"{replica.name}: {replica.phase}"]
    if replica.pid is not None:
        parts.append(f"pid {', '.join(map(str, replica.pids or (replica.pid,)))}")
    if replica.shard is not None:
        parts.append(f"shard {replica.shard}" + ("" if replica.batch is None else f", batch {replica.batch}"))
    if replica.restarts:
        parts.append(f"restarted {replica.restarts} times")
    return ", ".join(parts)


def _taps(snapshot: Snapshot) -> list[str]:
    run = snapshot.run
    if not run.taps:
        return []
    per_token = f"; {bytes_words(run.bytes_per_token)} per token" if run.bytes_per_token else ""
    ids = f"ids after {list(run.ids_after)}, before {list(run.ids_before)}"
    return [f"{', '.join(run.taps)}; {ids}{per_token}"]


def _event(event: EventLine, style: Style) -> str:
    return words.event_words(event, now_utc=style.now_utc, zone=style.zone)


@dataclass(frozen=True)
class Row:
    """One run of the list.

    Attributes:
        snapshot: the last one; None if it never got so far.
    """

    name: str
    folder: str
    is_live: bool
    snapshot: Snapshot | None


def table(rows: Sequence[Row], style: Style) -> list[str]:
    """The list of runs, one on a line under a heading."""
    cells = [
        ("RUN", "SUPERVISOR", "STATE", "TOKENS", "SHARDS", "FINISH"),
        *(_cells(row, style) for row in rows),
    ]
    safe = [[style.safe(cell) for cell in line] for line in cells]
    widths = [max(map(len, column)) for column in zip(*safe, strict=True)]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in safe
    ]


def _cells(row: Row, style: Style) -> tuple[str, ...]:
    supervisor = supervisor_words(is_live=row.is_live)
    if row.snapshot is None:
        return (row.name, supervisor, UNKNOWN, "", "", "")
    progress, rates = row.snapshot.progress, row.snapshot.rates
    tokens = shards = ""
    if progress is not None:
        tokens = words.of_words(progress.tokens_done, progress.tokens_total)
        shards = f"{progress.shards_done:,} / {progress.shards_total:,}"
    is_computing = row.is_live and rates is not None and rates.finish_utc is not None
    finish = style.when(rates.finish_utc) if is_computing and rates and rates.finish_utc else ""
    state = words.state_words(row.snapshot.state, ascii_only=style.ascii_only)
    return (row.name, supervisor, state, tokens, shards, finish)


def supervisor_words(*, is_live: bool) -> str:
    """Whether a run has a supervisor, as `--json` says it as well."""
    return "running" if is_live else "not running"


def event(line: str, style: Style) -> str:
    """One line of events.jsonl for people: moment, who, event, and what else it says; no other text is changed."""
    try:
        values = json.loads(line)
    except ValueError:
        return style.safe(line)
    if not isinstance(values, dict):
        return style.safe(line)
    who = values.pop("who", None)
    name = str(who.get("user", "?")) if isinstance(who, dict) else "auto"
    moment = _moment(values.pop("time_utc", ""), style.zone)
    what = str(values.pop("event", "?"))
    values.pop("number", None)
    facts = [f"{key}={_fact(value)}" for key, value in values.items() if value is not None]
    return style.safe("  ".join([moment, name, what, *facts]))


def _moment(text: object, zone: datetime.tzinfo | None) -> str:
    try:
        moment = datetime.datetime.fromisoformat(str(text))
    except ValueError:
        return str(text)
    return f"{moment.astimezone(zone):%Y-%m-%d %H:%M:%S}"


def _fact(value: Any) -> str:
    # Any: whatever JSON can say.
    return value if isinstance(value, str) else json.dumps(value)
