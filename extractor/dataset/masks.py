"""Loss masks: which tokens of a conversation a drafter is trained on.

Renders the conversation once, tokenizes that text once, finds the assistant's own text in it
(`extractor.dataset.provenance`), applies the options, and maps characters to tokens
(`extractor.dataset.tokens`). What is supervised, in this order:

1. the content and the reasoning of each assistant turn that is wanted (`turns`, training flags), as far
   as the template kept it; white space and reasoning tags between a turn's reasoning and its answer;
2. with `end_of_turn`, the special token that ends the turn, if it directly follows;
3. with `inserted_reasoning`, the empty reasoning block that the template put before the answer;
4. where the template has `{% generation %}` blocks, also the rest of the block around 1 (tool calls,
   opening tags), except that 2 and 3 still decide about the end token and the empty block; and nothing
   outside the blocks.

Invariants: exact or rejected with a reason; never all zero; never all one when somebody else speaks.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from extractor.dataset.provenance import REASONING_TAGS, OwnText, Piece, Tracer
from extractor.dataset.records import Turn
from extractor.dataset.rejects import RecordRejectedError
from extractor.dataset.tokens import token_mask

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import numpy as np
    from numpy.typing import NDArray

    from extractor.dataset.provenance import Key
    from extractor.dataset.records import Conversation
    from extractor.dataset.templates import ChatTemplate
    from extractor.dataset.tokens import EndMarker, TextTokenizer

WARNINGS: Mapping[str, str] = {
    "template_dropped_content": "the template left out or rewrote text of the record (old reasoning, system)",
    "template_reformatted_content": "the template changed white space around reasoning tags",
    "reasoning_markup_unbalanced": "an answer opens and closes reasoning tags a different number of times",
    "tool_calls_unsupervised": "an assistant turn has tool calls, which are rendered but not supervised",
    "outside_generation_blocks": "the template's generation blocks leave out an assistant turn",
}
"""Counted once per record; none of them rejects it."""

REASONING_FIELDS = ("reasoning_content", "reasoning", "thinking")
Span = tuple[int, int]

_TAG_PAIRS = tuple(zip(REASONING_TAGS[::2], REASONING_TAGS[1::2], strict=True))
_ONLY_TAGS = re.compile(r"(?:\s|" + "|".join(map(re.escape, REASONING_TAGS)) + r")*")
_EMPTY_BLOCK = re.compile(
    r"(?:" + "|".join(rf"(?:{re.escape(a)}\s*)?{re.escape(b)}" for a, b in _TAG_PAIRS) + r")\s*\Z"
)


class MaskOptions(msgspec.Struct, frozen=True):
    """`[data.mask]`, as recorded with the data set; see `extractor.config.MaskSection`."""

    turns: Literal["all", "last"] = "all"
    end_of_turn: bool = True
    inserted_reasoning: bool = False


class Masked(msgspec.Struct, frozen=True):
    """A conversation as tokens.

    Attributes:
        text: as rendered.
        spans: supervised characters of it, in order.
        input_ids: int32 [t].
        loss_mask: uint8 [t], 1 where supervised.
        warnings: codes of `WARNINGS`.
    """

    text: str
    spans: tuple[Span, ...]
    input_ids: Any  # NDArray[np.int32]; msgspec cannot name it
    loss_mask: Any  # NDArray[np.uint8]
    warnings: tuple[str, ...]


@dataclass(frozen=True)
class _Traced:
    """A rendered conversation and where the assistant's own texts stand in it."""

    turns: Sequence[Turn]
    text: str
    own: Sequence[OwnText]


class LossMasker:
    """Makes masks for one template, tokenizer and set of options."""

    def __init__(self, template: ChatTemplate, tokenizer: TextTokenizer, options: MaskOptions) -> None:
        self._template = template
        self._tokenizer = tokenizer
        self._options = options
        self.end_markers = find_end_markers(template, tokenizer)

    def mask(self, conversation: Conversation) -> Masked:
        """Tokens and mask of a whole conversation, before it is cut to length.

        Raises:
            RecordRejectedError: `template_error`, `mask_uncertain` or `no_supervised_tokens`.
        """
        turns = conversation.turns
        text = self._template.render(turns, conversation.tools)
        own = trace_turns(self._template, conversation, text)
        wanted = self._wanted(turns)
        if not wanted:
            raise RecordRejectedError("no_supervised_tokens", "no assistant turn is to be trained on")
        warnings = _text_warnings(turns, own, text)
        traced = _Traced(turns, text, own)
        unmarked = wanted
        if self._template.has_marks:
            marks = self._template.marked(turns, conversation.tools, text)
            owners = _owners_of_marks(turns, own, marks)
            pairs = [(mark, turn) for mark, turn in zip(marks, owners, strict=True) if turn in wanted]
            spans = [span for mark, turn in pairs for span in self._mark_spans(traced, turn, mark)]
            unmarked = wanted - set(owners)
            if any(_join_own(traced, turn) for turn in unmarked):
                warnings.add("outside_generation_blocks")
        else:
            spans = [span for turn in sorted(wanted) for span in self._turn_spans(traced, turn)]
        if any(turns[turn].extra.get("tool_calls") for turn in unmarked):
            warnings.add("tool_calls_unsupervised")
        ids, starts, ends = self._tokenizer.encode(text)
        mask = token_mask(starts, ends, spans)
        return Masked(text, tuple(sorted(spans)), ids, mask, tuple(sorted(warnings)))

    def _wanted(self, turns: Sequence[Turn]) -> set[int]:
        assistant = [index for index, turn in enumerate(turns) if turn.role == "assistant"]
        if self._options.turns == "last":
            assistant = assistant[-1:]
        return {index for index in assistant if turns[index].train}

    def _turn_spans(self, traced: _Traced, turn: int) -> list[Span]:
        """Own text of one turn, with what stands between, before and after it as the options say."""
        spans = _join_own(traced, turn)
        if not spans:
            return []
        if self._options.inserted_reasoning:
            block = _inserted_block(traced, turn, spans[0][0])
            spans.insert(0, (spans[0][0] - len(block), spans[0][0]))
        if self._options.end_of_turn:
            end = spans[-1][1]
            spans.append((end, end + self._end_marker_at(traced, turn, end)))
        return spans

    def _end_marker_at(self, traced: _Traced, turn: int, at: int) -> int:
        """Length of the end marker at a position, 0 if there is none, or it is the next speaker's text."""
        text = traced.text
        following = traced.turns[turn + 1].content if turn + 1 < len(traced.turns) else ""
        if following and text.startswith(following, at):
            return 0
        for marker in self.end_markers:
            if text.startswith(marker.text, at):
                end = at + len(marker.text)
                if marker.takes_spaces_after:  # the white space is part of the same token
                    end += len(text[end:]) - len(text[end:].lstrip())
                return end - at
        return 0

    def _mark_spans(self, traced: _Traced, turn: int, mark: Span) -> list[Span]:
        """A generation block, less an empty reasoning block and the end of turn where not wanted."""
        start, end = mark
        inside = [span for span in _join_own(traced, turn) if start <= span[0] and span[1] <= end]
        first, last = (inside[0][0], inside[-1][1]) if inside else (start, start)
        spans = [(start, end)]
        if not self._options.inserted_reasoning:
            block = _inserted_block(traced, turn, first)
            if block and first - len(block) >= start:
                spans = [(start, first - len(block)), (first, end)]
        if not self._options.end_of_turn:
            cuts = [traced.text.find(marker.text, last, end) for marker in self.end_markers]
            cut = min((at for at in cuts if at >= 0), default=end)
            spans = [(a, min(b, cut)) for a, b in spans]
        return [(a, b) for a, b in spans if a < b]


def cut_to_length(
    masked: Masked, max_len: int, min_supervised: int, conversation: Conversation
) -> tuple[NDArray[np.int32], NDArray[np.uint8]]:
    """Cuts on the right to `max_len` tokens and refuses what is not worth storing.

    Returns:
        input_ids [t] and loss_mask [t], t <= max_len.

    Raises:
        RecordRejectedError: `no_supervised_tokens`, `min_supervised`, or `mask_uncertain` for a mask that is
            all one although somebody else speaks.
    """
    ids, mask = masked.input_ids[:max_len], masked.loss_mask[:max_len]
    supervised, total = int(mask.sum()), len(masked.input_ids)
    cut = f" after cutting {total} tokens to {max_len}" if total > max_len else ""
    if supervised == 0:
        raise RecordRejectedError("no_supervised_tokens", f"no token is supervised{cut}")
    if supervised < min_supervised:
        raise RecordRejectedError(
            "min_supervised",
            f"{supervised} tokens are supervised{cut}, data.min_supervised = {min_supervised}",
        )
    if supervised == len(mask) and any(turn.role != "assistant" for turn in conversation.turns):
        raise RecordRejectedError("mask_uncertain", f"every token is supervised{cut}, though others speak")
    return ids, mask


def trace_turns(template: ChatTemplate, conversation: Conversation, text: str) -> list[OwnText]:
    """Where the assistant's own texts stand in the rendered conversation.

    White space beside tool calls or as reasoning is not traced: it is never supervised.

    Raises:
        RecordRejectedError: `mask_uncertain`.
    """
    turns = conversation.turns
    pieces = []
    for index, turn in enumerate(turns):
        if turn.role != "assistant":
            continue
        if turn.content.strip() or (turn.content and not turn.extra.get("tool_calls")):
            pieces.append(Piece((index, "content"), turn.content))
        for field in REASONING_FIELDS:
            value = turn.extra.get(field)
            if isinstance(value, str) and value.strip():
                pieces.append(Piece((index, field), value))

    def render_with(texts: Mapping[Key, str]) -> str:
        return template.render(replace_texts(turns, texts), conversation.tools)

    return Tracer(pieces, text, render_with, template.literals).trace()


def replace_texts(turns: Sequence[Turn], texts: Mapping[Key, str]) -> list[Turn]:
    """The turns with some of their texts exchanged."""
    changed = list(turns)
    for (index, field), text in texts.items():
        turn = changed[index]
        if field == "content":
            changed[index] = msgspec.structs.replace(turn, content=text)
        else:
            changed[index] = msgspec.structs.replace(turn, extra={**turn.extra, field: text})
    return changed


def _join_own(traced: _Traced, turn: int) -> list[Span]:
    """Spans of a turn's own text; only white space and reasoning tags between two of them joins them."""
    spans: list[Span] = []
    for start, end in sorted((piece.start, piece.end) for piece in traced.own if piece.key[0] == turn):
        if start == end:
            continue
        if spans and _ONLY_TAGS.fullmatch(traced.text, spans[-1][1], start):
            spans[-1] = (spans[-1][0], end)
        else:
            spans.append((start, end))
    return spans


def _inserted_block(traced: _Traced, turn: int, at: int) -> str:
    """The empty reasoning block that ends at a position, or "" (also if it is the last speaker's own)."""
    match = _EMPTY_BLOCK.search(traced.text[max(0, at - 256) : at])
    if match is None:
        return ""
    if turn > 0 and traced.turns[turn - 1].content.rstrip().endswith(match[0].rstrip()):
        return ""
    return match[0]


def _owners_of_marks(
    turns: Sequence[Turn], own: Sequence[OwnText], marks: Sequence[Span]
) -> list[int | None]:
    """Whose turn each generation block is; None when that cannot be told (a block without own text).

    Raises:
        RecordRejectedError: `mask_uncertain` when blocks and turns do not fit together.
    """
    owners: list[int | None] = []
    for start, end in marks:
        inside = set()
        for piece in own:
            if piece.start < end and start < piece.end:
                if not (start <= piece.start and piece.end <= end):
                    raise RecordRejectedError("mask_uncertain", "a generation block cuts through an answer")
                inside.add(piece.key[0])
        if len(inside) > 1:
            raise RecordRejectedError("mask_uncertain", "a generation block holds several turns")
        owners.append(next(iter(inside), None))
    assistant = [index for index, turn in enumerate(turns) if turn.role == "assistant"]
    if len(owners) == len(assistant) and all(
        owner in (None, turn) for owner, turn in zip(owners, assistant, strict=True)
    ):
        return list(assistant)
    return owners


def _text_warnings(turns: Sequence[Turn], own: Sequence[OwnText], text: str) -> set[str]:
    warnings = set()
    others = [turn.content.strip() for turn in turns if turn.role != "assistant"]
    if any(piece.dropped for piece in own) or any(content not in text for content in others):
        warnings.add("template_dropped_content")
    if any(piece.reformatted for piece in own):
        warnings.add("template_reformatted_content")
    answers = [turn.content for turn in turns if turn.role == "assistant"]
    if any(answer.count(a) != answer.count(b) for answer in answers for a, b in _TAG_PAIRS):
        warnings.add("reasoning_markup_unbalanced")
    return warnings


def find_end_markers(template: ChatTemplate, tokenizer: TextTokenizer) -> tuple[EndMarker, ...]:
    """The added tokens with which this template ends an assistant turn; may be none.

    A token that follows an answer may also open the next turn. It counts as an end only if it follows the
    last answer of a conversation (and does not open a header there), or follows questions and answers alike
    without opening the conversation.
    """
    from extractor.dataset.records import Conversation

    turns = tuple(Turn(role, f"{role} text {n}") for n, role in enumerate(("user", "assistant") * 2))
    found: dict[str, EndMarker] = {}
    for count in (4, 2):
        sample = Conversation("", "", 0, turns[:count])
        pieces = [Piece((index, "content"), turn.content) for index, turn in enumerate(sample.turns)]

        def render_with(texts: Mapping[Key, str], shown: Sequence[Turn] = sample.turns) -> str:
            return template.render(replace_texts(shown, texts))

        try:
            text = template.render(sample.turns)
            own = Tracer(pieces, text, render_with, template.literals).trace()
        except RecordRejectedError:
            continue
        for marker in _confirmed_ends(text, own, tokenizer):
            found[marker.text] = marker
    return tuple(sorted(found.values(), key=lambda marker: (-len(marker.text), marker.text)))


def _confirmed_ends(text: str, own: Sequence[OwnText], tokenizer: TextTokenizer) -> list[EndMarker]:
    added = [marker for marker in tokenizer.added_tokens if marker.text not in REASONING_TAGS]

    def marker_at(position: int) -> EndMarker | None:
        return next((marker for marker in added if text.startswith(marker.text, position)), None)

    ends = []
    last = marker_at(own[-1].end)
    tail, header = text[own[-1].end :], text[: own[1].start]
    # A template may open the next answer at the end of the text; that tail also stands before an answer.
    if last is not None and not header.endswith(tail):
        ends.append(last)
    following = {marker_at(piece.end) for piece in own[:-1]}
    shared = following.pop() if len(following) == 1 else None
    opening = re.search("|".join(re.escape(m.text) for m in added if m.text != tokenizer.bos), text)
    if len(own) > 2 and shared is not None and (opening is None or opening[0] != shared.text):
        ends.append(shared)
    return ends
