from extractor.folders import RunFolder
from extractor.supervisor import log_files


def folder(tmp_path, content=b"", name="replica-0"):
    (tmp_path / f"{name}.log").write_bytes(content)
    return RunFolder(tmp_path)


def test_the_last_lines_and_then_what_is_new(tmp_path):
    run = folder(tmp_path, b"one\ntwo\nthree\n")
    first = log_files.read(run, "replica-0", None, 2)
    with run.log("replica-0").open("ab") as file:
        file.write(b"four\nfi")
    second = log_files.read(run, "replica-0", first.next_offset, 10)

    assert first.lines == ("two", "three")
    assert second.lines == ("four",)
    assert log_files.read(run, "replica-0", second.next_offset, 10).lines == ()


def test_no_line_is_lost_between_two_reads_of_few_lines(tmp_path):
    run = folder(tmp_path, b"".join(b"line %d\n" % number for number in range(100)))
    offset, seen = 0, []
    while (chunk := log_files.read(run, "replica-0", offset, 7)).lines:
        seen += chunk.lines
        offset = chunk.next_offset

    assert seen == [f"line {number}" for number in range(100)]


def test_bytes_that_are_no_text_and_markup_are_data(tmp_path):
    run = folder(tmp_path, b"[bold]\xff\x1b[31m\n")

    assert log_files.read(run, "replica-0", None, 10).lines == ("[bold]\N{REPLACEMENT CHARACTER}\x1b[31m",)


def test_a_line_without_end_does_not_stop_the_reader(tmp_path):
    run = folder(tmp_path, b"x" * (log_files.MAX_BYTES + 10))
    chunk = log_files.read(run, "replica-0", 0, 10)

    assert len(chunk.lines[0]) == log_files.MAX_BYTES
    assert chunk.next_offset == log_files.MAX_BYTES


def test_only_logs_of_the_run_can_be_read(tmp_path):
    (tmp_path / "run").mkdir()
    run = folder(tmp_path / "run")
    (tmp_path / "secret.log").write_text("secret")

    assert log_files.read(run, "../secret", None, 10) is None
    assert log_files.read(run, "other", None, 10) is None


def test_an_offset_behind_the_end_is_the_end(tmp_path):
    run = folder(tmp_path, b"one\n")

    assert log_files.read(run, "replica-0", 1000, 10).next_offset == 4
