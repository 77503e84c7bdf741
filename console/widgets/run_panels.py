"""Panels of a run as a whole: its state and why, progress and pace, the selection of taps."""

from __future__ import annotations

from typing import TYPE_CHECKING

from console import words
from console.widgets.lines import Line, Role, Span, fitted, line, width_of, wrapped
from console.widgets.signs import bar, sparkline
from console.widgets.view import Link, View, age_of, both_ends, facts, title, whole_duration
from extractor.protocol.states import State
from extractor.quantities import bytes_words, duration_words

if TYPE_CHECKING:
    from extractor.protocol.api import Progress, Rates, Snapshot, StateInfo

_STATE_ROLES: dict[State, Role] = {State.RUNNING: "good", State.FINISHED: "good", State.FAILED: "bad"}
SPARK_CELLS = 30
ROOMY = 64
"""Below so many columns the header is the name and the state."""


def state_role(state: State) -> Role:
    """How a state looks; the sign and the word say the same."""
    return _STATE_ROLES.get(state, "warn" if state.is_paused else "busy")


def header(view: View, width: int) -> list[Line]:
    """Name, state, for how long; host and who is attached."""
    left = line((" tapdeck  " if width >= ROOMY else " ", "dim"), (view.name, "strong"))
    snapshot = view.snapshot
    if snapshot is None:
        return [(*left, *line((view.signs.dot, "dim"), ("no word yet", "busy")))]
    state = _state(view, snapshot)
    right = _attached(view, snapshot) if width >= ROOMY else ()
    # The name may be cut, the state never.
    left = fitted(left, width - width_of(state) - width_of(right) - 1, more=view.signs.more)
    return [both_ends(view, (*left, *state), right, width)]


def _state(view: View, snapshot: Snapshot) -> Line:
    info = snapshot.state
    state = words.state_words(info, ascii_only=view.signs.ascii_only)
    age = "" if view.link == Link.ENDED else f" {whole_duration(view.now_utc - info.since_utc)}"
    revision = f"{view.signs.dot}rev {snapshot.revision}" if view.wide else ""
    if view.link != Link.ENDED and view.is_stale:
        return line((view.signs.dot, "dim"), "was ", (state, "warn"), (revision, "dim"))
    return line((view.signs.dot, "dim"), (state, state_role(info.state)), age, (revision, "dim"))


def _attached(view: View, snapshot: Snapshot) -> Line:
    if view.link == Link.ENDED:
        return line((snapshot.run.host, "dim"), (view.signs.dot, "dim"), ("not running", "strong"), " ")
    you: tuple[str, Role] = ("you: read-only", "warn") if view.read_only else ("you: write", "")
    others = snapshot.clients.writers + snapshot.clients.readers - 1
    watching = f"{others} other{'s' if others > 1 else ''} attached" if view.wide and others > 0 else ""
    return (*facts(view, (snapshot.run.host, "dim"), you, watching), Span(" "))


def reason(view: View, width: int) -> list[Line]:
    """Why the run is in its state, or why nothing is known of it; at most four lines."""
    text, role = _reason(view)
    if not text:
        return []
    most = 4 if view.wide or view.is_stale else 3
    return [(Span(" "), *one) for one in wrapped(text, width - 2, role=role, most=most, more=view.signs.more)]


def _reason(view: View) -> tuple[str, Role]:
    snapshot = view.snapshot
    if view.link == Link.ENDED and snapshot is not None:
        when = words.when_words(snapshot.state.since_utc, now_utc=view.now_utc, zone=view.zone)
        return f"not running; {snapshot.state.state} {when}: {snapshot.state.why}", state_role(
            snapshot.state.state
        )
    if view.is_stale:
        return _no_word(view), "warn"
    if snapshot is None:
        return f"waiting for the first word from the supervisor {view.why}".rstrip(), "busy"
    info = snapshot.state
    if info.state.is_terminal or info.state == State.RUNNING or not info.pauses:
        return info.why, "bad" if info.state == State.FAILED else ""
    return f"{info.why}{_unsaid_pauses(view, info)}", "warn"


def _unsaid_pauses(view: View, info: StateInfo) -> str:
    """Who paused it and since when, for each pause in force."""
    if len(info.pauses) == 1 and any(
        said and said in info.why for said in (info.pauses[0].by, info.pauses[0].note)
    ):
        since = words.when_words(info.pauses[0].since_utc, now_utc=view.now_utc, zone=view.zone)
        return f" (since {since})"
    said = (words.pause_words(pause, now_utc=view.now_utc, zone=view.zone) for pause in info.pauses)
    return "".join(f" [{one}]" for one in said)


def _no_word(view: View) -> str:
    alive = {True: " alive", False: " gone", None: ""}[view.is_alive]
    pid = f" (pid {view.pid}{alive})" if view.pid else ""
    said = (
        f"? STALE {whole_duration(view.silent_s)}: no word from the supervisor{pid}. "
        "The run itself does not depend on this console."
    )
    if view.is_alive is False and view.snapshot is not None:
        said += f" Without a supervisor it ends after the shard in hand: tapdeck start {view.snapshot.run.config_file}"
    return said


def progress(view: View, width: int) -> list[Line]:
    """How far the run is, how fast, and when it is done."""
    snapshot = view.snapshot
    head = [title("Progress", width, view.signs, right=age_of(view))] if view.wide else []
    if snapshot is None or snapshot.progress is None:
        return [*head, line((" not known before the data is prepared", "dim"))]
    done = snapshot.progress
    share = done.tokens_done / done.tokens_total if done.tokens_total else 0.0
    percent = words.percent_words(share)
    finish = _finish(view, snapshot.rates)
    room = width - len(percent) - 4 - (0 if view.wide else width_of(finish) + 2)
    bar_line = line(" ", (bar(share, max(8, room), view.signs), "good"), " ", (percent, "strong"))
    if view.wide:
        pace = [(Span(" "), *_pace(view, snapshot)), _spark_and_finish(view, snapshot.rates, finish, width)]
        return [*head, bar_line, (Span(" "), *_counts(view, done)), *pace]
    spark = _spark(view, snapshot.rates, max(0, min(SPARK_CELLS, width - 44)))
    return [
        both_ends(view, bar_line, (*finish, Span(" ")), width),
        (Span(" "), *_counts(view, done)),
        both_ends(view, (Span(" "), *_pace(view, snapshot)), spark, width),
    ]


def _counts(view: View, done: Progress) -> Line:
    return facts(
        view,
        f"{words.count_words(done.tokens_done)} / {words.count_words(done.tokens_total)} tokens",
        (f"{done.quarantined:,} quarantined", "warn") if done.quarantined else "",
        f"{done.rejected:,} rejected" if done.rejected else "",
    )


def _pace(view: View, snapshot: Snapshot) -> Line:
    rates, disk = snapshot.rates, snapshot.disk
    if rates is None:
        return line(("no rate yet", "dim"))
    mean = rates.tokens_per_s_mean
    writes = disk.write_bytes_per_s if disk and view.wide else None
    return facts(
        view,
        f"{words.rate_words(rates.tokens_per_s_now)} now",
        f"{words.rate_words(mean)} mean" if mean is not None else ("no mean yet", "dim"),
        f"writes {bytes_words(writes)}/s" if writes else "",
    )


def _spark(view: View, rates: Rates | None, width: int) -> Line:
    return line((sparkline(rates.history, width, view.signs), "busy"), " ") if rates and rates.history else ()


def _spark_and_finish(view: View, rates: Rates | None, finish: Line, width: int) -> Line:
    room = max(0, min(60, width - width_of(finish) - 4))
    return (Span(" "), *_spark(view, rates, room), Span(" "), *finish)


def _finish(view: View, rates: Rates | None) -> Line:
    if rates is None or rates.eta_s is None or view.link == Link.ENDED:
        return ()
    band = ""
    if rates.eta_low_s is not None and rates.eta_high_s is not None:
        half = (rates.eta_high_s - rates.eta_low_s) / 2
        band = f" {view.signs.about}{_whole_minutes(half)}"
    left = _whole_minutes(rates.eta_s)
    if rates.finish_utc is None:
        return line(f"{left}{band} of work left")
    when = words.when_words(rates.finish_utc, now_utc=view.now_utc, zone=view.zone)
    return line("finish ", (when, "strong"), f"{band}", (f", {left} left" if view.wide else "", "dim"))


def _whole_minutes(seconds: float) -> str:
    """Seconds only below a minute: a forecast is not known better."""
    if seconds < 59.5:
        return whole_duration(seconds)
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 100 else duration_words(minutes * 60)


def taps(view: View, width: int) -> list[Line]:
    """The selection in both conventions, and what a token takes."""
    del width
    snapshot = view.snapshot
    if snapshot is None or not snapshot.run.taps:
        return [line((" taps: not known before the data is prepared", "dim"))]
    run = snapshot.run
    names = " + ".join(name for name in run.taps if not name.startswith("layer_"))
    layers = ",".join(str(int(name.removeprefix("layer_"))) for name in run.taps if name.startswith("layer_"))
    before = ",".join(map(str, run.ids_before))
    return [
        (
            Span(" "),
            *facts(
                view,
                " + ".join(part for part in (f"taps after {layers}" if layers else "taps", names) if part),
                f"before-ids (vLLM) {before}",
                f"{bytes_words(run.bytes_per_token)}/token",
                (run.dtype, "dim") if view.wide else "",
            ),
        )
    ]
