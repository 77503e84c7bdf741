"""The end of a file that grows."""

import pytest

from console.tail import BLOCK_BYTES, GrowingFile


@pytest.fixture
def path(tmp_path):
    return tmp_path / "a.log"


@pytest.mark.parametrize("num_lines", [0, 1, 3, 5000])
def test_the_last_lines_are_given_whatever_their_length(path, num_lines):
    lines = [f"{number} {'x' * (number % 97)}" for number in range(4000)]
    path.write_text("\n".join(lines) + "\n")
    assert path.stat().st_size > 2 * BLOCK_BYTES
    assert GrowingFile(path).last(num_lines) == lines[max(0, 4000 - num_lines) :]


def test_followed_every_line_is_given_once_and_whole(path):
    path.write_text("one\ntw")
    file = GrowingFile(path)
    assert file.last(None) == ["one"]
    assert file.new() == []
    with path.open("a") as writer:
        writer.write("o\nthree\nlas")
    assert file.new() == ["two", "three"]
    assert file.rest() == ["las"]
    assert file.rest() == []


def test_a_file_that_was_begun_again_is_read_from_its_beginning(path):
    path.write_text("a long line\n")
    file = GrowingFile(path)
    file.last(None)
    path.write_text("short\n")
    assert file.new() == ["short"]


def test_a_file_that_is_not_there_yet_has_no_lines(path):
    file = GrowingFile(path)
    assert file.last(5) == file.new() == []
    path.write_text("first\n")
    assert file.new() == ["first"]


def test_bytes_that_are_no_text_are_shown_as_escapes(path):
    path.write_bytes(b"a\xffb\n")
    assert GrowingFile(path).last(1) == ["a\\xffb"]
