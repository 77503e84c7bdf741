"""What an operator asks of a run: checked, done, and written into the event log, also when it is refused."""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from typing import TYPE_CHECKING

import msgspec

from extractor.errors import TapdeckError
from extractor.protocol.api import ActionRequest, ActionResult, Refusal
from extractor.protocol.states import AVAILABLE_DEPTHS, Action, Depth, Reason, State, refusal
from extractor.supervisor.core import Stop
from extractor.supervisor.events import Event

if TYPE_CHECKING:
    from extractor.supervisor.core import Supervisor
    from extractor.supervisor.events import Who

REMEMBERED_KEYS = 256


class RequestRefusedError(Exception):
    """A request that is not done; carries the answer and its HTTP status."""

    def __init__(self, status: int, answer: Refusal) -> None:
        super().__init__(answer.message)
        self.status = status
        self.answer = answer


class Actions:
    """The actions of one run. Called in the supervisor's event loop; each is done when it returns."""

    def __init__(self, supervisor: Supervisor) -> None:
        self._supervisor = supervisor
        self._answers: OrderedDict[str, tuple[str, ActionRequest, ActionResult]] = OrderedDict()
        self._last = ""

    def act(self, name: str, request: ActionRequest, who: Who, *, is_read_only: bool) -> ActionResult:
        """Does one action, or repeats the answer of an earlier request with the same key.

        Raises:
            RequestRefusedError: 403 read-only, 404 no such action, 409 another revision or not possible now, 400 a
                depth that does not exist.
            TapdeckError: it cannot be recorded; nothing has changed.
        """
        supervisor = self._supervisor
        old = supervisor.state
        try:
            if is_read_only:
                raise self._refused(
                    403, "read_only", "this client is read-only", "attach without --read-only"
                )
            action = self._action(name)
            key = request.idempotency_key
            if key is not None and key in self._answers:
                return self._repeated(name, request, *self._answers[key])
            depth = self._check(action, request)
            message = self._do(action, depth, who)
        except RequestRefusedError as refused:
            self._log(name, request, who, old, result=refused.answer.message)
            raise
        except TapdeckError as error:
            self._log(name, request, who, old, result=error.message)
            raise
        # The person first, then what follows from it.
        self._log(name, request, who, old, result="ok")
        supervisor.changed()
        supervisor.wake_watchers()
        self._last = f"{name} by {who.user}"
        answer = ActionResult(message=message, revision=supervisor.pauses.revision, state=supervisor.state)
        if key is not None:
            self._answers[key] = name, request, answer
            while len(self._answers) > REMEMBERED_KEYS:
                self._answers.popitem(last=False)
        return answer

    def _repeated(
        self, name: str, request: ActionRequest, first_name: str, first: ActionRequest, answer: ActionResult
    ) -> ActionResult:
        if (name, request) != (first_name, first):
            raise self._refused(
                409,
                "conflict",
                f"the idempotency key was used for another request ({first_name})",
                "use a new key for each request",
            )
        return answer

    def _action(self, name: str) -> Action:
        try:
            return Action(name)
        except ValueError:
            known = ", ".join(Action)
            raise self._refused(
                404, "no_such", f"there is no action {name}", f"use one of: {known}"
            ) from None

    def _check(self, action: Action, request: ActionRequest) -> Depth:
        supervisor = self._supervisor
        now, expected = supervisor.pauses.revision, request.expected_revision
        if expected is not None and expected != now:
            raise self._refused(
                409,
                "conflict",
                f"the run has changed since you looked (revision {expected}, now {now}): "
                f"{self._last or 'somebody else was faster'}",
                "look at what it does now, then decide again",
            )
        why_not = refusal(action, supervisor.state, supervisor.pauses.pauses)
        if why_not is not None:
            raise self._refused(409, "not_possible", f"{action} is not possible now: {why_not}", None)
        return self._depth(request.depth) if action == Action.PAUSE else Depth.HOLD

    def _depth(self, name: str | None) -> Depth:
        available = ", ".join(AVAILABLE_DEPTHS)
        try:
            depth = Depth(name or Depth.HOLD)
        except ValueError:
            raise self._refused(
                400, "bad_request", f"there is no depth {name}", f"use one of: {available}"
            ) from None
        if depth not in AVAILABLE_DEPTHS:
            raise self._refused(
                409, "not_possible", f"{depth} is not available in this version", f"use one of: {available}"
            )
        pauses = self._supervisor.pauses.pauses
        if any(p.reason == Reason.OPERATOR and p.depth == depth for p in pauses):
            raise self._refused(409, "not_possible", f"it is paused already ({depth})", None)
        return depth

    def _do(self, action: Action, depth: Depth, who: Who) -> str:
        match action:
            case Action.PAUSE:
                return self._pause(depth, who)
            case Action.RESUME:
                return self._resume(who)
            case Action.STOP:
                return self._stop(who)
            case Action.KILL:
                return self._kill(who)

    def _pause(self, depth: Depth, who: Who) -> str:
        self._supervisor.pauses.add(Reason.OPERATOR, depth, by=_name(who))
        effect = {
            Depth.HOLD: "nothing more is computed after the batch in flight; everything stays loaded",
            Depth.UNLOAD: "the shard in hand is finished, then the processes leave the GPUs",
        }
        return f"paused ({depth}): {effect[depth]}"

    def _resume(self, who: Who) -> str:
        self._supervisor.pauses.lift(Reason.OPERATOR, Reason.FAULT, Reason.DISK)
        return f"resumed by {_name(who)}"

    def _stop(self, who: Who) -> str:
        self._touch()
        self._supervisor.note_stop(Stop.DRAIN, by=_name(who))
        return "stopping: the shard in hand is finished first; started again, the run goes on from there"

    def _kill(self, who: Who) -> str:
        self._touch()
        self._supervisor.note_stop(Stop.KILL, by=_name(who))
        return "killed: the shard in hand is dropped; started again, the run computes it anew"

    def _touch(self) -> None:
        # A full disk must not keep anybody from ending a run.
        with contextlib.suppress(TapdeckError):
            self._supervisor.pauses.touch()

    def _refused(self, status: int, code: str, message: str, remedy: str | None) -> RequestRefusedError:
        revision = self._supervisor.pauses.revision
        return RequestRefusedError(
            status, Refusal(code=code, message=message, remedy=remedy, revision=revision)
        )

    def _log(self, name: str, request: ActionRequest, who: Who, old: State, *, result: str) -> None:
        supervisor = self._supervisor
        supervisor.events.add(
            Event.ACTION,
            who=who,
            action=name,
            depth=request.depth,
            old=old,
            new=supervisor.next_state,
            revision=supervisor.pauses.revision,
            result=result,
        )


def _name(who: Who) -> str:
    return who.user + (f" ({who.origin})" if who.origin else "")


def decode_request(body: bytes) -> ActionRequest:
    """The body of a request; an empty one asks for nothing special.

    Raises:
        RequestRefusedError: 400, with the path of what is wrong.
    """
    try:
        return msgspec.json.decode(body or b"{}", type=ActionRequest)
    except msgspec.DecodeError as error:
        raise RequestRefusedError(
            400,
            Refusal(
                code="bad_request", message=f"the body of the request: {error}", remedy="see docs/api.md"
            ),
        ) from error
