"""Text to token ids, and where in the text each token lies.

Two independent ways to lay tokens over a text: the tokenizer's offset mapping, and the byte lengths of the
tokens (for tokenizers without offsets, such as tiktoken-based ones). Either is used only if it covers the
text without a gap; otherwise the text is refused, never estimated.

Invariants: ids are exactly `encode(text)` without added special tokens; a token is supervised if and only
if all of its characters (bytes) lie in a supervised span. That is `BORDER_RULE`: a token shared between
the header and an answer is not supervised, in every record alike.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from extractor.dataset.rejects import RecordRejectedError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

BORDER_RULE = "inside: a token is supervised if and only if all of its characters are"


class EndMarker(msgspec.Struct, frozen=True):
    """An added token that may end a turn.

    Attributes:
        text: as it stands in rendered text.
        takes_spaces_after: the token swallows white space that follows it.
    """

    text: str
    takes_spaces_after: bool = False


class TextTokenizer:
    """A tokenizer of transformers, reduced to what masks need."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._added: Mapping[int, Any] = tokenizer.added_tokens_decoder
        self._pieces: dict[int, tuple[bytes | None, bytes]] = {}
        self.has_offsets = bool(tokenizer.is_fast)
        self.bos: str | None = tokenizer.bos_token

    @property
    def added_tokens(self) -> list[EndMarker]:
        """All added tokens, longest first."""
        markers = [EndMarker(token.content, bool(token.rstrip)) for token in self._added.values()]
        return sorted(markers, key=lambda marker: (-len(marker.text), marker.text))

    def encode(self, text: str) -> tuple[NDArray[np.int32], NDArray[np.int64], NDArray[np.int64]]:
        """Token ids of a text, and the characters that each token covers.

        Returns:
            ids [t], first character [t], character after the last [t].

        Raises:
            RecordRejectedError: `mask_uncertain` when neither way covers the text without a gap.
        """
        if not self.has_offsets:
            # Called, not .encode(): tokenizers of model folders override that with other arguments.
            ids = self._tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
            return (np.asarray(ids, np.int32), *self._by_bytes(ids, text))
        encoded = self._tokenizer(
            text,
            add_special_tokens=False,
            return_offsets_mapping=True,
            return_attention_mask=False,
            verbose=False,
        )
        ids = encoded["input_ids"]
        offsets = np.asarray(encoded["offset_mapping"], np.int64).reshape(-1, 2)  # [t, 2]
        starts, ends = offsets[:, 0], offsets[:, 1]
        if not _covers(starts, ends, len(text)):
            # Some tokenizers report offsets without the white space that belongs to the token.
            starts, ends = self._by_bytes(ids, text)
        return np.asarray(ids, np.int32), starts, ends

    def _by_bytes(self, ids: Sequence[int], text: str) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        starts, ends = byte_extents(self.pieces(ids), text)
        return _characters(text, starts, ends)

    def pieces(self, ids: Sequence[int]) -> list[tuple[bytes | None, bytes]]:
        """The bytes of each token, read as byte-level characters (or None) and as a SentencePiece piece."""
        for token in set(ids) - self._pieces.keys():
            if token in self._added:
                raw = self._added[token].content.encode()
                self._pieces[token] = (raw, raw)
            else:
                piece = self._tokenizer.convert_ids_to_tokens(token)
                self._pieces[token] = _piece_bytes(piece)
        return [self._pieces[token] for token in ids]

    def decode_each(self, ids: Sequence[int]) -> list[str]:
        """Each token as text of its own; incomplete characters show as U+FFFD."""
        return [self._tokenizer.decode([token], skip_special_tokens=False) for token in ids]


def token_mask(
    starts: NDArray[np.int64], ends: NDArray[np.int64], spans: Sequence[tuple[int, int]]
) -> NDArray[np.uint8]:
    """Which tokens are supervised, by `BORDER_RULE`.

    Args:
        starts: first character of each token [t].
        ends: character after the last [t].
        spans: supervised characters; spans that touch are one.

    Returns:
        0 or 1 for each token [t].
    """
    mask = np.zeros(len(starts), np.uint8)
    for start, end in merge_spans(spans):
        mask[(starts >= start) & (ends <= end) & (ends > starts)] = 1
    return mask


def merge_spans(spans: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Sorted, disjoint spans in which those that touch or overlap are joined."""
    merged: list[tuple[int, int]] = []
    for start, end in sorted(spans):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        elif start < end:
            merged.append((start, end))
    return merged


def byte_extents(
    pieces: Sequence[tuple[bytes | None, bytes]], text: str
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Byte positions of tokens whose bytes, put together, are the text.

    Raises:
        RecordRejectedError: `mask_uncertain` when they are not (a normalising tokenizer, for example).
    """
    raw = text.encode()
    for scheme in (0, 1):
        tokens = [piece[scheme] for piece in pieces]
        known = [token for token in tokens if token is not None]
        if len(known) < len(tokens):
            continue
        joined = b"".join(known)
        # SentencePiece puts a blank before the text that is not part of it.
        virtual = 1 if scheme == 1 and joined == b" " + raw else 0
        if joined[virtual:] == raw:
            ends = np.cumsum([len(token) for token in known], dtype=np.int64) - virtual  # [t]
            starts = np.concatenate([np.zeros(min(1, len(ends)), np.int64), ends[:-1]])
            return starts, ends
    raise RecordRejectedError("mask_uncertain", "the tokens' bytes do not add up to the rendered text")


def _characters(
    text: str, starts: NDArray[np.int64], ends: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Byte positions as characters: a token that holds part of a character covers all of it."""
    raw = np.frombuffer(text.encode(), np.uint8)
    is_first = (raw & 0xC0) != 0x80  # [bytes]: first byte of a character
    through = np.concatenate([[0], np.cumsum(is_first)])  # [bytes + 1]: characters begun before byte i
    at_border = np.append(is_first, [True])
    first = np.where(at_border[starts], through[starts], through[starts] - 1)
    return first.astype(np.int64), through[ends].astype(np.int64)


def _covers(starts: NDArray[np.int64], ends: NDArray[np.int64], length: int) -> bool:
    """Whether the tokens cover 0..length in order without a gap (they may share a character)."""
    if len(starts) == 0:
        return length == 0
    return bool(
        starts[0] == 0
        and ends[-1] == length
        and (starts[1:] <= ends[:-1]).all()
        and (starts[1:] >= starts[:-1]).all()
        and (ends[1:] >= ends[:-1]).all()
        and (ends >= starts).all()
        # More than one shared character is no split character but an odd offset.
        and (ends[:-1] - starts[1:] <= 1).all()
    )


def _byte_level_alphabet() -> dict[str, int]:
    """GPT-2's printable stand-ins for the 256 bytes (openai/gpt-2, encoder.py, bytes_to_unicode)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    alphabet = {chr(byte): byte for byte in printable}
    alphabet.update({chr(0x100 + index): byte for index, byte in enumerate(others)})
    return alphabet


_BYTE_LEVEL = _byte_level_alphabet()


def _piece_bytes(piece: str | bytes) -> tuple[bytes | None, bytes]:
    if isinstance(piece, bytes):
        return piece, piece
    values = [_BYTE_LEVEL.get(character) for character in piece]
    known = [value for value in values if value is not None]
    byte_level = bytes(known) if len(known) == len(values) else None
    if len(piece) == 6 and piece.startswith("<0x") and piece.endswith(">"):
        try:
            return byte_level, bytes([int(piece[3:5], 16)])
        except ValueError:
            pass
    return byte_level, piece.replace("\u2581", " ").encode()
