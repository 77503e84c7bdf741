"""Records that are not used: the reason codes, the list of them, and the limit on their share.

Owns the vocabulary of reason codes (`REASONS`), the file `rejected.jsonl` and the counts by code. It
decides nothing about a record; whoever finds a fault raises `RecordRejectedError`, and `prepare` catches it.

Invariants: codes are stable and meant for programs, details are for people; every reject names its file
and its 1-based line; a reject never ends the preparation, only too large a share of them does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from extractor.errors import DatasetError

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path
    from typing import BinaryIO

REASONS: Mapping[str, str] = {
    "json": "the line is not one JSON value in UTF-8",
    "record_too_long": "the line is longer than a record may be",
    "record_type": "the line is JSON, but not an object",
    "unknown_format": "no conversation in a known style was found in the record",
    "ambiguous_format": "the record holds both `messages` and `conversations`; set data.format",
    "empty_conversation": "the conversation has no turns",
    "turn_type": "a turn is not an object, or its role or a field of it has the wrong type",
    "unknown_role": "a turn has a role that is not known (`unknown_role:<role>`)",
    "content_type": "the content of a turn is not text",
    "image_part": "the record holds an image",
    "audio_part": "the record holds audio",
    "video_part": "the record holds a video",
    "turn_weight": "a training flag of a turn is not 0, 1, true or false, or two flags disagree",
    "tool_arguments": "the arguments of a tool call are not a JSON object",
    "tools": "the tool list of the record is not a list of objects",
    "template_error": "the chat template refused the conversation; the detail is its message",
    "mask_uncertain": "it could not be proved which tokens are the assistant's own",
    "no_supervised_tokens": "no token is supervised (after cutting to data.max_len)",
    "min_supervised": "fewer tokens are supervised than data.min_supervised",
}
"""All reason codes. Of `unknown_role` the role follows after a colon."""

_MAX_CODES = 200
"""A file in which every role is a new word must not fill the memory; further ones share a count."""


class Reject(msgspec.Struct, frozen=True):
    """One record that is not used; a line of `rejected.jsonl`.

    Attributes:
        source_file: name of the file, without its folder.
        source_line: 1-based line in that file.
        sample_id: the id that the sample would have had; None when the record could not be read that far.
        code: one of `REASONS`.
        detail: what is wrong, for people.
    """

    source_file: str
    source_line: int
    sample_id: str | None
    code: str
    detail: str


class RecordRejectedError(DatasetError):
    """A record cannot be used. Never leaves the preparation: it becomes a `Reject`."""

    code = "record_rejected"

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(f"{reason}: {detail}")
        self.reason = reason
        self.detail = detail


class RejectList:
    """Writes rejects as they come and counts them; keeps none of them in memory."""

    def __init__(self, sink: BinaryIO) -> None:
        self._sink = sink
        self._encoder = msgspec.json.Encoder()
        self.counts: dict[str, int] = {}

    @property
    def total(self) -> int:
        """Rejects so far."""
        return sum(self.counts.values())

    def add(self, reject: Reject) -> None:
        """Appends one line."""
        self._sink.write(self._encoder.encode(reject) + b"\n")
        code = reject.code
        if code not in self.counts and len(self.counts) >= _MAX_CODES:
            code = code.partition(":")[0]
        self.counts[code] = self.counts.get(code, 0) + 1


def first_rejects(path: Path, per_code: int) -> dict[str, list[Reject]]:
    """The first few rejects of each reason in a list, by code in the order of their appearance."""
    found: dict[str, list[Reject]] = {}
    with path.open("rb") as lines:
        for line in lines:
            reject = msgspec.json.decode(line, type=Reject)
            shown = found.setdefault(reject.code, [])
            if len(shown) < per_code:
                shown.append(reject)
    return found


def check_limit(num_records: int, counts: Mapping[str, int], limit: float, rejected_path: Path) -> None:
    """Refuses when a larger share of the records than `limit` was rejected.

    Args:
        num_records: records read, without blank lines.
        counts: rejects by code.
        limit: largest share allowed, 0 to 1.
        rejected_path: where the list is, for the message.

    Raises:
        DatasetError: with the numbers, the most frequent reasons and the place of the list.
    """
    rejected = sum(counts.values())
    if rejected <= limit * num_records:
        return
    top = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    shown = ", ".join(f"{code} {count}" for code, count in top[:5])
    more = f" (5 of {len(top)} reasons)" if len(top) > 5 else ""
    raise DatasetError(
        f"{rejected} of {num_records} records rejected (limit {limit * 100:g} %): {shown}{more}. "
        f"The list is in {rejected_path}",
        remedy="mend the records, or raise data.reject_limit if these may be left out",
        code="reject_limit",
    )
