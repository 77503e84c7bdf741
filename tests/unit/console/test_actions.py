"""The action registry: one place for keys, words and danger."""

import re

import pytest

from console.actions import ACTIONS, BY_ID, Danger, Place, keys_of, unavailable
from console.app import TapdeckApp
from console.screens.log import LogScreen
from console.screens.runs import RunsScreen
from extractor.protocol.states import Action
from tests.support import console_snapshots

OWNERS = {Place.EVERYWHERE: TapdeckApp, Place.LOG: LogScreen, Place.RUNS: RunsScreen}


def keys(spec):
    return keys_of(spec).split(",")


@pytest.mark.parametrize("spec", ACTIONS, ids=lambda spec: spec.id)
def test_every_action_has_a_method_where_its_key_works(spec):
    assert callable(getattr(OWNERS[spec.place], f"action_{spec.id}"))


@pytest.mark.parametrize("place", Place)
def test_every_binding_of_a_place_comes_from_the_registry(place):
    found = {binding.action for binding in OWNERS[place].BINDINGS}
    assert found == {spec.id for spec in ACTIONS if spec.place == place}


@pytest.mark.parametrize("place", Place)
def test_no_key_means_two_things_in_one_place(place):
    here = [key for spec in ACTIONS if spec.place in {place, Place.EVERYWHERE} for key in keys(spec)]
    assert sorted(here) == sorted(set(here))


def test_ids_are_unique():
    assert len(BY_ID) == len(ACTIONS)


@pytest.mark.parametrize("spec", ACTIONS, ids=lambda spec: spec.id)
def test_upper_case_acts_and_everything_else_changes_nothing(spec):
    for key in keys(spec):
        assert (len(key) == 1 and key.isupper()) == spec.mutates


def test_every_action_of_the_supervisor_has_exactly_one_entry():
    asked = [spec.action for spec in ACTIONS if spec.action is not None]
    assert sorted(asked) == sorted(Action)


def test_what_cannot_be_undone_is_asked_first():
    assert BY_ID["kill"].danger == Danger.TYPE_NAME
    assert BY_ID["stop"].danger == Danger.CONFIRM
    assert BY_ID["pause"].danger == Danger.CONFIRM


def test_what_the_supervisor_says_is_why_an_action_is_not_possible():
    found = unavailable(BY_ID["resume"], console_snapshots.running(), read_only=False)
    assert found == "it is not paused"
    assert unavailable(BY_ID["pause"], console_snapshots.running(), read_only=False) is None


def test_read_only_is_named_before_anything_else():
    found = unavailable(BY_ID["resume"], console_snapshots.running(), read_only=True)
    assert found == "this console is read-only"


VERBS = ("detach", "attach", "leave", "continue", "come", "stop", "end", "kill", "lose", "finish", "take")


def verbs(text):
    return {verb for verb in VERBS if re.search(rf"\b{verb}", text.lower())}


def test_leaving_and_stopping_share_no_verb():
    detach, stop = BY_ID["detach"], BY_ID["stop"]
    leaving = verbs(f"{detach.label} {detach.description}")
    assert leaving
    assert leaving.isdisjoint(verbs(f"{stop.label} {stop.description}"))
