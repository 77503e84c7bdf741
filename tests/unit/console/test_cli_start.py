"""Where the console opens by itself: a bare `tapdeck`, `start` and `attach`, on terminals and elsewhere."""

import sys

import pytest

from console import app as console_app
from console import cli, run_verbs
from extractor import config as configs
from extractor.commands import demo, start
from extractor.folders import RunFolder, run_folder_of, runs_folder


class Calls:
    """What the command line has called: (what, how) in order."""

    def __init__(self):
        self.made = []
        self.exit_code = 0


@pytest.fixture
def calls(monkeypatch):
    calls = Calls()

    def run_console(run, **options):
        calls.made.append(("console", run, options))
        return 0

    def run_start(config, *, mode, deadline_s, out):
        calls.made.append((mode, config.output.dir, deadline_s))
        return calls.exit_code

    monkeypatch.setattr(console_app, "run_console", run_console)
    monkeypatch.setattr(start, "run", run_start)
    return calls


@pytest.fixture
def terminal(monkeypatch):
    """A function that says what there is: None: a capable terminal."""

    def set_to(refusal):
        for module in (cli, run_verbs):
            monkeypatch.setattr(module, "no_console", lambda: refusal)

    set_to(None)
    return set_to


@pytest.fixture
def tapdeck(monkeypatch, capsys, tmp_path):
    """A function that runs a command: arguments -> (exit code, stdout, stderr)."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))

    def call(*arguments):
        monkeypatch.setattr(sys, "argv", ["tapdeck", *arguments])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        return int(ended.value.code or 0), *capsys.readouterr()

    return call


@pytest.fixture
def run_toml(monkeypatch, tmp_path):
    config = configs.build(
        {
            "model": {"path": "/m"},
            "data": {"files": ["/d.jsonl"]},
            "output": {"dir": str(tmp_path / "out")},
        },
        source="test",
    )
    monkeypatch.setattr(configs, "load", lambda *_: config)
    return "run.toml"


def test_a_bare_tapdeck_opens_the_list_of_runs(tapdeck, calls, terminal):
    assert tapdeck()[0] == 0
    assert calls.made == [("console", None, {})]


def test_a_bare_tapdeck_without_a_terminal_prints_help_and_why(tapdeck, calls, terminal):
    terminal("the console needs a terminal")
    code, out, err = tapdeck()
    assert code == 0
    assert "Usage" in out
    assert "needs a terminal" in err
    assert calls.made == []


def test_start_opens_the_console_on_the_run_it_has_started(tapdeck, calls, terminal, run_toml, tmp_path):
    assert tapdeck("start", run_toml)[0] == 0
    run = RunFolder(run_folder_of(tmp_path / "out"))
    assert calls.made == [("detach", str(tmp_path / "out"), 25.0), ("console", run, {})]


def test_start_without_a_terminal_is_start_detached_and_says_so(tapdeck, calls, terminal, run_toml):
    terminal("no terminal here")
    code, _, err = tapdeck("start", run_toml)
    assert code == 0
    assert "no terminal here; the run goes on without it, as with --detach" in err
    assert [call[0] for call in calls.made] == ["detach"]


@pytest.mark.parametrize(
    ("flags", "mode"),
    [(["--detach"], "detach"), (["--json"], "detach"), (["--foreground", "--deadline", "9"], "foreground")],
)
@pytest.mark.usefixtures("terminal")
def test_start_with_a_mode_opens_no_console(tapdeck, calls, run_toml, flags, mode):
    assert tapdeck("start", run_toml, *flags)[0] == 0
    assert [call[0] for call in calls.made] == [mode]
    assert calls.made[0][2] == (9.0 if "--deadline" in flags else 25.0)


def test_a_start_that_fails_opens_no_console(tapdeck, calls, terminal, run_toml):
    calls.exit_code = 7
    assert tapdeck("start", run_toml)[0] == 7
    assert [call[0] for call in calls.made] == ["detach"]


def test_start_refuses_two_modes_at_once(tapdeck, calls, terminal, run_toml):
    code, _, err = tapdeck("start", run_toml, "--detach", "--foreground")
    assert code == 2
    assert "exclude each other" in err
    assert calls.made == []


def test_attach_passes_its_flags_to_the_console(tapdeck, calls, terminal):
    folder = runs_folder() / "small-1a2b"
    folder.mkdir(parents=True)
    assert tapdeck("attach", "small", "--read-only", "--low-bandwidth")[0] == 0
    assert calls.made == [("console", RunFolder(folder), {"read_only": True, "low_bandwidth": True})]


@pytest.fixture
def demo_run(monkeypatch, calls, tapdeck):
    """The folder of the demo's run; its steps are written down in `calls`."""
    folder = runs_folder() / "demo-1a2b"
    folder.mkdir(parents=True)
    ends = {"run": 0, "set_up": "the demo", "start": folder.name, "check": 3}
    for name, end in ends.items():

        def step(*_, name=name, end=end, **__):
            calls.made.append((name,))
            return end

        monkeypatch.setattr(demo, name, step)
    return RunFolder(folder)


@pytest.mark.usefixtures("terminal")
def test_demo_in_a_terminal_opens_the_console_on_its_run_and_checks_the_data_afterwards(
    tapdeck, calls, demo_run
):
    assert tapdeck("demo")[0] == 3
    assert calls.made == [("set_up",), ("start",), ("console", demo_run, {}), ("check",)]


@pytest.mark.parametrize(
    ("flags", "refusal"), [(["--headless"], None), (["--json"], None), ([], "no terminal here")]
)
@pytest.mark.usefixtures("demo_run")
def test_demo_that_is_headless_or_has_no_terminal_opens_no_console(tapdeck, calls, terminal, flags, refusal):
    terminal(refusal)
    assert tapdeck("demo", *flags)[0] == 0
    assert calls.made == [("run",)]
