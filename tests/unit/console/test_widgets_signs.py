"""Bars, sparklines and buckets: what is drawn is what was measured."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from console.widgets.signs import ASCII, CELL_ROLES, CELL_WORDS, UNICODE, bar, bucketed, sparkline


@pytest.mark.parametrize("signs", [UNICODE, ASCII], ids=["unicode", "ascii"])
@given(st.floats(-1, 2), st.integers(0, 100))
def test_a_bar_has_its_width(signs, share, width):
    assert len(bar(share, width, signs)) == width


def test_a_bar_is_full_only_when_all_is_done():
    assert bar(1.0, 4, UNICODE) == "████"
    assert bar(0.999, 4, UNICODE) != "████"
    assert bar(0.999, 4, ASCII) == "###-"


def test_a_pause_is_a_gap_and_not_a_zero():
    assert sparkline([8.0, None, 0.0, 4.0], 4, UNICODE) == "█ ▁▅"


def test_a_sparkline_shows_the_newest_at_the_right():
    assert sparkline([1.0, 8.0], 5, UNICODE) == "   ▂█"
    assert sparkline([8.0, 1.0, 1.0], 2, UNICODE) == "██"


def test_a_sparkline_without_any_value_is_empty():
    assert sparkline([None, None], 3, UNICODE) == "   "
    assert sparkline([0.0], 1, UNICODE) == "▁"


def test_a_bucket_shows_the_worst_of_its_shards():
    assert bucketed("dddd" + "ddxd" + "ddr." + "dd..", 4) == "dxr."


@given(st.text(alphabet="dr.x", min_size=1, max_size=300), st.integers(1, 50))
def test_buckets_fit_and_hide_no_failure(cells, room):
    found = bucketed(cells, room)
    assert len(found) <= room
    assert ("x" in found) == ("x" in cells)


def test_states_of_shards_differ_by_sign_and_by_role():
    for signs in (UNICODE, ASCII):
        assert len(set(signs.cells.values())) == 4
    assert len(set(CELL_ROLES.values())) == 4
    assert CELL_ROLES.keys() == CELL_WORDS.keys() == UNICODE.cells.keys()
