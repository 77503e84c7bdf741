"""The console: a Textual app over one feed. It renders what the supervisor says and asks it to act.

It holds no truth: nothing is shown as done before the supervisor says so, and it may be killed at any moment
without effect on a run. Keys come from `console.actions`. `run_console` is the way in: it refuses what is no
terminal, guards the terminal's modes, and says in one line how things stand when the screen is gone.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from textual.app import App
from textual.binding import Binding, BindingType

from console import terminal
from console.actions import BY_ID, ActionSpec, Place, unavailable
from console.clock import RealClock
from console.feed import LiveFeed
from console.known import Display, Known
from console.screens.base import TALL_ROWS, WIDE_COLUMNS, RunScreen
from console.screens.bindings import bindings
from console.screens.overview import OverviewScreen
from console.widgets.lines import visible
from console.widgets.signs import ASCII, UNICODE, Signs
from console.widgets.view import Link
from console.workers import begin
from extractor.errors import TapdeckError
from extractor.protocol.states import Depth, State

if TYPE_CHECKING:
    import datetime

    from rich.console import RenderableType
    from textual.events import Resize

    from console.clock import Clock
    from console.desk import Desk
    from console.feed import Feed, Update
    from console.screens.runs import RunsScreen
    from console.screens.start import StartScreen
    from console.widgets.lines import Role
    from console.widgets.view import View
    from extractor.folders import RunFolder

INTERVAL_S = 1.0
LOW_BANDWIDTH_INTERVAL_S = 2.0
FAILED_RUN_CODE = 7
NOTICE_S = 20.0
THEME = "ansi-dark"
"""Speaks the terminal's own sixteen colours: fewer bytes, and the operator's choice of colours."""


class TapdeckApp(App[None], inherit_bindings=False):
    """The console.

    Args:
        feed: the run to open on; None: the list of runs.
        desk: what else can be reached; None: nothing.
        clock: the time.
        signs: to draw with.
        zone: of the times shown; None: the machine's.
        interval_s: in which the screen may change.
    """

    TITLE = "tapdeck"
    CSS_PATH = Path(__file__).with_name("app.tcss")
    ENABLE_COMMAND_PALETTE = False
    BINDINGS: ClassVar[list[BindingType]] = [
        *bindings(Place.EVERYWHERE),
        # Also where a field has the focus or a dialog is open.
        Binding("ctrl+c,ctrl+q", "detach", show=False, priority=True, system=True),
    ]

    def __init__(
        self,
        feed: Feed | None = None,
        *,
        desk: Desk | None = None,
        clock: Clock | None = None,
        signs: Signs = UNICODE,
        zone: datetime.tzinfo | None = None,
        interval_s: float = INTERVAL_S,
    ) -> None:
        # Said here as well as by the theme: Textual chooses its filters for NO_COLOR before it has the theme.
        super().__init__(ansi_color=True)
        self.theme = THEME
        self.animation_level = "none"
        self.desk = desk
        self.signs = signs
        self._clock = clock or RealClock()
        self._known = Known(feed, self._clock)
        self._zone = zone
        self._interval_s = interval_s
        self._loop_of_app: asyncio.AbstractEventLoop | None = None
        self._wanted_code: int | None = None
        self.has_panicked = False
        self._num_said = 0

    # What the console knows.

    @property
    def view(self) -> View:
        """The run as it is known now."""
        wide = self.size.width >= WIDE_COLUMNS and self.size.height >= TALL_ROWS
        return self._known.view(
            Display(signs=self.signs, wide=wide, zone=self._zone, interval_s=self._interval_s)
        )

    @property
    def feed(self) -> Feed | None:
        """The run that is shown; None before one is chosen."""
        return self._known.feed

    def take(self, update: Update) -> None:
        """Takes what the feed says and shows it."""
        self._known.take(update)
        self.show_view()

    def show_view(self) -> None:
        """Draws what has changed."""
        view = self.view
        for screen in self.screen_stack:
            if isinstance(screen, RunScreen):
                screen.show_view(view)

    def say(self, text: str, role: Role = "") -> None:
        """Tells the operator what became of an action; gone after a while, when it may no longer be true."""
        self._num_said += 1
        number = self._num_said
        self.set_timer(NOTICE_S, lambda: self._forget(number))
        self._show_notice(text, role)

    def _forget(self, number: int) -> None:
        if number == self._num_said:
            self._show_notice("", "")

    def _show_notice(self, text: str, role: Role) -> None:
        for screen in self.screen_stack:
            if isinstance(screen, RunScreen):
                screen.show_notice(text, role)

    # The app's own life.

    async def on_mount(self) -> None:
        """Opens the first screen and begins to listen."""
        self._loop_of_app = asyncio.get_running_loop()
        if self._wanted_code is not None:
            self.exit(return_code=self._wanted_code)
            return
        self.set_interval(self._interval_s, self._tick)
        if self.feed is None:
            self.action_runs()
        else:
            self.attach(self.feed)

    def attach(self, feed: Feed) -> None:
        """Follows a run, instead of the one before."""
        self._known = Known(feed, self._clock)
        self._go(OverviewScreen(self.signs))
        # After the first paint: an operator sees at once that the console is there.
        self.call_after_refresh(self._listen, feed)

    def _listen(self, feed: Feed) -> None:
        begin(self, "feed", self._follow, feed)

    async def _follow(self, feed: Feed) -> None:
        async for update in feed.updates():
            self.take(update)

    def _tick(self) -> None:
        """Ages grow also when nothing is heard; when something is, that draws them."""
        is_due = self._known.silent_s > 1.5 * self._interval_s
        if self.feed is not None and is_due and not self._known.is_over:
            self.show_view()

    def on_resize(self, event: Resize) -> None:
        """The layout may be another one now."""
        del event
        self.call_after_refresh(self.show_view)

    def panic(self, *renderables: RenderableType) -> None:
        """Ends the app after an error in one of Textual's threads; such an end is no success."""
        self.has_panicked = True
        super().panic(*renderables)

    def leave(self, code: int) -> None:
        """Ends the app from a signal handler or another thread."""
        self._wanted_code = code
        if self._loop_of_app is not None and not self._loop_of_app.is_closed():
            self._loop_of_app.call_soon_threadsafe(lambda: self.exit(return_code=code))

    def _fatal_error(self) -> None:
        """Textual's own would print all local variables; `run_app` prints a plain traceback afterwards."""
        self._close_messages_no_wait()

    @property
    def error(self) -> Exception | None:
        """The error of the console itself that ended it."""
        return self._exception

    # Screens.

    def _go(self, screen: RunScreen) -> None:
        """Shows a screen instead of the present one."""
        screen.show_view(self.view)
        if isinstance(self.screen, RunScreen):
            self.switch_screen(screen)
        else:
            self.push_screen(screen)

    def action_overview(self) -> None:
        """Shows the overview."""
        if self.feed is None:
            self.say("no run is chosen yet: enter attaches to the one under the cursor", "warn")
        elif not isinstance(self.screen, OverviewScreen):
            self._go(OverviewScreen(self.signs))

    def action_log(self) -> None:
        """Shows the log."""
        from console.screens.log import LogScreen

        if self.feed is None:
            self.say("no run is chosen yet: enter attaches to the one under the cursor", "warn")
        elif not isinstance(self.screen, LogScreen):
            self._go(LogScreen(self.signs, self.feed))

    def action_runs(self) -> None:
        """Shows the list of runs."""
        from console.screens.runs import RunsScreen

        if self.desk is not None and not isinstance(self.screen, RunsScreen):
            self._go(RunsScreen(self.signs, self.desk))

    def action_start(self) -> None:
        """Shows the screen that begins a run."""
        from console.screens.start import StartScreen

        if self.view.read_only:
            self.say("cannot start a run: this console is read-only", "warn")
        elif self.desk is not None and not isinstance(self.screen, StartScreen):
            self._go(StartScreen(self.signs, self.desk))

    def on_runs_screen_chosen(self, message: RunsScreen.Chosen) -> None:
        """Attaches to a run from the list."""
        self._open(message.path)

    def on_start_screen_begun(self, message: StartScreen.Begun) -> None:
        """Attaches to the run that was started."""
        self._open(message.path)

    def on_start_screen_left(self) -> None:
        """Back to where one came from."""
        if self.feed is None:
            self.action_runs()
        else:
            self.action_overview()

    def _open(self, path: Path) -> None:
        if self.desk is not None:
            self.attach(self.desk.open(path))

    def action_help(self) -> None:
        """Shows keys and signs."""
        from console.screens.help import HelpScreen

        self.push_screen(HelpScreen(self.view))

    def action_palette(self) -> None:
        """Finds an action by name, and does it."""
        from console.screens.help import PaletteScreen

        async def run(action_id: str | None) -> None:
            if action_id is not None:
                on = self.screen if BY_ID[action_id].place != Place.EVERYWHERE else self
                await self.run_action(action_id, on)

        place = self.screen.place if isinstance(self.screen, RunScreen) else Place.EVERYWHERE
        self.push_screen(PaletteScreen(self.view, place), run)

    def action_detach(self) -> None:
        """Leaves the console; asks nobody for anything."""
        self.exit()

    # Acting on the run.

    def action_pause(self) -> None:
        """Asks how deep, then asks the supervisor."""
        from console.screens.dialogs import PauseDialog

        if (revision := self._may("pause")) is not None:
            self.push_screen(PauseDialog(self.view), lambda depth: self._act("pause", revision, depth, depth))

    def action_resume(self) -> None:
        """Asks the supervisor."""
        if (revision := self._may("resume")) is not None:
            self._act("resume", revision, answer=True)

    def action_stop(self) -> None:
        """Asks first; no is the default."""
        from console.screens.dialogs import ConfirmDialog

        if (revision := self._may("stop")) is not None:
            dialog = ConfirmDialog(
                self.view,
                question=f"Stop {self.view.name}?",
                effect="It ends for everybody, after the shards in hand. No finished work is lost; "
                "tapdeck start takes it up again.",
                yes="stop it",
            )
            self.push_screen(dialog, lambda answer: self._act("stop", revision, answer))

    def action_kill(self) -> None:
        """The name has to be typed first."""
        from console.screens.dialogs import TypeNameDialog

        if (revision := self._may("kill")) is not None:
            self.push_screen(TypeNameDialog(self.view), lambda answer: self._act("kill", revision, answer))

    def _may(self, action_id: str) -> int | None:
        """The revision that the operator sees, when an action can be asked for; else says why it cannot."""
        spec = BY_ID[action_id]
        view = self.view
        why_not = unavailable(spec, view.snapshot, read_only=view.read_only)
        if self.feed is None:
            why_not = "no run is chosen"
        elif view.link == Link.LOST and not view.read_only:
            why_not = "no word from the supervisor; nothing was sent"
        if why_not is None and view.snapshot is not None:
            return view.snapshot.revision
        self.say(f"cannot {spec.label} now: {why_not}", "warn")
        return None

    def _act(self, action_id: str, revision: int, answer: object, depth: Depth | None = None) -> None:
        if answer:
            begin(self, "act", self._ask, BY_ID[action_id], revision, depth, exclusive=False)

    async def _ask(self, spec: ActionSpec, revision: int, depth: Depth | None) -> None:
        if self.feed is None or spec.action is None:
            return
        self.say(f"{spec.label}: asked the supervisor, no answer yet", "busy")
        try:
            result = await self.feed.act(spec.action, depth=depth, expected_revision=revision)
        except TapdeckError as error:
            remedy = f" {error.remedy}" if error.remedy else ""
            self.say(f"{spec.label} was not done: {error.message}{remedy}", "bad")
        else:
            self.say(f"{spec.label}: {result.message} (revision {result.revision})", "good")

    def farewell(self) -> str:
        """One line for the normal screen: how things stand with the run that was shown."""
        view = self.view
        if self.feed is None:
            return "detached"
        if view.link == Link.ENDED and view.snapshot is not None:
            return f"{view.name} is {view.snapshot.state.state}: {view.snapshot.state.why}"
        if view.link == Link.WAITING:
            return f"detached; nothing was heard of {view.name} yet: see tapdeck status {view.name}"
        if view.link == Link.LOST and view.is_alive is not True:
            return f"detached; no word from the supervisor of {view.name}: see tapdeck status {view.name}"
        return f"detached; the run continues: tapdeck attach {view.name}"

    @property
    def has_failed(self) -> bool:
        """Whether the run that was shown is over and has failed."""
        view = self.view
        return (
            view.link == Link.ENDED
            and view.snapshot is not None
            and view.snapshot.state.state == State.FAILED
        )


def run_console(run: RunFolder | None, *, read_only: bool = False, low_bandwidth: bool = False) -> int:
    """Opens the console on a run, or on the list of runs. Blocks until the operator leaves.

    Args:
        run: live or ended; None: the list.
        read_only: look and not touch; the supervisor refuses the rest.
        low_bandwidth: half as many bytes: the screen changes every two seconds.

    Returns:
        0 after leaving, 7 when the run shown is over and has failed, 1 after an error of the console, 2 when
        this is no terminal that it can draw on, 128+n after a signal.
    """
    refusal = terminal_refusal(run.name if run else "RUN")
    if refusal is not None:
        sys.stderr.write(refusal)
        return 2
    from console.desk import RealDesk

    interval_s = LOW_BANDWIDTH_INTERVAL_S if low_bandwidth else INTERVAL_S
    app = TapdeckApp(
        LiveFeed(run, read_only=read_only, interval_s=interval_s) if run else None,
        desk=RealDesk(read_only=read_only, interval_s=interval_s),
        signs=ASCII if terminal.wants_ascii(os.environ) else UNICODE,
        interval_s=interval_s,
    )
    return run_app(app)


def terminal_refusal(name: str) -> str | None:
    """What to print instead of a screen, where there is no terminal for one; None where there is."""
    refusal = terminal.refusal(os.environ, are_terminals=terminal.are_terminals())
    return refusal and f"{refusal}\n  What to do: tapdeck status {name} --watch prints plain text\n"


def run_app(app: TapdeckApp) -> int:
    """Runs an app on this terminal, guarded, and says farewell. Returns the exit code."""
    terminal.take_any_bytes()
    with terminal.TerminalGuard(app.leave, lambda: app.return_code):
        app.run(mouse=False)
    if app.error is not None:
        traceback.print_exception(app.error)
    # After a hang-up nobody is there to read it.
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.write(visible(app.farewell(), ascii_only=app.signs.ascii_only) + "\n")
        sys.stdout.flush()
    code = app.return_code or int(app.has_panicked)
    return FAILED_RUN_CODE if code == 0 and app.has_failed else code
