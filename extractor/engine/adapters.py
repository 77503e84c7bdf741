"""How boundaries 1..n-1 are taken out of a model: one adapter per mechanism of `extractor.families`.

An adapter sets **and clears**, and reads back what is set from the model itself. SGLang's own setters are never
called: their ids mean different things by class, and they do not clear.

Invariant: with no boundary set, capture is off, so that the inner model returns one tensor.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

import torch

from extractor.errors import BugError, CaptureError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from extractor.engine.anatomy import Anatomy

SWITCH = "capture_aux_hidden_states"
FLAG = "_is_layer_to_capture"


class CaptureAdapter(Protocol):
    """Sets, clears and reads back what is captured in one family of classes."""

    mechanism: str

    def set(self, boundaries: Sequence[int]) -> None:
        """Captures exactly these boundaries, each in 1..n-1, ascending; none switches capture off."""

    def active(self) -> tuple[int, ...]:
        """The boundaries that the model would capture now, ascending."""

    def check_switch(self, *, is_on: bool) -> None:
        """Whether whoever calls the inner model expects captures from it, as must be.

        Raises:
            CaptureError: it does not, or it does and must not.
        """

    def begin_batch(self) -> None:
        """Forgets the captures of the previous batch."""

    def captured(self, output: Any) -> list[torch.Tensor]:
        """The captures of this batch, ascending, from what the inner model returned; or one packed tensor."""


class StockAdapter:
    """SGLang's own capture: a container of ids on the inner model and a switch on its wrapper."""

    mechanism = "list"

    def __init__(self, anatomy: Anatomy) -> None:
        family = anatomy.family
        self._anatomy = anatomy
        self._name = family.container
        self._owner = anatomy.inner
        self._position = family.captured_at
        if not hasattr(self._owner, self._name):
            raise _lacks(anatomy, f"{type(self._owner).__name__} has no {self._name}", self.mechanism)
        content = getattr(self._owner, self._name)
        self._make: Callable[[Sequence[int]], Any] = set if isinstance(content, set) else list
        self._switches = [anatomy.wrapper, *([anatomy.inner] if family.has_inner_switch else [])]
        for owner in self._switches:
            if not hasattr(owner, SWITCH):
                raise _lacks(anatomy, f"{type(owner).__name__} has no {SWITCH}", self.mechanism)

    def set(self, boundaries: Sequence[int]) -> None:
        """See `CaptureAdapter`."""
        is_off = not boundaries and self._anatomy.family.is_off_when_none
        setattr(self._owner, self._name, None if is_off else self._make(boundaries))
        # With nothing to capture the inner model returns one tensor, so the wrapper must not unpack two.
        for owner in self._switches:
            # Some classes derive it from the container.
            if not isinstance(getattr(type(owner), SWITCH, None), property):
                setattr(owner, SWITCH, bool(boundaries))

    def active(self) -> tuple[int, ...]:
        """See `CaptureAdapter`."""
        return tuple(sorted(getattr(self._owner, self._name) or ()))

    def check_switch(self, *, is_on: bool) -> None:
        """See `CaptureAdapter`."""
        for owner in self._switches:
            if bool(getattr(owner, SWITCH)) != is_on:
                raise CaptureError(
                    f"{self._anatomy.name}: {SWITCH} of {type(owner).__name__} is {'off' if is_on else 'on'} "
                    f"while {'some' if is_on else 'no'} boundaries are captured",
                    code="capture_switch",
                )

    def begin_batch(self) -> None:
        """See `CaptureAdapter`."""

    def captured(self, output: Any) -> list[torch.Tensor]:
        """See `CaptureAdapter`."""
        if not isinstance(output, tuple) or len(output) <= self._position:
            return []
        captured = output[self._position]
        return [captured] if isinstance(captured, torch.Tensor) else list(captured)


class ListAdapter(StockAdapter):
    """Classes that keep the boundaries in a list or a set (Llama, Qwen3, DeepSeek, Nemotron-H)."""


class FlagAdapter(StockAdapter):
    """Classes that keep a flag on every layer, which SGLang's own setter never clears (Qwen3-MoE).

    Some read the list beside it as well, for the last boundary alone, which is never asked for here.
    """

    mechanism = "flag"

    def set(self, boundaries: Sequence[int]) -> None:
        """See `CaptureAdapter`."""
        wanted = set(boundaries)
        for index, layer in enumerate(self._anatomy.layers):
            setattr(layer, FLAG, index in wanted)
        super().set(boundaries)

    def active(self) -> tuple[int, ...]:
        """See `CaptureAdapter`."""
        listed = super().active()
        beyond = [k for k in listed if k >= len(self._anatomy.layers)]
        flagged = [i for i, layer in enumerate(self._anatomy.layers) if getattr(layer, FLAG, False)]
        return tuple(flagged + beyond)


class AfterAdapter(StockAdapter):
    """Classes that take the stream after the layers they list, so that id k-1 is B(k) (Kimi-Linear)."""

    mechanism = "after"

    def set(self, boundaries: Sequence[int]) -> None:
        """See `CaptureAdapter`."""
        super().set([k - 1 for k in boundaries])

    def active(self) -> tuple[int, ...]:
        """See `CaptureAdapter`."""
        return tuple(index + 1 for index in super().active())


class HookAdapter:
    """A hook on the input norm of each tapped layer, where SGLang's own capture gives something else.

    The norm is given the last branch's output and the residual, and returns (normed, B(k)); or it is given
    B(k) alone. SGLang's own capture is kept off.
    """

    mechanism = "hook"

    def __init__(self, anatomy: Anatomy) -> None:
        self._anatomy = anatomy
        self._handles: dict[int, Any] = {}
        self._seen: dict[int, list[torch.Tensor]] = {}
        self._is_in_batch = False
        self._stock = STOCK[anatomy.family.stock](anatomy) if anatomy.family.stock else None

    def set(self, boundaries: Sequence[int]) -> None:
        """See `CaptureAdapter`."""
        if self._stock is not None:
            self._stock.set(())
        for handle in self._handles.values():
            handle.remove()
        self._handles = {
            k: self._anatomy.input_norm(k).register_forward_hook(self._hook(k)) for k in boundaries
        }
        self._seen = {}

    def active(self) -> tuple[int, ...]:
        """See `CaptureAdapter`."""
        alive = [k for k, handle in self._handles.items() if handle.id in (handle.hooks_dict_ref() or {})]
        return tuple(sorted({*alive, *(self._stock.active() if self._stock else ())}))

    def check_switch(self, *, is_on: bool) -> None:  # noqa: ARG002 -- hooks have no switch
        """See `CaptureAdapter`: SGLang's own capture stays off whatever the hooks do."""
        if self._stock is not None:
            self._stock.check_switch(is_on=False)

    def begin_batch(self) -> None:
        """See `CaptureAdapter`."""
        self._seen = {}
        self._is_in_batch = True

    def captured(self, output: Any) -> list[torch.Tensor]:
        """See `CaptureAdapter`."""
        self._is_in_batch = False
        if self._stock is not None and (stock := self._stock.captured(output)):
            raise CaptureError(
                f"SGLang returned {len(stock)} captured tensors of its own, which was switched off",
                code="capture_count",
            )
        wrong = {k: len(seen) for k, seen in self._seen.items() if len(seen) != 1}
        if wrong:
            raise CaptureError(
                f"{self._anatomy.name}: input norms ran more than once in a batch (layer: times): {wrong}",
                code="capture_count",
            )
        return [self._seen[k][0] for k in sorted(self._seen)]

    def _hook(self, k: int) -> Callable[..., None]:
        def on_norm(_: object, args: tuple[Any, ...], output: Any) -> None:
            # The proof calls the same norms between batches.
            if not self._is_in_batch:
                return
            stream_TH = output[1] if isinstance(output, tuple) else args[0]
            # Cloned at once: the layer's next fused norm adds to the residual in place.
            self._seen.setdefault(k, []).append(stream_TH.clone())

        return on_norm


STOCK: Mapping[str, type[StockAdapter]] = {
    adapter.mechanism: adapter for adapter in (ListAdapter, FlagAdapter, AfterAdapter)
}


def adapter_for(anatomy: Anatomy, *, as_served: bool = False) -> CaptureAdapter:
    """The adapter of a loaded model.

    Args:
        anatomy: its parts.
        as_served: take what SGLang's own capture gives, whatever it is.

    Raises:
        CaptureError: the class lacks an attribute that its mechanism needs (another SGLang release?).
    """
    family = anatomy.family
    if family.mechanism == "hook" and not as_served:
        return HookAdapter(anatomy)
    stock = family.stock or family.mechanism
    if stock == "hook":
        raise BugError(f"{anatomy.name} has no capture of its own")
    return STOCK[stock](anatomy)


def _lacks(anatomy: Anatomy, what: str, mechanism: str) -> CaptureError:
    return CaptureError(
        f"{anatomy.name}: {what}; capture by {mechanism} needs it",
        remedy="use a verified SGLang release",
        code="model_parts",
    )
