"""What numbers, times and states are called."""

import datetime

import pytest

from console import words
from extractor.protocol import api
from extractor.protocol.states import Depth, Pause, Reason, State

ZONE = datetime.timezone(datetime.timedelta(hours=2))
NOON = datetime.datetime(2026, 12, 1, 12, 0, tzinfo=ZONE).timestamp()


def pause(reason: Reason, depth: Depth = Depth.HOLD) -> Pause:
    return Pause(reason, depth, NOON, "auto", "99 GB free")


@pytest.mark.parametrize(
    ("count", "said"),
    [(953, "953"), (999_999, "999,999"), (12.4e6, "12.4 M"), (1e6, "1.00 M"), (3e10, "30.0 G")],
)
def test_counts_are_exact_while_they_are_short(count: float, said: str) -> None:
    assert words.count_words(count) == said


@pytest.mark.parametrize(
    ("rate", "said"), [(None, "unknown"), (0.0, "0 tok/s"), (4.27, "4.3 tok/s"), (4980.4, "4,980 tok/s")]
)
def test_a_rate_that_is_not_known_is_not_said_as_zero(rate: float | None, said: str) -> None:
    assert words.rate_words(rate) == said


def test_what_is_not_all_is_never_said_as_all() -> None:
    assert words.of_words(99_999, 100_000) == "99,999 / 100,000 (99.9 %)"
    assert words.of_words(5, 5) == "5 / 5 (100.0 %)"
    assert words.of_words(0, 0) == "0 / 0"


@pytest.mark.parametrize(
    ("offset_s", "said"),
    [(0, "12:00"), (-11 * 3600, "01:00"), (13 * 3600, "Wed 01:00"), (-30 * 86_400, "2026-11-01 12:00")],
)
def test_a_moment_is_as_short_as_its_distance_allows(offset_s: float, said: str) -> None:
    assert words.when_words(NOON + offset_s, now_utc=NOON, zone=ZONE) == said


def test_a_moment_without_a_present_has_its_date() -> None:
    assert words.when_words(NOON, zone=ZONE) == "2026-12-01 12:00"


@pytest.mark.parametrize("state", list(State))
def test_every_state_has_a_sign_of_one_character_in_both_alphabets(state: State) -> None:
    info = api.StateInfo(state, NOON, "")
    assert words.state_words(info) == f"{words.glyph(state)} {state.upper()}"
    assert len(words.glyph(state)) == 1
    assert words.state_words(info, ascii_only=True).isascii()


def test_a_pause_that_no_operator_asked_for_names_its_reason_in_the_state() -> None:
    held = api.StateInfo(State.HELD, NOON, "", (pause(Reason.DISK),))
    assert words.state_words(held) == "‖ HELD by disk"
    both = api.StateInfo(State.HELD, NOON, "", (pause(Reason.OPERATOR), pause(Reason.DISK)))
    assert words.state_words(both) == "‖ HELD by disk and operator"
    own = api.StateInfo(State.HELD, NOON, "", (pause(Reason.OPERATOR),))
    assert words.state_words(own) == "‖ HELD"


def test_a_pause_says_its_depth_reason_author_time_and_note() -> None:
    said = words.pause_words(pause(Reason.DISK), now_utc=NOON, zone=ZONE)
    assert said == "hold by disk (auto) since 12:00: 99 GB free"


def test_a_value_that_cannot_be_had_is_said_with_its_reason() -> None:
    assert words.value_words(97.2, "%") == "97 %"
    assert words.value_words(api.Unavailable("no_permission"), "W") == "? (no permission)"


def test_a_gpu_with_values_missing_still_has_its_line() -> None:
    gpu = api.Gpu(
        uuid="GPU-1",
        index=4,
        name="H200",
        busy_percent=91,
        memory_used_bytes=88.1e9,
        memory_total_bytes=api.Unavailable("lost"),
        power_watts=355,
        power_limit_watts=600,
        temperature_celsius=84,
        sampled_utc=NOON,
        rank="0.4",
    )
    assert words.gpu_words(gpu) == "4 r0.4  busy 91 %  88.1/? GB  355/600 W  84 C  H200"


def test_an_event_says_when_who_and_what() -> None:
    event = api.EventLine(7, NOON, "paused", "ops2", "paused (operator)")
    assert words.event_words(event, now_utc=NOON, zone=ZONE) == "12:00 ops2  paused (operator)"
