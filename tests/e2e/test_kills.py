"""SIGKILL at any moment costs the shards in hand and nothing else.

One run is killed five times, each time resumed by the same command, and compared with the undisturbed run.
Moments are drawn with a seed: set `TAPDECK_TEST_SEED` to draw others; the moments are printed.
"""

import os
import random
import signal
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pyarrow.parquet
import pytest

from tests.support import outputs
from tests.support.job import Inputs, Reference
from tests.support.product import Command, Finished, Tapdeck

pytestmark = pytest.mark.slow

SEED = int(os.environ.get("TAPDECK_TEST_SEED", "20"))
NUM_KILLS = 5
LOADING = "loading the model"
VICTIMS = {"command", "worker", "both"}


@dataclass(frozen=True)
class Moment:
    """When to kill: the first time that `is_now` is true."""

    name: str
    is_now: Callable[[], bool]


@dataclass
class Killed:
    """What was seen of the run that was killed again and again.

    Attributes:
        story: (moment, victims, command, shards with a final name afterwards) of every kill.
        last: the command that completed the run.
        first_seen: file -> stamp when its shard was first seen with its final name.
        unheard: shards that were committed while no command could note it.
    """

    output: Path
    story: list[tuple[str, str, Finished, set[str]]] = field(default_factory=list)
    last: Finished | None = None
    first_seen: dict[str, dict[str, outputs.Stamp]] = field(default_factory=dict)
    unheard: set[int] = field(default_factory=set)
    rewritten: list[str] = field(default_factory=list)

    def look(self, reference: Path) -> set[str]:
        """Checks what is there now against the reference and against what was there before."""
        shards = outputs.require_sound(self.output, reference)
        for name in shards:
            stamps = outputs.stamps(self.output / "shards" / name)
            if self.first_seen.setdefault(name, stamps) != stamps:
                self.rewritten.append(name)
        return shards


def draw_moment(
    rng: random.Random, tapdeck: Tapdeck, output: Path, command: Command, *, kills_left: int, reference: Path
) -> Moment:
    """A moment that leaves shards to do for the kills that follow."""
    all_shards = sorted(outputs.final_shards(reference))
    left = [name for name in all_shards if name not in outputs.final_shards(output)]
    # Two shards are always left over: the last one must not be finished while a kill is on its way.
    last = max(1, (len(left) - 2) // kills_left)
    number = rng.randint(0, last - 1)
    name = left[number]
    match rng.choice(["bytes", "part", "commit", "event"]):
        case "bytes":
            worker = psutil.Process(command.worker_pid)
            before = worker.io_counters().write_chars
            sizes = [sum(map(len, outputs.contents(reference / "shards" / n).values())) for n in left[:last]]
            wanted = rng.randint(1, sum(sizes))
            return Moment(
                f"{wanted} of {sum(sizes)} bytes written",
                lambda: worker.io_counters().write_chars - before >= wanted,
            )
        case "part":
            return Moment(
                f"shard {name} in the making",
                lambda: any(part.startswith(name) for part in outputs.part_folders(output)),
            )
        case "commit":
            return Moment(f"shard {name} committed", lambda: name in outputs.final_shards(output))
        case _:
            return Moment(f"shard {name} in the event log", lambda: int(name) in done_events(tapdeck, output))


def done_events(tapdeck: Tapdeck, output: Path) -> Counter[int]:
    """Shard -> how often the event log says that it was done."""
    return Counter(e["shard"] for e in tapdeck.events(output) if e["event"] == "shard_done")


def kill(command: Command, victims: str) -> None:
    """SIGKILL to the command, its worker, or both; the worker is in a session of its own."""
    if victims != "command":
        worker = psutil.Process(command.worker_pid)
        os.killpg(worker.pid, signal.SIGKILL)
    if victims != "worker":
        command.process.kill()


@pytest.fixture(scope="module")
def killed(
    tapdeck: Tapdeck, inputs: Inputs, reference: Reference, tmp_path_factory: pytest.TempPathFactory
) -> Killed:
    rng = random.Random(SEED)
    folder = tmp_path_factory.mktemp("killed")
    seen = Killed(folder / "killed")
    config = inputs.config(folder / "run.toml", seen.output)
    # While it loads, the command alone: its worker has nothing in hand and must not go on loading.
    plan = ["command", *rng.sample(["command", "worker", "both", "both"], k=NUM_KILLS - 1)]
    for number, victims in enumerate(plan):
        command = tapdeck.start("extract", config)
        command.wait_for_text(LOADING)
        moment = Moment(LOADING, lambda: True)
        if number:
            command.wait_for_text("model ready")
            moment = draw_moment(
                rng,
                tapdeck,
                seen.output,
                command,
                kills_left=NUM_KILLS - number,
                reference=reference.output,
            )
        print(f"kill {number} (seed {SEED}): {victims} at {moment.name}")
        command.wait_for(moment.is_now, moment.name)
        kill(command, victims)
        finished = command.wait()
        seen.look(reference.output)
        if victims != "command" or moment.name == LOADING:
            tapdeck.require_no_process()
        shards = seen.look(reference.output)
        seen.story.append((moment.name, victims, finished, shards))
    seen.last = tapdeck.run("extract", config, "--json")
    seen.look(reference.output)
    seen.unheard = set(map(int, outputs.final_shards(seen.output))) - set(done_events(tapdeck, seen.output))
    return seen


def test_every_kind_of_kill_took_place(killed):
    assert {victims for _, victims, _, _ in killed.story} == VICTIMS


def test_a_killed_run_ends_byte_identical_to_an_undisturbed_one(killed, reference):
    outputs.require_same_bytes(killed.output / "shards", reference.output / "shards")
    assert (killed.output / "dataset.json").read_bytes() == (reference.output / "dataset.json").read_bytes()


def test_the_list_of_samples_is_that_of_an_undisturbed_run(killed, reference):
    ours, theirs = (
        pyarrow.parquet.read_table(folder / "samples.parquet") for folder in (killed.output, reference.output)
    )

    assert ours.equals(theirs)


def test_the_last_command_says_that_the_data_set_is_complete(killed, reference):
    killed.last.require(0)
    whole = reference.finished.json

    assert killed.last.json["complete"] is True
    for key in ("samples", "tokens", "supervised_tokens", "shards", "bytes"):
        assert killed.last.json[key] == whole[key]
    # It computed what was left, and no more.
    done_before = len(killed.story[-1][3])
    assert 0 < killed.last.json["shards_computed"] <= whole["shards"] - done_before


def test_no_finished_shard_is_computed_twice(killed, tapdeck, reference):
    events = done_events(tapdeck, killed.output)

    assert killed.rewritten == []
    assert [shard for shard, count in events.items() if count > 1] == []
    # A shard without an event was committed after its command was killed, or while it was.
    assert len(events) + len(killed.unheard) == reference.num_shards
    assert len(killed.unheard) <= 2 * NUM_KILLS


def test_committed_shards_are_never_lost(killed):
    before: set[str] = set()
    for _, _, _, shards in killed.story:
        assert before <= shards
        before = shards


def test_nothing_temporary_and_no_process_is_left(killed, tapdeck):
    assert outputs.part_folders(killed.output) == []
    assert list(killed.output.rglob("*.part*")) == []
    assert outputs.lease(killed.output) is None
    tapdeck.require_no_process()


def test_a_command_whose_worker_is_killed_ends_with_7_and_says_how_to_go_on(killed):
    for _, victims, finished, _ in killed.story:
        if victims == "worker":
            finished.require(7)
            assert "ended without a word: killed by SIGKILL" in finished.stderr
            assert "run the same command again to resume" in finished.stderr
        else:
            finished.require(-signal.SIGKILL)


def test_a_command_waits_for_the_worker_of_a_killed_one_and_says_so(tapdeck, inputs, tmp_path):
    output = tmp_path / "lonely"
    config = inputs.config(tmp_path / "run.toml", output)
    first = tapdeck.start("extract", config)
    first.wait_for_text("model ready")
    first.wait_for(lambda: outputs.part_folders(output), "shard in the making")
    worker = psutil.Process(first.worker_pid)
    # Stopped, so that it holds its shard for as long as it takes the next command to come.
    worker.suspend()
    first.process.kill()
    lonely = first.wait()
    second = tapdeck.start("extract", config)
    try:
        second.wait_for_text("is gone, and its worker finishes a shard; waiting for up to 60 s")
        assert "is still written: run " in second.stderr
    finally:
        worker.resume()
    second.wait().require(0)
    assert re_worker(lonely.stderr) != re_worker(second.stderr)
    tapdeck.require_no_process()


def re_worker(stderr: str) -> str:
    return next(line for line in stderr.splitlines() if line.startswith("worker: pid"))
