import io

from extractor.commands.output import Output


def test_json_is_one_object_on_stdout_and_lines_go_to_stderr():
    stdout, stderr = io.StringIO(), io.StringIO()
    out = Output(as_json=True, stdout=stdout, stderr=stderr)
    out.line("for people")
    out.note("a hint")
    out.result({"ok": True})
    assert stdout.getvalue() == '{"ok": true}\n'
    assert stderr.getvalue() == "for people\na hint\n"


def test_without_json_lines_are_the_result():
    stdout, stderr = io.StringIO(), io.StringIO()
    out = Output(as_json=False, stdout=stdout, stderr=stderr)
    out.line("for people")
    out.result({"ok": True})
    assert stdout.getvalue() == "for people\n"
    assert stderr.getvalue() == ""


def test_streams_that_were_closed_before_the_start_are_nobody(monkeypatch):
    monkeypatch.setattr("sys.stdout", None)
    monkeypatch.setattr("sys.stderr", None)
    out = Output(as_json=True)
    out.note("nobody listens")
    out.result({"ok": True})
