"""Where the parts of a loaded model are: the wrapper, the inner model, its layers and their norms.

Follows the record of `extractor.families`. Knows neither taps nor batches, and changes nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from extractor.errors import CaptureError
from extractor.families import family_of

if TYPE_CHECKING:
    from extractor.families import Entry, Family


class Anatomy:
    """The parts of one loaded model.

    Attributes:
        name: the model's class.
        family: its record.
        wrapper: the object that unpacks what the inner model returns and makes logits.
        inner: the object that has the layers and the final norm.
        layers: the decoder layers, n of them.
        final_norm: the module that makes `normed`.
        head: what the logits processor is given as head.
        logits_processor: of the wrapper.
    """

    def __init__(self, model: Any) -> None:
        """Finds the parts.

        Raises:
            PreflightError: the class is not supported.
            CaptureError: a part is not where the record says (another SGLang release?).
        """
        self.name = type(model).__name__
        self.family: Family = family_of(self.name)
        self.wrapper = self._find(model, self.family.wrapper)
        self.inner = self._find(self.wrapper, self.family.inner)
        self.layers = self._find(self.inner, "layers")
        self.final_norm = self._find(self.inner, self.family.final_norm)
        self.head = self._find(self.wrapper, self.family.head)
        self.logits_processor = self._find(self.wrapper, "logits_processor")
        for index in range(len(self.layers)):
            self.input_norm(index)
            self.entry(index)

    def input_norm(self, index: int) -> Any:
        """The norm that B(index) goes through at the entry of its layer."""
        return self._find(self.layers[index], self.family.input_norm)

    def entry(self, index: int) -> tuple[Any, Entry]:
        """The module of a layer that is given what its input norm made, and its entry in the record."""
        for entry in self.family.entries:
            try:
                return _resolve(self.layers[index], entry.module), entry
            except (AttributeError, IndexError, TypeError):
                continue
        paths = " or ".join(entry.module for entry in self.family.entries)
        raise self._lacks(f"layer {index} ({type(self.layers[index]).__name__}) has no {paths}")

    def _find(self, owner: Any, path: str) -> Any:
        try:
            return _resolve(owner, path)
        except (AttributeError, IndexError, TypeError):
            raise self._lacks(f"{type(owner).__name__} has no {path}") from None

    def _lacks(self, what: str) -> CaptureError:
        return CaptureError(
            f"{self.name}: {what}; capture by {self.family.mechanism} needs it",
            remedy="use a verified SGLang release",
            code="model_parts",
        )


def entering_tensor(entry: Entry, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What a module was given to work on, from the arguments of a pre-hook."""
    return kwargs["hidden_states"] if "hidden_states" in kwargs else args[entry.position]


def _resolve(owner: Any, path: str) -> Any:
    for part in path.split(".") if path else ():
        owner = owner[int(part)] if part.isdigit() else getattr(owner, part)
    if owner is None:
        raise AttributeError(path)
    return owner
