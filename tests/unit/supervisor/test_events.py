import json

import pytest

from extractor.supervisor.events import KEPT_LINES, TAIL_BYTES, Event, EventLog, Who, as_line


def test_events_are_numbered_on_over_restarts(tmp_path):
    path = tmp_path / "events.jsonl"
    first = EventLog(path)
    first.add(Event.READY, load_s=2.0)
    first.close()
    second = EventLog(path)
    second.add(Event.SHARD_DONE, shard=3)
    second.close()

    lines = [json.loads(line) for line in path.read_bytes().splitlines()]
    assert [line["number"] for line in lines] == [1, 2]
    assert [line.text for line in second.tail] == ["model ready after 2 s", "shard 3 done"]


def test_a_line_that_a_power_cut_left_does_not_swallow_the_next_one(tmp_path):
    path = tmp_path / "events.jsonl"
    path.write_bytes(
        b'{"time_utc": "2026-01-01T00:00:00+00:00", "number": 7, "event": "ready"}\n{"time_utc": "20'
    )

    log = EventLog(path)
    log.add(Event.FINISHED)
    log.close()

    assert json.loads(path.read_bytes().splitlines()[-1])["number"] == 8


def test_the_end_of_a_long_log_is_enough(tmp_path):
    path = tmp_path / "events.jsonl"
    first = EventLog(path)
    for shard in range(2000):
        first.add(Event.SHARD_DONE, shard=shard)
    first.close()
    assert path.stat().st_size > TAIL_BYTES

    second = EventLog(path)
    second.close()

    assert len(second.tail) == KEPT_LINES
    assert second.tail[-1].number == 2000


def test_an_action_tells_who_asked_for_what(tmp_path):
    log = EventLog(tmp_path / "events.jsonl")
    who = Who("ops1", 1000, 77, "ssh 192.0.2.1")
    log.add(Event.ACTION, who=who, action="pause", depth="hold", old="running", new="holding", result="ok")
    log.add(Event.ACTION, who=who, action="resume", old="running", new="running", result="it is not paused")
    log.close()

    assert [(line.who, line.text) for line in log.tail] == [
        ("ops1", "pause hold: running -> holding"),
        ("ops1", "resume refused: it is not paused"),
    ]
    assert json.loads((tmp_path / "events.jsonl").read_bytes().splitlines()[0])["who"] == {
        "user": "ops1",
        "uid": 1000,
        "pid": 77,
        "origin": "ssh 192.0.2.1",
    }


@pytest.mark.parametrize(
    "values", [{}, {"event": "from the future", "time_utc": 3}, {"event": "shard_done"}, {"who": "somebody"}]
)
def test_a_line_of_another_version_is_shown_not_refused(values):
    assert as_line(values, 4).number == 4


def test_a_full_disk_loses_lines_and_no_run(tmp_path):
    class FullDisk:
        """A file that takes `room` bytes more, as a file on a full disk does."""

        def __init__(self, path):
            self.inner = path.open("ab", buffering=0)
            self.room = 10_000

        def write(self, line):
            if not self.room:
                raise OSError(28, "No space left on device")
            taken = self.inner.write(line[: self.room])
            self.room -= taken
            return taken

        def __getattr__(self, name):
            return getattr(self.inner, name)

    path = tmp_path / "events.jsonl"
    log = EventLog(path)
    log.close()
    log._file = disk = FullDisk(path)
    log.add(Event.SHARD_DONE, shard=1)
    disk.room = 20
    log.add(Event.SHARD_DONE, shard=2)
    log.add(Event.SHARD_DONE, shard=3)
    disk.room = 10_000
    log.add(Event.SHARD_DONE, shard=4)
    log.close()

    lines = [json.loads(line) for line in path.read_bytes().splitlines()]
    assert [line.get("shard") for line in lines] == [1, None, 4]
    assert lines[1]["text"] == "2 events could not be written: disk full"
    assert [line.text for line in log.tail] == [f"shard {shard} done" for shard in (1, 2, 3, 4)]
