"""Which tensors are taken out of a forward pass, and the checks that every batch goes through.

Shapes: T tokens of the batch, H hidden size, K boundaries taken by the adapter.

Boundaries 1..n-1 come through one adapter per mechanism (`extractor.engine.adapters`), mostly from SGLang's own
EAGLE-3 capture. B(0) is the input of the first layer. B(n) and `normed` come from a hook on the final norm,
since SGLang's loop does not visit the last boundary in most classes.

Invariant: what `collect` returns has exactly the taps asked for, each [T, H], of the model's dtype and
width; anything else raises `CaptureError` and ends the run.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from extractor.engine.adapters import adapter_for
from extractor.engine.anatomy import entering_tensor
from extractor.errors import BugError, CaptureError
from extractor.families import Entry

if TYPE_CHECKING:
    from extractor.engine.anatomy import Anatomy
    from extractor.taps import TapSelection

FIRST_LAYER = Entry("layers.0", 1)


class Capture:
    """Takes the selected taps out of each forward pass of one loaded model."""

    def __init__(self, anatomy: Anatomy, *, hidden_size: int, dtype: torch.dtype) -> None:
        self._anatomy = anatomy
        self._adapter = adapter_for(anatomy)
        self._as_served = False
        self._hidden_size = hidden_size
        self._dtype = dtype
        self._taps: TapSelection | None = None
        self._boundaries: tuple[int, ...] = ()
        # The proof calls the same norms between batches, which is not to be seen.
        self._is_in_batch = False
        self._begin()
        family, inner = anatomy.family, anatomy.inner
        if family.calls_forward:
            # No hook on model or layers runs there; norms and the logits processor are called as modules.
            anatomy.input_norm(0).register_forward_pre_hook(self._on_first_norm)
            anatomy.logits_processor.register_forward_pre_hook(self._on_logits_processor)
        else:
            anatomy.layers[0].register_forward_pre_hook(self._on_first_layer, with_kwargs=True)
            inner.register_forward_hook(self._on_inner_model)
        anatomy.final_norm.register_forward_hook(self._on_final_norm)

    def _begin(self) -> None:
        self._embed_TH: torch.Tensor | None = None
        self._final_TH: torch.Tensor | None = None
        self._normed_TH: torch.Tensor | None = None
        self._captured: list[torch.Tensor] = []
        self._norm_calls = 0

    def set_taps(self, taps: TapSelection) -> None:
        """Selects what is captured from the next batch on."""
        n = len(self._anatomy.layers)
        if taps.num_layers != n:
            raise CaptureError(
                f"the model has {n} layers, its config.json says {taps.num_layers}",
                remedy="use the config.json that belongs to these weights",
            )
        if taps.as_served != self._as_served:
            self._adapter.set(())
            self._adapter = adapter_for(self._anatomy, as_served=taps.as_served)
            self._as_served = taps.as_served
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
        self._adapter.check_switch(is_on=bool(self._boundaries))
        self._adapter.begin_batch()
        self._is_in_batch = True

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
        self._is_in_batch = False
        if self._norm_calls != 1:
            raise CaptureError(
                f"the final norm ran {self._norm_calls} times in one batch, expected once; "
                + ("a fused path passes it by, or its hook is gone; " if not self._norm_calls else "")
                + "final and normed cannot be trusted",
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
        self._take_embed(entering_tensor(FIRST_LAYER, args, kwargs))

    def _on_first_norm(self, _: object, args: tuple[Any, ...]) -> None:
        self._take_embed(args[0])

    def _take_embed(self, state_TH: torch.Tensor) -> None:
        if self._is_in_batch and self._taps is not None and 0 in self._taps.boundaries:
            # Cloned: fused norms add to the residual in place, and here that is this very tensor.
            self._embed_TH = state_TH.clone()

    def _on_final_norm(self, _: object, args: tuple[Any, ...], output: Any) -> None:
        if not self._is_in_batch:
            return
        self._norm_calls += 1
        outputs = len(output) if isinstance(output, tuple) else 1
        if outputs != self._anatomy.family.norm_outputs:
            raise CaptureError(
                f"{self._anatomy.name}: the final norm returned {outputs} tensors, expected "
                f"{self._anatomy.family.norm_outputs}: which of them is the last boundary is not known",
                remedy="use a verified SGLang release",
                code="final_norm_outputs",
            )
        if isinstance(output, tuple):
            self._normed_TH, self._final_TH = output
        else:
            self._normed_TH, self._final_TH = output, args[0]

    def _on_logits_processor(self, _: object, args: tuple[Any, ...]) -> None:
        aux = args[4] if len(args) > 4 else None
        self._on_inner_model(None, None, None if aux is None else (args[1], aux))

    def _on_inner_model(self, _: object, __: object, output: Any) -> None:
        # A list of [T, H], or one tensor with the captures side by side.
        self._captured = self._adapter.captured(output)
        if self._captured and not self._boundaries:
            raise CaptureError(
                f"SGLang returned {len(self._captured)} captured tensors, none was asked for",
                code="capture_count",
            )
