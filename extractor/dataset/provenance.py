"""Which characters of a rendered conversation are the assistant's own.

The conversation is rendered a second time with the letters of the answers replaced by private-use
characters, each of which occurs once. Where such a character comes out, the template put that very
character of that very turn. White space and markup that a template may look at (its own string literals,
reasoning tags) stay as they are, so the template takes the same decisions; the result counts only if
putting the letters back gives the first rendering exactly. What was not probed is inferred only between
probed neighbours, by equality. White space at the edge of an answer, which a header may end with too, is
probed by further renderings.

Invariants: a span holds text of one turn and nothing else (but white space that the template changed
around markup, which is reported as `reformatted`); spans are in order and disjoint; whatever cannot be
confirmed raises `mask_uncertain`. Nothing here knows about tokens.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

from extractor.dataset.rejects import RecordRejectedError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

Key = tuple[int, str]
"""Turn index and the name of its field."""

REASONING_TAGS = (
    "<think>",
    "</think>",
    "<thinking>",
    "</thinking>",
    "<reasoning>",
    "</reasoning>",
    "<thought>",
    "</thought>",
    "[THINK]",
    "[/THINK]",
    "<|START_THINKING|>",
    "<|END_THINKING|>",
)

CLOSING_TAGS = REASONING_TAGS[1::2]
_TAGS = re.compile("(" + "|".join(map(re.escape, REASONING_TAGS)) + ")")

_PLANES = (range(0xF0000, 0xFFFFE), range(0x100000, 0x10FFFE))
_PRIVATE = re.compile("[\U000f0000-\U000ffffd\U00100000-\U0010fffd]")
_SPARSE = 16
_MAX_EDGE = 16
"""Longest white space at an edge that is searched character by character when a template keeps only part."""


@dataclass(frozen=True)
class Piece:
    """One text of an assistant turn: its content, or its reasoning."""

    key: Key
    text: str


@dataclass(frozen=True)
class OwnText:
    """Where a piece stands in the rendered text.

    Attributes:
        key: turn and field.
        start: first character of it in the rendered text.
        end: the character after the last; equal to `start` when the template dropped the piece.
        dropped: the template left out some of its visible characters.
        reformatted: white space around markup differs from the record's.
    """

    key: Key
    start: int
    end: int
    dropped: bool = False
    reformatted: bool = False


@dataclass(frozen=True)
class _Extent:
    """The part [low, high) of a piece's text that stands at [start, end) of the rendered text.

    With `after_inserted` a reasoning block that the template adds anyway takes the place of the own one.
    """

    start: int
    end: int
    low: int
    high: int
    dropped: bool
    reformatted: bool
    after_inserted: bool = False


class Tracer:
    """Traces the pieces of one conversation through its template."""

    def __init__(
        self,
        pieces: Sequence[Piece],
        rendered: str,
        render_with: Callable[[Mapping[Key, str]], str],
        literals: Iterable[str],
    ) -> None:
        """Sets up one conversation.

        Args:
            pieces: non-empty texts of the assistant's turns, in order.
            rendered: the conversation as rendered.
            render_with: renders it with other texts; raises RecordRejectedError when the template does.
            literals: strings that the template may look for in a text.
        """
        self._pieces = {piece.key: piece for piece in pieces}
        self._rendered = rendered
        self._render_with = render_with
        self._literals = tuple(literals)
        texts = "".join(piece.text for piece in pieces)
        self._alphabet = _free_characters(rendered + texts)

    def trace(self) -> list[OwnText]:
        """Where each piece stands, in the order of the pieces.

        Raises:
            RecordRejectedError: `mask_uncertain`.
        """
        solid = {key: piece for key, piece in self._pieces.items() if piece.text.strip()}
        probes, hits = self._probe_cores(solid)
        extents = {key: self._extent(solid[key], probes[key], hits[key]) for key in solid}
        found = self._extend_to_edges(solid, probes, extents)
        for key, piece in self._pieces.items():
            if key not in solid:
                found[key] = self._trace_blank(piece)
        spans = [found[key] for key in self._pieces]
        self._check_order([span for span in spans if span.end > span.start])
        return spans

    def _probe_cores(
        self, solid: Mapping[Key, Piece]
    ) -> tuple[dict[Key, list[int]], dict[Key, list[tuple[int, int]]]]:
        """Probes all pieces at once or, when the template reacts to that, each piece on its own.

        A part of the letters is enough where all of them come out; where a text was cut, all are needed to
        see the place.
        """
        dense = {key: self._choose_probes(piece.text, protect=True) for key, piece in solid.items()}
        sparse = {key: sorted({*indices[::_SPARSE], indices[-1]}) for key, indices in dense.items()}
        hits = self._observe(sparse)
        if hits is not None and all(len(hits[key]) == len(sparse[key]) for key in solid):
            return sparse, hits
        hits = self._observe(dense)
        if hits is not None:
            return dense, hits
        hits = {}
        for key, piece in solid.items():
            for protect in (True, False):
                dense[key] = self._choose_probes(piece.text, protect=protect)
                alone = self._observe({key: dense[key]})
                if alone is not None:
                    hits[key] = alone[key]
                    break
            else:
                raise _uncertain(key, "the template changes the text, or decides by its letters")
        return dense, hits

    def _choose_probes(self, text: str, *, protect: bool) -> list[int]:
        """Indices of the characters to replace: visible ones, outside what the template may look for."""
        kept = bytearray(len(text))
        for literal in (*self._literals, *REASONING_TAGS) if protect else ():
            if len(literal) < 2 or literal.isalnum():
                continue
            at = text.find(literal)
            while at >= 0:
                kept[at : at + len(literal)] = b"\x01" * len(literal)
                at = text.find(literal, at + len(literal))
        free = [i for i, character in enumerate(text) if not kept[i] and not character.isspace()]
        if not free:
            return self._choose_probes(text, protect=False)
        return free

    def _observe(self, probes: Mapping[Key, Sequence[int]]) -> dict[Key, list[tuple[int, int]]] | None:
        """Renders with probes; (position in the output, index in the text) of each that came out.

        Returns None when the template raises or behaves differently because of the probes. A very long
        conversation has more letters than there are private-use characters and takes several renderings.
        """
        flat = [(key, index) for key, indices in probes.items() for index in indices]
        hits: dict[Key, list[tuple[int, int]]] = {key: [] for key in probes}
        for first in range(0, len(flat), len(self._alphabet)):
            owners = dict(zip(self._alphabet, flat[first : first + len(self._alphabet)], strict=False))
            output = self._render_probed(owners)
            if output is None:
                return None
            for match in _PRIVATE.finditer(output):
                owner = owners.get(match[0])
                if owner is not None:
                    hits[owner[0]].append((match.start(), owner[1]))
        return {key: sorted(found) for key, found in hits.items()}

    def _render_probed(self, owners: Mapping[str, tuple[Key, int]]) -> str | None:
        """The output with probes in it, or None if undoing them does not give the first rendering."""
        keys = {key for key, _ in owners.values()}
        texts = {key: list(self._pieces[key].text) for key in keys}
        back = {}
        for probe, (key, index) in owners.items():
            back[ord(probe)] = self._pieces[key].text[index]
            texts[key][index] = probe
        try:
            output = self._render_with({key: "".join(text) for key, text in texts.items()})
        except RecordRejectedError:
            return None
        return output if output.translate(back) == self._rendered else None

    def _extent(self, piece: Piece, probes: Sequence[int], hits: Sequence[tuple[int, int]]) -> _Extent:
        """The part of a piece that came out, from its first to its last visible character."""
        if not hits:
            return _Extent(0, 0, 0, 0, dropped=True, reformatted=False)
        text, rendered = piece.text, self._rendered
        reformatted = False
        for (p1, i1), (p2, i2) in pairwise(hits):
            if i2 <= i1:
                raise _uncertain(piece.key, "the template uses the text twice, or reorders it")
            between, own = rendered[p1 + 1 : p2], text[i1 + 1 : i2]
            if between != own:
                if not _same_around_tags(between, own):
                    raise _uncertain(piece.key, "the template changes the middle of the text")
                reformatted = True
        start, low, loose_left = self._grow_left(text, probes, hits[0])
        end, high, loose_right = self._grow_right(text, probes, hits[-1])
        inserted = low < hits[0][1] and self._is_inserted(piece, hits[0][1])
        if inserted:
            start, low, loose_left = *hits[0], False
        dropped = bool((text[:low].strip() and not inserted) or text[high:].strip())
        return _Extent(start, end, low, high, dropped, reformatted or loose_left or loose_right, inserted)

    def _is_inserted(self, piece: Piece, index: int) -> bool:
        """Whether a closed reasoning block before the text is there without the record's own block too.

        Then it is the template's, and records that render equally get equal masks.
        """
        if not piece.text[:index].rstrip().endswith(CLOSING_TAGS):
            return False
        try:
            return self._render_with({piece.key: piece.text[index:]}) == self._rendered
        except RecordRejectedError:
            return False

    def _grow_left(self, text: str, probes: Sequence[int], hit: tuple[int, int]) -> tuple[int, int, bool]:
        """Adds markup that stands before the first character that came out, if all of it does."""
        position, index = hit
        if probes[0] < index:
            return position, index, False
        low = len(text) - len(text.lstrip())
        at, wanted = position, "".join(text[low:index].split())
        for character in reversed(wanted):
            at = len(self._rendered[:at].rstrip())
            if at == 0 or self._rendered[at - 1] != character:
                return position, index, False
            at -= 1
        return at, low, self._rendered[at:position] != text[low:index]

    def _grow_right(self, text: str, probes: Sequence[int], hit: tuple[int, int]) -> tuple[int, int, bool]:
        """Adds markup that stands after the last character that came out, if all of it does."""
        position, index = hit[0] + 1, hit[1] + 1
        if probes[-1] >= index:
            return position, index, False
        high = len(text.rstrip())
        at, wanted = position, "".join(text[index:high].split())
        for character in wanted:
            while at < len(self._rendered) and self._rendered[at].isspace():
                at += 1
            if at == len(self._rendered) or self._rendered[at] != character:
                return position, index, False
            at += 1
        return at, high, self._rendered[position:at] != text[index:high]

    def _extend_to_edges(
        self, solid: Mapping[Key, Piece], probes: Mapping[Key, Sequence[int]], extents: Mapping[Key, _Extent]
    ) -> dict[Key, OwnText]:
        """Adds the white space at both ends of each piece that the template kept, and only that."""
        edges = {key: _edges(solid[key].text, extent) for key, extent in extents.items()}
        widths = edges
        if any(left or right for left, right in edges.values()) and not self._edges_kept(
            probes, extents, edges
        ):
            widths = {key: self._search_edges(key, probes[key], extents[key], edges[key]) for key in solid}
        found = {}
        for key, extent in extents.items():
            left, right = widths[key]
            start, end = extent.start - left, extent.end + right
            own, text = self._rendered[start:end], solid[key].text[extent.low - left : extent.high + right]
            if own != text and not (extent.reformatted and _same_around_tags(own, text)):
                raise _uncertain(key, "the text found is not the turn's own")
            found[key] = OwnText(key, start, end, extent.dropped, extent.reformatted)
        return found

    def _edges_kept(
        self,
        probes: Mapping[Key, Sequence[int]],
        extents: Mapping[Key, _Extent],
        edges: Mapping[Key, tuple[int, int]],
    ) -> bool:
        """Whether white space of these widths comes out directly before and after each text."""
        hits = self._observe({key: _with_edges(probes[key], extents[key], *edges[key]) for key in edges})
        if hits is None:
            return False
        for key, (left, right) in edges.items():
            extent = extents[key]
            wanted = {(extent.start - step, extent.low - step) for step in range(1, left + 1)}
            wanted |= {(extent.end + step, extent.high + step) for step in range(right)}
            if not wanted <= set(hits[key]):
                return False
        return True

    def _search_edges(
        self, key: Key, probes: Sequence[int], extent: _Extent, edges: tuple[int, int]
    ) -> tuple[int, int]:
        """The white space kept at each end, counted from the text outwards."""
        kept = [0, 0]
        for side, width in enumerate(edges):
            for candidate in (width, *range(min(width - 1, _MAX_EDGE), 0, -1)) if width else ():
                sides = (candidate, 0) if side == 0 else (0, candidate)
                if self._edges_kept({key: probes}, {key: extent}, {key: sides}):
                    kept[side] = candidate
                    break
        return kept[0], kept[1]

    def _trace_blank(self, piece: Piece) -> OwnText:
        """A piece of white space only: found by what stands before and after a probe in its place."""
        probe = self._alphabet[0]
        try:
            before, *after = self._render_with({piece.key: probe}).split(probe)
        except RecordRejectedError as error:
            raise _uncertain(piece.key, "white space only, and the template refuses a probe") from error
        if not after:
            return OwnText(piece.key, 0, 0)
        rendered, start = self._rendered, len(before)
        end = len(rendered) - len(after[0])
        fits = start <= end and rendered.startswith(before) and rendered.endswith(after[0])
        if len(after) > 1 or not fits or rendered[start:end] not in piece.text:
            raise _uncertain(piece.key, "white space only, and its place cannot be told")
        return OwnText(piece.key, start, end)

    def _check_order(self, spans: Sequence[OwnText]) -> None:
        """Pieces of one turn may stand in any order; turns may not."""
        turn, reach = -1, 0
        taken: list[tuple[int, int]] = []
        for span in sorted(spans, key=lambda span: (span.key[0], span.start)):
            if span.key[0] != turn:
                turn = span.key[0]
                reach = max((end for _, end in taken), default=0)
            if span.start < reach or any(span.start < end and start < span.end for start, end in taken):
                raise _uncertain(span.key, "turns overlap or change their order")
            taken.append((span.start, span.end))


def _edges(text: str, extent: _Extent) -> tuple[int, int]:
    """Widths of the white space directly before and after the part that came out."""
    if extent.end == extent.start:
        return 0, 0
    before, after = "" if extent.after_inserted else text[: extent.low], text[extent.high :]
    return len(before) - len(before.rstrip()), len(after) - len(after.lstrip())


def _with_edges(probes: Sequence[int], extent: _Extent, left: int, right: int) -> list[int]:
    return sorted({*probes, *range(extent.low - left, extent.low), *range(extent.high, extent.high + right)})


def _same_around_tags(rendered: str, own: str) -> bool:
    """Whether two texts differ at most in white space directly before or after reasoning tags."""
    parts, wanted = _TAGS.split(rendered), _TAGS.split(own)
    if len(parts) != len(wanted):
        return False
    last = len(parts) - 1
    for number, (part, want) in enumerate(zip(parts, wanted, strict=True)):
        if number > 0:
            part, want = part.lstrip(), want.lstrip()  # noqa: PLW2901 - a tag stands before
        if number < last:
            part, want = part.rstrip(), want.rstrip()  # noqa: PLW2901 - a tag stands after
        if part != want:
            return False
    return True


def _free_characters(text: str) -> Sequence[str]:
    used = set(_PRIVATE.findall(text))
    return _ALPHABET if not used else [character for character in _ALPHABET if character not in used]


_ALPHABET = [chr(code) for plane in _PLANES for code in plane]


def _uncertain(key: Key, why: str) -> RecordRejectedError:
    return RecordRejectedError("mask_uncertain", f"turn {key[0] + 1}, {key[1]}: {why}")
