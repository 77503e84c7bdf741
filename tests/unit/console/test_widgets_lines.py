"""Lines: text is shown as it is, cut where there is no room, and never obeyed."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len

from console.widgets.lines import Span, apart, fitted, line, plain, visible, width_of, wrapped


def test_control_characters_become_signs():
    assert visible("ESC \x1b[31m BEL \x07 CR \r TAB \t DEL \x7f") == "ESC ␛[31m BEL ␇ CR ␍ TAB ␉ DEL ␡"


def test_text_that_reorders_other_text_becomes_a_sign():
    assert visible("a\u202eb\u2066c\x9bd") == "a\ufffdb\ufffdc\ufffdd"


def test_in_ascii_nothing_else_is_left():
    assert visible("■ \x1b é", ascii_only=True) == "? ^[ ?"


@given(st.text())
def test_nothing_that_a_terminal_obeys_is_left(text):
    assert not any(ord(char) < 0x20 or 0x7F <= ord(char) < 0xA0 for char in visible(text))


@given(st.text(), st.integers(1, 40))
def test_a_fitted_line_is_never_wider_than_asked(text, width):
    assert width_of(fitted(line((visible(text), "bad")), width, more="…")) <= width


def test_what_is_cut_is_marked():
    assert plain(fitted(line("abc", "defg"), 5, more="…")) == "abcd…"


def test_the_left_end_gives_way_to_the_right_one():
    assert plain(apart(line("a long name"), line("right"), 12, more="…")) == "a lon… right"


@given(
    st.text(alphabet=st.characters(blacklist_characters="\n", blacklist_categories=["Cs"])),
    st.integers(2, 30),
)
def test_wrapping_loses_only_blanks(text, width):
    shown = visible(text)
    found = "".join(plain(one) for one in wrapped(shown, width, most=10_000, more="…"))
    assert found.replace(" ", "") == shown.replace(" ", "")


@pytest.mark.parametrize("width", [2, 5, 17])
def test_wrapped_lines_fit(width):
    rows = wrapped("the quick brown fox, 日本語の文章 and more", width, most=100, more="…")
    assert all(cell_len(plain(one)) <= width for one in rows)


def test_text_that_is_too_long_says_so():
    rows = wrapped("one two three four", 5, most=2, more="…")
    assert [plain(one) for one in rows] == ["one", "two…"]


def test_empty_parts_leave_no_span():
    assert line("", ("a", "good"), "") == (Span("a", "good"),)
