import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extractor.errors import ConfigError
from extractor.taps import default_layers, select

CASES = json.loads(
    (Path(__file__).parents[1] / "data/cases/capture-layer-id-convention/layers.json").read_text()
)
CONVENTION = {"output_of_layer": "after", "boundary": "before"}


def choose(num_layers, layers, convention="after", **flags):
    chosen = {"embed": False, "final": False, "normed": False} | flags
    return select(num_layers=num_layers, layers=layers, convention=convention, **chosen)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_ids_of_either_convention_name_the_expected_boundaries(case):
    taps = choose(case["n_layers"], case["ask"]["ids"], CONVENTION[case["ask"]["convention"]])
    assert list(taps.boundaries) == case["boundaries"]


def test_first_id_does_not_change_what_ids_mean():
    assert choose(32, [1, 15, 28]).boundaries[0] == 2
    assert choose(32, [2, 15, 28]).boundaries[0] == 3


def test_default_is_what_servers_serve_and_is_marked_as_default():
    taps = choose(61, None, final=True)
    assert taps.is_default
    assert taps.boundaries == (2, 30, 58, 61)
    assert default_layers(61) == (1, 29, 57)


def test_last_layer_is_final_however_it_is_asked_for():
    assert choose(30, [2, 29]).names == ("layer_002", "final")
    assert choose(30, [2, 29], final=True).names == ("layer_002", "final")
    assert choose(30, [3, 30], "before").names == ("layer_002", "final")


def test_boundary_zero_is_embed():
    assert choose(30, [0, 3], "before").names == ("embed", "layer_002")


def test_final_alone_and_normed_alone_are_selections():
    assert choose(30, [], final=True).names == ("final",)
    assert choose(30, [], normed=True).names == ("normed",)


@pytest.mark.parametrize(
    ("layers", "convention"), [([30], "after"), ([-1], "after"), ([31], "before"), ([-1], "before")]
)
def test_layer_out_of_range_is_refused_with_the_range(layers, convention):
    with pytest.raises(ConfigError, match="the model has 30 layers, so ids run from 0") as caught:
        choose(30, layers, convention)
    assert caught.value.code == "layer_out_of_range"


def test_layer_given_twice_is_refused_by_name():
    with pytest.raises(ConfigError, match="given twice: 4"):
        choose(30, [4, 2, 4])


def test_as_served_selects_the_same_taps_and_says_so():
    served = choose(30, [2, 14], final=True, as_served=True)
    assert served.as_served
    assert served.taps == choose(30, [2, 14], final=True).taps


@pytest.mark.parametrize("layers", [[], [0], [0, 2, 4], [4]])
@pytest.mark.parametrize("flags", [{}, {"embed": True}, {"normed": True}, {"embed": True, "normed": True}])
def test_any_subset_with_any_of_the_ends_is_a_selection(layers, flags):
    if not layers and not flags:
        flags = {"final": True}
    names = choose(5, layers, **flags).names
    expected = ["embed"] * flags.get("embed", False) + [f"layer_{v:03d}" for v in layers if v < 4]
    expected += ["final"] * (4 in layers or flags.get("final", False)) + ["normed"] * flags.get(
        "normed", False
    )
    assert list(names) == expected


def test_nothing_selected_is_refused():
    with pytest.raises(ConfigError, match="nothing is selected"):
        choose(30, [])


def test_model_too_shallow_for_a_default_is_refused():
    with pytest.raises(ConfigError, match="no default selection"):
        choose(4, None)


def test_draft_model_ids_leave_out_the_last_boundary():
    taps = choose(30, [2, 14, 26], final=True)
    assert taps.auxiliary_ids("after") == (2, 14, 26)
    assert taps.auxiliary_ids("before") == (3, 15, 27)


@given(
    st.integers(1, 80).flatmap(lambda n: st.tuples(st.just(n), st.sets(st.integers(0, n - 1), min_size=1)))
)
def test_both_conventions_select_the_same_taps(case):
    num_layers, after = case
    assert choose(num_layers, sorted(after)) == choose(num_layers, [v + 1 for v in after], "before")


@given(st.integers(1, 80).flatmap(lambda n: st.tuples(st.just(n), st.permutations(range(n)))))
def test_selection_ascends_whatever_the_order_asked_for(case):
    num_layers, layers = case
    assert list(choose(num_layers, layers).boundaries) == list(range(1, num_layers + 1))
