"""The real desk: the run folders of a user, and tapdeck's own verbs as processes."""

import msgspec
import pytest

from console.desk import RealDesk
from console.feed import LiveFeed
from extractor import folders
from tests.support import console_snapshots as snapshots

pytestmark = pytest.mark.asyncio


@pytest.fixture
def desk():
    return RealDesk(read_only=False, interval_s=1.0)


async def test_runs_are_read_from_their_folders_latest_first(desk, tmp_path, monkeypatch):
    monkeypatch.setattr(folders, "runs_folder", lambda: tmp_path)
    for name, second in (("older", 1), ("newer", 2)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "snapshot.json").write_bytes(msgspec.json.encode(snapshots.running(second)))
    (tmp_path / "empty").mkdir()
    rows = await desk.runs()
    assert [(row.name, row.is_live) for row in rows] == [("newer", False), ("older", False), ("empty", False)]
    assert rows[0].snapshot == snapshots.running(2)
    assert rows[2].snapshot is None


async def test_no_run_folder_is_no_run(desk, tmp_path, monkeypatch):
    monkeypatch.setattr(folders, "runs_folder", lambda: tmp_path / "missing")
    assert await desk.runs() == []


async def test_a_run_is_opened_with_the_mode_of_the_console(tmp_path):
    feed = RealDesk(read_only=True, interval_s=2.0).open(tmp_path)
    assert isinstance(feed, LiveFeed)
    assert (feed.name, feed.read_only, feed.interval_s) == (tmp_path.name, True, 2.0)


async def test_a_refusal_of_a_verb_arrives_whole(desk, tmp_path):
    told = []
    outcome = await desk.command(["estimate", str(tmp_path / "missing.toml"), "--json"], told.append)
    assert outcome.exit_code == 2
    assert "missing.toml" in "\n".join(outcome.errors)
    assert told == list(outcome.errors)
