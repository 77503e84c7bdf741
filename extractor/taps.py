"""Which boundaries of a model are stored, under which names, in every id convention.

Boundary B(k) is the residual stream that enters decoder layer k: B(0) is the embedding, B(n) leaves the
last layer and has not seen the final norm. A tap is a boundary that is stored. Its id v means "after
decoder layer v", so tap v is B(v+1). `normed` is what the final norm makes of B(n); it is no boundary.

Pure: no clock, no disk, no torch. Invariants: a selection is ascending, without duplicates, not empty,
and every tap of it exists in a model of `num_layers` layers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import msgspec

from extractor.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence

Convention = Literal["after", "before"]


class Tap(msgspec.Struct, frozen=True, order=True):
    """One stored tensor per token.

    Attributes:
        boundary: k of B(k), 0..n. For `normed` it is n, and `is_normed` is true.
        is_normed: true for the output of the final norm.
        name: its name in files and messages: `embed`, `layer_002`, `final`, `normed`.
    """

    boundary: int
    is_normed: bool
    name: str


class TapSelection(msgspec.Struct, frozen=True):
    """The taps of a run, ascending; `normed` last.

    Attributes:
        taps: the stored tensors, in the order in which they are kept everywhere.
        num_layers: n, the number of decoder layers of the model.
        is_default: nobody chose these layers; they are `default_layers(n)`.
        as_served: the layers between are what SGLang's own capture gives, whatever that is in the model's class;
            `embed`, `final` and `normed` are the same either way.
    """

    taps: tuple[Tap, ...]
    num_layers: int
    is_default: bool = False
    as_served: bool = False

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the taps in stored order."""
        return tuple(tap.name for tap in self.taps)

    @property
    def boundaries(self) -> tuple[int, ...]:
        """Boundaries k of the stored B(k), ascending, without `normed`."""
        return tuple(tap.boundary for tap in self.taps if not tap.is_normed)

    def ids(self, convention: Convention) -> tuple[int, ...]:
        """Layer ids of the stored boundaries in one convention (`embed` is -1 in "after")."""
        shift = 0 if convention == "before" else 1
        return tuple(k - shift for k in self.boundaries)

    def auxiliary_ids(self, convention: Convention) -> tuple[int, ...]:
        """Layer ids without the last boundary: what a draft model's configuration lists."""
        n = self.num_layers
        shift = 0 if convention == "before" else 1
        return tuple(k - shift for k in self.boundaries if k < n)


def make_tap(boundary: int, num_layers: int) -> Tap:
    """The tap of one boundary, 0..num_layers."""
    if boundary == 0:
        return Tap(0, False, "embed")
    if boundary == num_layers:
        return Tap(num_layers, False, "final")
    return Tap(boundary, False, f"layer_{boundary - 1:03d}")


def default_layers(num_layers: int) -> tuple[int, ...]:
    """After-layer ids that SGLang and vLLM serve by default: B(2), B(n//2), B(n-3).

    Source: `set_eagle3_layers_to_capture` of SGLang 0.5.23, `models/llama.py`.

    Raises:
        ConfigError: the model has too few layers for three different defaults.
    """
    ids = (1, num_layers // 2 - 1, num_layers - 4)
    if len(set(ids)) < 3 or list(ids) != sorted(ids) or ids[0] < 0:
        raise ConfigError(
            f"taps.layers: a model of {num_layers} layers has no default selection",
            remedy=f"name the layers, for example taps.layers = [{max(0, num_layers - 2)}]",
        )
    return ids


def select(
    *,
    num_layers: int,
    layers: Sequence[int] | None,
    embed: bool,
    final: bool,
    normed: bool,
    convention: Convention,
    as_served: bool = False,
) -> TapSelection:
    """Resolves a selection as `run.toml` states it.

    Args:
        num_layers: n.
        layers: ids in `convention`, in any order; None takes `default_layers`.
        embed: store B(0).
        final: store B(n). Layer id n-1 ("after") means the same and may be given as well.
        normed: store the output of the final norm.
        convention: what an id means: "after" layer v, or B(v) ("before", vLLM and speculators >= 0.5).
        as_served: store what SGLang's own capture gives.

    Raises:
        ConfigError: an id is out of range or given twice, or nothing is selected.
    """
    is_default = layers is None
    after = default_layers(num_layers) if layers is None else _to_after(layers, num_layers, convention)
    boundaries = {v + 1 for v in after}
    if embed:
        boundaries.add(0)
    if final:
        boundaries.add(num_layers)
    taps = [make_tap(k, num_layers) for k in sorted(boundaries)]
    if normed:
        taps.append(Tap(num_layers, True, "normed"))
    if not taps:
        raise ConfigError("taps: nothing is selected", remedy="give taps.layers, or set taps.final = true")
    return TapSelection(tuple(taps), num_layers, is_default, as_served)


def _to_after(layers: Sequence[int], num_layers: int, convention: Convention) -> list[int]:
    """Ids as "after" ids (-1 is the embedding), checked for range and duplicates."""
    low, high = (0, num_layers) if convention == "before" else (0, num_layers - 1)
    for value in layers:
        if not low <= value <= high:
            raise ConfigError(
                f"taps.layers: layer {value} does not exist; the model has {num_layers} layers, so ids run "
                f'from {low} to {high} in the convention "{convention}"',
                remedy=f"choose ids from {low} to {high}"
                + (f"; {num_layers - 1} is the last layer (final)" if convention == "after" else ""),
                code="layer_out_of_range",
            )
    doubles = sorted({value for value in layers if list(layers).count(value) > 1})
    if doubles:
        raise ConfigError(
            f"taps.layers: given twice: {', '.join(map(str, doubles))}",
            remedy="name each layer once",
            code="layer_duplicate",
        )
    return [value - 1 for value in layers] if convention == "before" else list(layers)
