import pytest

from extractor.errors import DiskSpaceError
from extractor.protocol.states import Depth, Reason
from extractor.supervisor import pauses as module
from extractor.supervisor.pauses import PauseBook


def book(tmp_path, now=100.0):
    return PauseBook(tmp_path / "pauses.json", now_utc=lambda: now)


def test_a_pause_survives_its_book(tmp_path):
    book(tmp_path, now=7.0).add(Reason.OPERATOR, Depth.UNLOAD, by="ops1", note="maintenance")

    again = book(tmp_path, now=99.0)

    assert again.depth == Depth.UNLOAD
    assert [(p.reason, p.since_utc, p.by, p.note) for p in again.pauses] == [
        (Reason.OPERATOR, 7.0, "ops1", "maintenance")
    ]
    assert again.revision == 1


def test_lifting_one_reason_leaves_the_other(tmp_path):
    both = book(tmp_path)
    both.add(Reason.OPERATOR, Depth.HOLD, by="ops1")
    both.add(Reason.DISK, Depth.HOLD, by="auto")

    both.lift(Reason.DISK)

    assert [p.reason for p in book(tmp_path).pauses] == [Reason.OPERATOR]


def test_deepening_a_pause_keeps_since_when_it_is(tmp_path):
    first = book(tmp_path, now=5.0)
    first.add(Reason.OPERATOR, Depth.HOLD, by="ops1")
    second = book(tmp_path, now=50.0)
    second.add(Reason.OPERATOR, Depth.UNLOAD, by="ops2")

    assert [(p.since_utc, p.depth, p.by) for p in second.pauses] == [(5.0, Depth.UNLOAD, "ops2")]


def test_every_change_is_a_new_revision_also_after_a_restart(tmp_path):
    first = book(tmp_path)
    first.add(Reason.OPERATOR, Depth.HOLD, by="ops1")
    first.lift(Reason.OPERATOR)
    first.touch()

    assert book(tmp_path).revision == 3


@pytest.mark.parametrize("content", [b"{", b'{"version": 9, "revision": 1, "pauses": []}', b'{"mood": 1}'])
def test_an_unreadable_file_is_moved_aside_and_pauses_the_run(tmp_path, content):
    (tmp_path / "pauses.json").write_bytes(content)

    found = book(tmp_path)

    assert [p.reason for p in found.pauses] == [Reason.FAULT]
    assert found.unreadable is not None
    assert found.unreadable.read_bytes() == content
    assert "could not be read" in found.pauses[0].note


def test_a_pause_that_cannot_be_written_is_not_in_force(tmp_path, monkeypatch):
    found = book(tmp_path)

    def no_space(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(module.atomic, "replace_file", no_space)
    with pytest.raises(DiskSpaceError, match="No space left"):
        found.add(Reason.OPERATOR, Depth.HOLD, by="ops1")

    assert found.pauses == ()
    assert found.revision == 0
