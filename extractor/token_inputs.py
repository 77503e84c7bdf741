"""Token ids as a caller of the Python API hands them in, and how they are packed into batches.

Pure: no torch, no clock, no process. Invariants: every input is in exactly one batch; a batch holds whole
inputs, at least one, and keeps both bounds; nothing that the caller gave is changed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from extractor.errors import ArgumentError
from extractor.plan import plan_batches

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import numpy.typing as npt

WINDOW = 1024
"""Inputs that are packed together: packing takes time that grows with the square of their number."""


def as_sequences(token_ids: Any, *, max_tokens: int, vocab_size: int | None) -> list[npt.NDArray[np.int32]]:
    """Checks the token ids of all inputs and cuts what is longer than `max_tokens`.

    Args:
        token_ids: a sequence of inputs, each a sequence of integers (list, tuple, array or tensor), or a tensor
            or array [inputs, tokens].
        max_tokens: longest input; the rest of a longer one is dropped.
        vocab_size: token ids are below it; None: not known.

    Returns:
        One int32 array [t] per input, in the same order.

    Raises:
        ArgumentError: there is no input, an input is empty, or a token id is not in the vocabulary.
        TypeError: what was given are not sequences of integers.
    """
    if hasattr(token_ids, "tolist"):
        token_ids = token_ids.tolist()
    if isinstance(token_ids, str | bytes | dict) or not hasattr(token_ids, "__iter__"):
        raise TypeError(
            f"token_ids is {_kind(token_ids)}; expected list[list[int]] or a tensor [inputs, tokens]"
        )
    inputs = list(token_ids)
    if not inputs:
        raise ArgumentError("token_ids cannot be empty", code="no_input")
    return [_sequence(index, ids, max_tokens, vocab_size) for index, ids in enumerate(inputs)]


def pack(lengths: Sequence[int], *, max_tokens: int, max_sequences: int) -> Iterator[tuple[int, ...]]:
    """Packs inputs into batches, as the plan of a run packs its samples.

    Args:
        lengths: tokens of each input, each in 1..max_tokens.
        max_tokens: token budget of a batch.
        max_sequences: most inputs in a batch.

    Yields:
        Indices of the inputs of one batch.
    """
    for start in range(0, len(lengths), WINDOW):
        window = range(start, min(start + WINDOW, len(lengths)))
        for batch in plan_batches(window, lengths, max_tokens):
            for first in range(0, len(batch), max_sequences):
                yield batch[first : first + max_sequences]


def _sequence(index: int, ids: Any, max_tokens: int, vocab_size: int | None) -> npt.NDArray[np.int32]:
    if isinstance(ids, str | bytes | dict) or not hasattr(ids, "__len__"):
        raise TypeError(f"token_ids[{index}] is {_kind(ids)}; expected a sequence of token ids")
    # A tensor may be on a GPU, which numpy cannot read.
    cut = ids[:max_tokens]
    values = np.asarray(cut.tolist() if hasattr(cut, "tolist") else cut)
    if values.ndim != 1:
        raise TypeError(f"token_ids[{index}] has {values.ndim} dimensions; expected one, of token ids")
    if not len(values):
        raise ArgumentError(
            f"token_ids[{index}] is empty; an input has at least one token",
            remedy="leave it out",
            code="empty_input",
        )
    if values.dtype.kind not in "iu":
        raise TypeError(f"token_ids[{index}] holds {values.dtype}, expected integers")
    wrong = (values < 0) | (values >= (2**31 if vocab_size is None else vocab_size))
    if wrong.any():
        position = int(wrong.argmax())
        raise ArgumentError(
            f"token_ids[{index}][{position}] is {int(values[position])}, which is not in the model's vocabulary "
            f"of {vocab_size}",
            remedy="use the tokenizer that belongs to this model",
            code="token_out_of_vocabulary",
        )
    return values.astype(np.int32)


def _kind(value: object) -> str:
    return "None" if value is None else f"a {type(value).__name__}"
