"""Which tensors are taken out of a forward pass, and the checks that every batch goes through.

Shapes: T tokens of the batch, H hidden size, K boundaries captured by SGLang itself.

Boundaries 1..n-1 come from SGLang's own EAGLE-3 capture, through one adapter per mechanism (see
`extractor.families`); an adapter sets **and clears**, and can read back what is set. B(0) is the input of
the first layer. B(n) and `normed` come from a hook on the final norm, since SGLang's loop never visits the
last boundary. SGLang's `set_eagle3_layers_to_capture` is never called: its ids mean different things by class.

Invariant: what `collect` returns has exactly the taps asked for, each [T, H], of the model's dtype and
width; anything else raises `CaptureError` and ends the run.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

import torch

from extractor.errors import BugError, CaptureError
from extractor.families import mechanism_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from extractor.taps import TapSelection


class CaptureAdapter(Protocol):
    """Sets, clears and reads back what SGLang captures in one family of classes."""

    mechanism: str

    def set(self, boundaries: Sequence[int]) -> None:
        """Captures exactly these boundaries, each in 1..n-1, ascending; none switches capture off."""

    def active(self) -> tuple[int, ...]:
        """The boundaries that the model would capture now, ascending."""


class ListAdapter:
    """Classes that keep a list of boundaries on the inner model (Llama, Qwen2, Qwen3)."""

    mechanism = "list"

    def __init__(self, model: Any) -> None:
        self._model = model

    def set(self, boundaries: Sequence[int]) -> None:
        """See `CaptureAdapter`."""
        self._model.model.layers_to_capture = list(boundaries)
        # With an empty list the inner model returns one tensor, so the wrapper must not unpack two.
        self._model.capture_aux_hidden_states = bool(boundaries)

    def active(self) -> tuple[int, ...]:
        """See `CaptureAdapter`."""
        return tuple(sorted(self._model.model.layers_to_capture))


class FlagAdapter:
    """Classes that keep a flag on every layer, which SGLang's own setter never clears (Qwen3-MoE)."""

    mechanism = "flag"

    def __init__(self, model: Any) -> None:
        self._model = model

    def set(self, boundaries: Sequence[int]) -> None:
        """See `CaptureAdapter`."""
        wanted = set(boundaries)
        for index, layer in enumerate(self._model.model.layers):
            layer._is_layer_to_capture = index in wanted  # noqa: SLF001 - the mechanism itself
        self._model.model.layers_to_capture = list(boundaries)
        self._model.capture_aux_hidden_states = bool(boundaries)

    def active(self) -> tuple[int, ...]:
        """See `CaptureAdapter`."""
        layers = self._model.model.layers
        return tuple(i for i, layer in enumerate(layers) if getattr(layer, "_is_layer_to_capture", False))


ADAPTERS: Mapping[str, type[ListAdapter] | type[FlagAdapter]] = {
    adapter.mechanism: adapter for adapter in (ListAdapter, FlagAdapter)
}


def adapter_for(model: Any) -> CaptureAdapter:
    """The adapter of a loaded model, by its class.

    Raises:
        PreflightError: the class is not supported.
        CaptureError: the class lacks an attribute that its mechanism needs (another SGLang release?).
    """
    adapter = ADAPTERS[mechanism_of(type(model).__name__)](model)
    missing = [
        name
        for owner, name in ((model, "capture_aux_hidden_states"), (model, "model"), (model, "lm_head"))
        if not hasattr(owner, name)
    ]
    missing += [
        f"model.{name}" for name in ("layers", "norm", "layers_to_capture") if not hasattr(model.model, name)
    ]
    if missing:
        raise CaptureError(
            f"{type(model).__name__} has no {', '.join(missing)}; capture by {adapter.mechanism} needs them",
            remedy="use a verified SGLang release",
        )
    return adapter


class Capture:
    """Takes the selected taps out of each forward pass of one loaded model."""

    def __init__(self, model: Any, *, hidden_size: int, dtype: torch.dtype) -> None:
        self._inner = model.model
        self._adapter = adapter_for(model)
        self._hidden_size = hidden_size
        self._dtype = dtype
        self._taps: TapSelection | None = None
        self._boundaries: tuple[int, ...] = ()
        self._begin()
        self._inner.layers[0].register_forward_pre_hook(self._on_first_layer, with_kwargs=True)
        self._inner.norm.register_forward_hook(self._on_final_norm)
        self._inner.register_forward_hook(self._on_inner_model)

    def _begin(self) -> None:
        self._embed_TH: torch.Tensor | None = None
        self._final_TH: torch.Tensor | None = None
        self._normed_TH: torch.Tensor | None = None
        self._captured: list[torch.Tensor] = []
        self._norm_calls = 0

    def set_taps(self, taps: TapSelection) -> None:
        """Selects what is captured from the next batch on."""
        n = len(self._inner.layers)
        if taps.num_layers != n:
            raise CaptureError(
                f"the model has {n} layers, its config.json says {taps.num_layers}",
                remedy="use the config.json that belongs to these weights",
            )
        self._taps = taps
        self._boundaries = tuple(k for k in taps.boundaries if 0 < k < n)
        self._adapter.set(self._boundaries)

    def begin_batch(self) -> None:
        """Forgets the previous batch. Call before each forward pass.

        Raises:
            CaptureError: something else changed what SGLang captures.
        """
        self._begin()
        active = self._adapter.active()
        if active != self._boundaries:
            stale = sorted(set(active) - set(self._boundaries))
            lost = sorted(set(self._boundaries) - set(active))
            raise CaptureError(
                f"SGLang would capture at the entry of layers {list(active)}, "
                f"asked for were {list(self._boundaries)}"
                + (f"; stale capture flag on layer {stale}" if stale else "")
                + (f"; no capture flag on layer {lost}" if lost else ""),
                code="capture_flags",
            )

    def collect(self, num_tokens: int) -> dict[str, torch.Tensor]:
        """The taps of the batch that was just run.

        Args:
            num_tokens: T, the tokens that were sent.

        Returns:
            Tap name to [T, H], in stored order, on the model's device; freshly allocated by this batch.

        Raises:
            CaptureError: a count, shape, dtype or width is not what was asked for.
        """
        if self._taps is None:
            raise BugError("collect before set_taps")
        if self._norm_calls != 1:
            raise CaptureError(
                f"the final norm ran {self._norm_calls} times in one batch, expected once; "
                "final and normed cannot be trusted",
                code="final_norm_calls",
            )
        between = dict(zip(self._boundaries, self._unpack(), strict=True))
        hooked = {"embed": self._embed_TH, "final": self._final_TH, "normed": self._normed_TH}
        states = {
            tap.name: self._present(hooked[tap.name], tap.name)
            if tap.name in hooked
            else between[tap.boundary]
            for tap in self._taps.taps
        }
        for name, state_TH in states.items():
            self._check(name, state_TH, num_tokens)
        return states

    def final_and_normed(self) -> tuple[torch.Tensor, torch.Tensor]:
        """B(n) and the output of the final norm of the batch that was just run, [T, H] each."""
        return self._present(self._final_TH, "final"), self._present(self._normed_TH, "normed")

    def _unpack(self) -> list[torch.Tensor]:
        """SGLang's captures as K tensors [T, H]; some classes pack them as [T, K*H]."""
        wanted = len(self._boundaries)
        captured = self._captured
        if len(captured) == 1 and wanted > 1 and captured[0].shape[-1] == wanted * self._hidden_size:
            captured = list(torch.split(captured[0], self._hidden_size, dim=-1))
        if len(captured) != wanted:
            raise CaptureError(
                f"SGLang returned {len(captured)} captured tensors, {wanted} taps were asked for "
                f"(boundaries {list(self._boundaries)})",
                code="capture_count",
            )
        return captured

    def _check(self, name: str, state_TH: torch.Tensor, num_tokens: int) -> None:
        if tuple(state_TH.shape) != (num_tokens, self._hidden_size):
            raise CaptureError(
                f"{name} has shape {tuple(state_TH.shape)}, expected ({num_tokens}, {self._hidden_size}): "
                "rows returned must equal tokens sent",
                code="capture_shape",
            )
        if state_TH.dtype != self._dtype:
            raise CaptureError(f"{name} is {state_TH.dtype}, expected {self._dtype}", code="capture_dtype")

    @staticmethod
    def _present(state_TH: torch.Tensor | None, name: str) -> torch.Tensor:
        if state_TH is None:
            raise CaptureError(f"{name} was not seen in this batch", code="capture_missing")
        return state_TH

    def _on_first_layer(self, _: object, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._taps is not None and 0 in self._taps.boundaries:
            # Cloned: fused norms add to the residual in place, and here that is this very tensor.
            self._embed_TH = (kwargs["hidden_states"] if "hidden_states" in kwargs else args[1]).clone()

    def _on_final_norm(self, _: object, args: tuple[Any, ...], output: Any) -> None:
        self._norm_calls += 1
        if isinstance(output, tuple):
            self._normed_TH, self._final_TH = output
        else:
            self._normed_TH, self._final_TH = output, args[0]

    def _on_inner_model(self, _: object, __: object, output: Any) -> None:
        # A list of [T, H], or one tensor with the captures side by side.
        captured = output[1] if isinstance(output, tuple) else []
        self._captured = [captured] if isinstance(captured, torch.Tensor) else list(captured)
        if self._captured and not self._boundaries:
            raise CaptureError(
                f"SGLang returned {len(self._captured)} captured tensors, none was asked for",
                code="capture_count",
            )
