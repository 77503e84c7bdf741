"""Runs as lines of text."""

import datetime
import json
from pathlib import Path

import msgspec
import pytest

from console import report
from extractor.folders import RunFolder
from extractor.protocol import api
from extractor.protocol.states import Depth, Pause, Reason, State
from tests.support.fake_supervisor import START_UTC, snapshot_of

STYLE = report.Style(now_utc=START_UTC + 60, zone=datetime.UTC)
RUN = RunFolder(Path("/runs/small-1a2b"))
HOSTILE = "\x1b[31mred\x07\x9b2J [bold]markup[/] \u202egnol"


def lines_of(snapshot, style=STYLE, *, is_live=True):
    return report.status(snapshot, style, is_live=is_live)


def line_of(label, snapshot):
    return [line for line in lines_of(snapshot) if line.startswith(f"  {label}")]


def test_a_running_run_is_described_whole():
    text = "\n".join(lines_of(snapshot_of(RUN, why="computing shard 12")))
    for expected in (
        "small-1a2b  ● RUNNING since",
        "why      computing shard 12",
        "12.4 M / 30.0 M (41.3 %) tokens; 953 / 2,310 shards, 2 running, 1 failed",
        "3 samples quarantined",
        "4,980 tok/s now, 4,874 tok/s in the mean",
        "1h05m of computing left (55m00s to 1h20m), at",
        "/data: 2.31 TB free, 100 GB reserved; this run has 711 GB and needs 1.00 TB more",
        "enough",
        "none: no driver",
        "0: ready, pid 4711, shard 12, batch 3",
        "layer_002, final; ids after [2, 7], before [3, 8]; 57.3 kB per token",
        "ops2  text of an event",
    ):
        assert expected in text


def test_a_pause_is_told_with_reason_author_and_note():
    pauses = (Pause(Reason.DISK, Depth.HOLD, START_UTC, "auto", "99 GB free"),)
    snapshot = msgspec.structs.replace(
        snapshot_of(RUN), state=api.StateInfo(State.HELD, START_UTC, "disk", pauses)
    )
    assert line_of("paused", snapshot)[0].endswith(": 99 GB free")
    assert "hold by disk (auto) since" in line_of("paused", snapshot)[0]
    assert "‖ HELD by disk" in lines_of(snapshot)[0]


def test_without_a_supervisor_the_first_line_says_so_and_how_old_the_rest_is():
    first = lines_of(snapshot_of(RUN, State.HELD), is_live=False)[0]
    assert first.startswith("small-1a2b  not running; last known state, of ")
    assert "HELD" in first


def test_a_run_of_which_nothing_is_known_yet_has_a_report():
    bare = snapshot_of(
        RUN, State.CREATED, progress=None, rates=None, disk=None, telemetry=None, replicas=(), events=()
    )
    assert line_of("gpus", bare) == ["  gpus     not sampled yet"]


def test_what_is_not_known_of_the_end_is_said():
    rates = api.Rates(0.0, None, (), 1.0, None, None, None, None, 0.0)
    assert line_of("finish", snapshot_of(RUN, rates=rates)) == ["  finish   not known"]
    assert line_of("speed", snapshot_of(RUN, rates=rates)) == ["  speed    0 tok/s now, unknown in the mean"]


@pytest.mark.parametrize("ascii_only", [False, True])
def test_no_text_from_outside_reaches_the_terminal_as_more_than_text(ascii_only):
    snapshot = snapshot_of(RUN, why=HOSTILE, events=(api.EventLine(1, START_UTC, "note", HOSTILE, HOSTILE),))
    style = report.Style(now_utc=START_UTC, ascii_only=ascii_only)
    event = report.event(json.dumps({"event": "note", "error": HOSTILE}), style)
    text = "".join([*lines_of(snapshot, style), event, report.event(HOSTILE, style)])
    assert not any(char in text for char in "\x1b\x07\x9b\u202e\n")
    assert "[bold]markup[/]" in text
    assert text.isascii() or not ascii_only


def test_a_finished_run_has_no_time_left():
    assert line_of("finish", snapshot_of(RUN, State.FINISHED)) == []


def test_only_lines_that_differ_are_changes():
    old = lines_of(snapshot_of(RUN, why="shard 12"))
    assert report.changed(old, old) == []
    assert report.changed(old, lines_of(snapshot_of(RUN, why="shard 13"))) == ["  why      shard 13"]


def test_the_list_shows_runs_that_never_had_a_state():
    rows = [
        report.Row("small-1a2b", "/a", True, snapshot_of(RUN)),
        report.Row("other-3c4d", "/b", False, None),
    ]
    heading, first, second = report.table(rows, STYLE)
    assert heading.split() == ["RUN", "SUPERVISOR", "STATE", "TOKENS", "SHARDS", "FINISH"]
    assert "● RUNNING" in first
    assert second.split() == ["other-3c4d", "not", "running", "unknown"]


def test_an_event_keeps_everything_it_says():
    line = json.dumps(
        {
            "time_utc": "2026-12-01T10:00:00.000+00:00",
            "number": 4,
            "event": "action",
            "who": {"user": "ops1", "uid": 7},
            "action": "pause",
            "depth": None,
            "revision": 3,
            "new": "holding",
        }
    )
    said = report.event(line, STYLE)
    assert said == "2026-12-01 10:00:00  ops1  action  action=pause  revision=3  new=holding"
