"""The verbs on a run, as the command line runs them, against a supervisor that says what it is told to."""

import json
import sys
import threading

import msgspec
import pytest

from console import cli
from extractor.folders import RunFolder, runs_folder
from extractor.protocol import api
from extractor.protocol.states import State
from tests.support.fake_supervisor import DEADLINE_S, FakeSupervisor, snapshot_of


@pytest.fixture(autouse=True)
def own_state(monkeypatch, tmp_path):
    # Short: it holds sockets, whose paths are limited.
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.setenv("LC_ALL", "C.UTF-8")


@pytest.fixture
def run():
    folder = runs_folder() / "small-1a2b"
    folder.mkdir(parents=True)
    return RunFolder(folder)


@pytest.fixture
def supervisor(run):
    with FakeSupervisor(run, snapshot_of(run)) as running:
        yield running


@pytest.fixture
def tapdeck(monkeypatch, capsys):
    """A function that runs a command: arguments -> (exit code, stdout, stderr)."""

    def call(*arguments):
        monkeypatch.setattr(sys, "argv", ["tapdeck", *arguments])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        return int(ended.value.code or 0), *capsys.readouterr()

    return call


@pytest.fixture
def meanwhile():
    """A function that runs a script beside the command."""
    threads = []

    def begin(script):
        thread = threading.Thread(target=script, daemon=True)
        thread.start()
        threads.append(thread)

    yield begin
    for thread in threads:
        thread.join(DEADLINE_S)
        assert not thread.is_alive()


def keep_last(run, state, why="as it was"):
    run.snapshot.write_bytes(msgspec.json.encode(snapshot_of(run, state, why)))


# -- which run


@pytest.mark.parametrize("name", [["small-1a2b"], ["small"], []])
def test_a_run_is_found_by_name_beginning_or_as_the_only_one(tapdeck, supervisor, name):
    code, out, _ = tapdeck("status", *name)
    assert (code, "RUNNING" in out) == (0, True)


def test_without_a_name_and_a_running_run_the_known_ones_are_named(tapdeck, run):
    code, _, err = tapdeck("status")
    assert code == 2
    assert "no runs are running" in err
    assert run.name in err


@pytest.mark.parametrize(
    "verb", ["status", "wait", "pause", "resume", "stop", "kill", "logs", "events", "attach"]
)
def test_an_unknown_run_ends_every_verb_with_3(tapdeck, verb):
    code, out, err = tapdeck(verb, "nonesuch")
    assert (code, out) == (3, "")
    assert "no such run" in err


# -- status and list


def test_status_of_a_live_run_as_json_is_its_snapshot(tapdeck, run, supervisor):
    code, out, err = tapdeck("status", run.name, "--json")
    said = json.loads(out)
    assert (code, err) == (0, "")
    assert said.pop("supervisor") == "running"
    assert msgspec.convert(said, api.Snapshot) == snapshot_of(run)


def test_status_of_a_run_without_supervisor_is_its_last_state_and_3(tapdeck, run):
    keep_last(run, State.HELD)
    code, out, _ = tapdeck("status", run.name)
    assert code == 3
    assert "not running" in out
    assert "hold by operator (ops1)" in out
    code, out, _ = tapdeck("status", run.name, "--json")
    assert code == 3
    assert json.loads(out)["supervisor"] == "not running"
    assert json.loads(out)["state"]["state"] == "held"


def test_status_of_a_run_that_never_had_a_state_is_3(tapdeck, run):
    code, out, _ = tapdeck("status", run.name)
    assert code == 3
    assert "not running" in out
    assert json.loads(tapdeck("status", run.name, "--json")[1])["supervisor"] == "not running"


def test_a_supervisor_that_does_not_answer_is_4(tapdeck, run, supervisor):
    (run.path / "r").unlink()
    (run.path / "s").unlink()
    assert tapdeck("status", run.name)[0] == 4
    assert tapdeck("pause", run.name)[0] == 4


def test_watch_prints_what_changes_and_ends_with_the_run(tapdeck, run, supervisor, meanwhile):
    def script():
        supervisor.wait_stream()
        supervisor.show(snapshot_of(run, State.HELD, "by \x1b[31mops1"))
        supervisor.end(snapshot_of(run, State.FINISHED, "all done"))

    meanwhile(script)
    code, out, _ = tapdeck("status", run.name, "--watch")
    assert code == 0
    assert "\x1b" not in out
    heads = [line for line in out.splitlines() if line.startswith(run.name)]
    assert ["RUNNING" in heads[0], "HELD" in heads[1], "FINISHED" in heads[2]] == [True] * 3
    assert out.count("output   /data/out") == 1


def test_watch_says_when_the_supervisor_is_gone_and_the_run_is_not_over(tapdeck, run, supervisor, meanwhile):
    def script():
        supervisor.wait_stream()
        supervisor.die()

    meanwhile(script)
    code, out, _ = tapdeck("status", run.name, "--watch")
    assert code == 3
    assert "not running" in out


def test_list_names_all_runs(tapdeck, run, supervisor):
    (runs_folder() / "other-3c4d").mkdir()
    code, out, _ = tapdeck("list")
    assert code == 0
    assert [line.split()[0] for line in out.splitlines()] == ["RUN", run.name, "other-3c4d"]
    said = json.loads(tapdeck("list", "--json")[1])["runs"]
    assert [(row["name"], row["supervisor"]) for row in said] == [
        (run.name, "running"),
        ("other-3c4d", "not running"),
    ]


def test_list_without_runs_is_no_failure(tapdeck):
    code, out, _ = tapdeck("list")
    assert code == 0
    assert "no runs" in out


# -- actions


@pytest.mark.parametrize(
    ("arguments", "asked", "depth"),
    [
        (["pause"], "pause", "hold"),
        (["pause", "--depth", "unload"], "pause", "unload"),
        (["resume"], "resume", None),
        (["stop"], "stop", None),
        (["kill", "--yes"], "kill", None),
    ],
)
def test_an_action_is_asked_for_once_and_its_answer_printed(tapdeck, supervisor, arguments, asked, depth):
    code, out, _ = tapdeck(arguments[0], supervisor.run.name, *arguments[1:])
    assert code == 0
    assert [(name, request.depth) for name, request in supervisor.asked] == [(asked, depth)]
    assert out == f"{asked}d: as asked\n"


@pytest.mark.parametrize(
    ("status", "code", "exit_code"), [(403, "read_only", 5), (409, "conflict", 6), (409, "not_possible", 6)]
)
def test_a_refusal_has_its_exit_code_and_the_supervisors_words(tapdeck, supervisor, status, code, exit_code):
    supervisor.refuse = (
        status,
        api.Refusal(code=code, message="ops2 \x1b[1mwas faster", remedy="look again"),
    )
    got, out, err = tapdeck("pause", supervisor.run.name)
    assert (got, out) == (exit_code, "")
    assert "was faster" in err
    assert "look again" in err
    assert "\x1b" not in err


@pytest.mark.parametrize("verb", ["pause", "resume", "stop", "kill"])
def test_an_action_on_a_run_without_supervisor_is_3(tapdeck, run, verb):
    keep_last(run, State.FINISHED)
    code, _, err = tapdeck(verb, run.name)
    assert code == 3
    assert "is not running" in err


def test_kill_without_a_terminal_wants_yes(tapdeck, run, supervisor):
    code, _, err = tapdeck("kill", run.name)
    assert code == 2
    assert "--yes" in err
    assert supervisor.asked == []


def test_pause_with_wait_returns_at_the_depth_asked_for(tapdeck, run, supervisor, meanwhile):
    supervisor.on_action = lambda _: snapshot_of(run, State.UNLOADING)

    def script():
        supervisor.wait_stream()
        supervisor.show(snapshot_of(run, State.UNLOADED))

    meanwhile(script)
    code, out, _ = tapdeck("pause", run.name, "--depth", "unload", "--wait")
    assert code == 0
    assert out.splitlines() == ["paused: as asked", "the run is unloaded"]


def test_pause_with_wait_that_somebody_lifts_is_a_conflict(tapdeck, run, supervisor, meanwhile):
    supervisor.on_action = lambda _: snapshot_of(run, State.HOLDING)

    def script():
        supervisor.wait_stream()
        supervisor.show(snapshot_of(run, State.RUNNING))

    meanwhile(script)
    code, _, err = tapdeck("pause", run.name, "--wait")
    assert code == 6
    assert "lifted" in err


def test_stop_with_wait_returns_when_nothing_supervises_the_run(tapdeck, run, supervisor, meanwhile):
    supervisor.on_action = lambda _: snapshot_of(run, State.DRAINING)

    def script():
        supervisor.wait_stream()
        supervisor.end(snapshot_of(run, State.STOPPED))

    meanwhile(script)
    code, out, _ = tapdeck("stop", run.name, "--wait", "--json")
    assert code == 0
    assert json.loads(out)["state"] == "stopped"


# -- wait

ENDS = [(State.FINISHED, 0), (State.FAILED, 7), (State.STOPPED, 1)]


@pytest.mark.parametrize(("state", "exit_code"), ENDS)
def test_wait_waits_a_pause_out_and_tells_the_end_by_its_exit_code(
    tapdeck, supervisor, meanwhile, state, exit_code
):
    run = supervisor.run

    def script():
        supervisor.wait_stream()
        supervisor.show(snapshot_of(run, State.HELD))
        supervisor.show(snapshot_of(run, State.RUNNING))
        supervisor.end(snapshot_of(run, state, "why it ended"))

    meanwhile(script)
    code, out, err = tapdeck("wait", run.name)
    assert code == exit_code
    assert state.upper() in out
    assert "why it ended" in out
    assert "HELD" in err


@pytest.mark.parametrize(("state", "exit_code"), ENDS)
def test_wait_for_a_run_that_has_ended_returns_at_once(tapdeck, run, state, exit_code):
    keep_last(run, state)
    code, out, _ = tapdeck("wait", run.name, "--json")
    assert code == exit_code
    assert json.loads(out)["state"] == state


def test_wait_for_a_run_that_nobody_supervises_and_that_has_not_ended_is_3(
    tapdeck, run, supervisor, meanwhile
):
    def script():
        supervisor.wait_stream()
        supervisor.die()

    meanwhile(script)
    code, _, err = tapdeck("wait", run.name)
    assert code == 3
    assert "not running" in err


def test_wait_gives_up_after_its_timeout_with_75(tapdeck, run, supervisor):
    code, _, err = tapdeck("wait", run.name, "--timeout", "0.2")
    assert code == 75
    assert "has not ended within" in err


# -- logs and events


def test_logs_of_an_ended_run_are_read_from_its_folder(tapdeck, run):
    run.log("supervisor").write_text("a\nb\nc\n")
    run.log("replica-0").write_bytes(b"x\n\x1b[31mraw\n")
    code, out, _ = tapdeck("logs", run.name, "-n", "2")
    assert code == 0
    # A pipe gets the lines as they are.
    assert out == "==> replica-0 <==\nx\n\x1b[31mraw\n==> supervisor <==\nb\nc\n"
    assert tapdeck("logs", run.name, "supervisor", "-n", "1")[1] == "c\n"


def test_a_log_that_is_not_there_is_a_usage_error_that_names_those_that_are(tapdeck, run):
    run.log("supervisor").write_text("a\n")
    code, _, err = tapdeck("logs", run.name, "../../secret")
    assert code == 2
    assert "use one of: supervisor" in err


def test_followed_logs_end_with_the_run_and_miss_nothing(tapdeck, run, supervisor, meanwhile):
    log = run.log("supervisor")
    log.write_text("first\n")

    def script():
        with log.open("a") as file:
            file.write("second\nlast without its end")
        supervisor.end(snapshot_of(run, State.FINISHED))

    meanwhile(script)
    code, out, _ = tapdeck("logs", run.name, "supervisor", "-f")
    assert code == 0
    assert out == "first\nsecond\nlast without its end\n"


def test_events_as_json_are_the_lines_of_the_file(tapdeck, run):
    text = '{"event":"note","text":"\\u001b[1m"}\n{"event":"finished"}\n'
    run.events.write_text(text)
    assert tapdeck("events", run.name, "--json")[1] == text
    said = tapdeck("events", run.name, "-n", "1")[1]
    assert "finished" in said
    assert "note" not in said
