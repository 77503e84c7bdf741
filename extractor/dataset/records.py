"""One conversation as the rest of the package sees it, and how it is made from a raw JSON object.

Understands the OpenAI `messages` style and the ShareGPT `conversations` style. It keeps every turn in
its order, takes roles from the record and never from the position, and repairs nothing: what does not fit
is rejected with a reason code (see `extractor.dataset.rejects`).

Invariants: structs are immutable; `content` is text; a turn's `extra` holds all its further fields
(tool calls, reasoning, name, ...) for the chat template, without nulls, since columnar writers put a null
where a field was absent. Training flags are taken out of the turn and into `train`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

import msgspec
import xxhash

from extractor.dataset.rejects import RecordRejectedError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

Style = Literal["auto", "messages", "sharegpt"]

MESSAGES_ROLES: Mapping[str, str] = {
    role: role for role in ("system", "developer", "user", "assistant", "tool", "function")
}
SHAREGPT_ROLES: Mapping[str, str] = {
    "system": "system",
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "tool": "tool",
    "function": "tool",
    "observation": "tool",
}
TRAIN_FLAGS = ("weight", "loss", "train", "trainable")
MEDIA = ("image", "audio", "video")


class Turn(msgspec.Struct, frozen=True):
    """One message.

    Attributes:
        role: as the chat template knows it.
        content: its text; "" where an assistant turn only calls tools.
        train: False when the record says that this turn is not to be learned.
        extra: further fields, passed on to the template as they are.
    """

    role: str
    content: str
    train: bool = True
    extra: dict[str, Any] = {}  # Any: whatever JSON the record holds


class Conversation(msgspec.Struct, frozen=True):
    """One record.

    Attributes:
        sample_id: unique in the data set.
        source_file: name of the file, without its folder.
        source_line: 1-based line in that file.
        turns: all turns in their order.
        tools: tool schemas offered to the model, or None.
    """

    sample_id: str
    source_file: str
    source_line: int
    turns: tuple[Turn, ...]
    tools: tuple[dict[str, Any], ...] | None = None  # Any: JSON schemas


class SampleIds:
    """Gives every record an id that is unique and does not depend on anything but the data.

    A repeated id gets a suffix (`x`, `x#2`, `x#3`). Only 64-bit hashes are remembered: a collision, which
    is rarer than one in a million for a million records, gives a suffix that was not needed.
    """

    def __init__(self) -> None:
        self._seen: set[int] = set()
        self._repeats: dict[str, int] = {}

    def assign(self, raw: object, source_file: str, source_line: int) -> str:
        """The id of a record: its own if it is a non-empty string or a number, else file and line."""
        own = raw.get("id") if isinstance(raw, dict) else None
        if isinstance(own, str) and own:
            wanted = own
        elif isinstance(own, int) and not isinstance(own, bool):
            wanted = str(own)
        else:
            wanted = f"{source_file}:{source_line}"
        unique = wanted
        while not self._claim(unique):
            self._repeats[wanted] = self._repeats.get(wanted, 1) + 1
            unique = f"{wanted}#{self._repeats[wanted]}"
        return unique

    def _claim(self, name: str) -> bool:
        digest = xxhash.xxh3_64_intdigest(name.encode("utf-8", "surrogatepass"))
        if digest in self._seen:
            return False
        self._seen.add(digest)
        return True


def parse_record(
    raw: object, *, sample_id: str, source_file: str, source_line: int, style: Style = "auto"
) -> Conversation:
    """Makes a conversation of one decoded JSON value.

    Args:
        raw: the value.
        sample_id: its id.
        source_file: name of its file.
        source_line: 1-based line.
        style: "auto" takes the style whose key is there; a record with both is rejected.

    Raises:
        RecordRejectedError: the record does not fit.
    """
    if not isinstance(raw, dict):
        raise RecordRejectedError("record_type", f"expected an object, got {_kind(raw)}")
    for kind in MEDIA:
        if raw.get(kind) or raw.get(f"{kind}s"):
            raise RecordRejectedError(f"{kind}_part", f"the record has a field for {kind}")
    items = _find_turns(raw, style)
    turns = [_parse_turn(item, number) for number, item in enumerate(items, start=1)]
    system = raw.get("system")
    if system is not None and system != "":
        turns.insert(0, Turn("system", _text(system, "the field system")))
        if sum(turn.role == "system" for turn in turns[:2]) > 1:
            raise RecordRejectedError("ambiguous_format", "system text both as a field and as the first turn")
    return Conversation(sample_id, source_file, source_line, tuple(turns), _parse_tools(raw.get("tools")))


def _find_turns(raw: Mapping[str, Any], style: Style) -> Sequence[object]:
    keys = {"auto": ("messages", "conversations"), "messages": ("messages",), "sharegpt": ("conversations",)}
    found = [key for key in keys[style] if raw.get(key) is not None]
    if len(found) > 1:
        raise RecordRejectedError("ambiguous_format", "the record holds both messages and conversations")
    if not found:
        raise RecordRejectedError("unknown_format", f"no field {' or '.join(keys[style])} in the record")
    items = raw[found[0]]
    if not isinstance(items, list):
        raise RecordRejectedError("unknown_format", f"{found[0]} is {_kind(items)}, not a list")
    if not items:
        raise RecordRejectedError("empty_conversation", f"{found[0]} is empty")
    return items


def _parse_turn(item: object, number: int) -> Turn:
    if not isinstance(item, dict):
        raise RecordRejectedError("turn_type", f"turn {number} is {_kind(item)}, not an object")
    sharegpt = "from" in item
    role_key, text_key = ("from", "value") if sharegpt else ("role", "content")
    raw_role = item.get(role_key)
    if not isinstance(raw_role, str):
        raise RecordRejectedError("turn_type", f"turn {number} has no {role_key}, or it is not text")
    role = (SHAREGPT_ROLES if sharegpt else MESSAGES_ROLES).get(raw_role)
    if role is None:
        raise RecordRejectedError(f"unknown_role:{raw_role}", f"turn {number}")
    extra = {
        key: value
        for key, value in item.items()
        if key not in (role_key, text_key, *TRAIN_FLAGS) and value is not None
    }
    if "role" in extra or "content" in extra:
        raise RecordRejectedError("turn_type", f"turn {number} mixes from/value with role/content")
    _check_tool_calls(extra.get("tool_calls"), number)
    content = item.get(text_key)
    if content is None and role == "assistant" and extra.get("tool_calls"):
        content = ""  # the wire format's way to say: no text, only calls
    return Turn(role, _text(content, f"turn {number} ({raw_role})"), _train_flag(item, number), extra)


def _text(content: object, where: str) -> str:
    """Text as it is; a list of text parts joined; anything else rejected."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list) or not content or not all(isinstance(part, dict) for part in content):
        raise RecordRejectedError("content_type", f"{where}: content is {_kind(content)}, not text")
    texts = []
    for part in content:
        kind = part.get("type")
        for media in MEDIA:
            if media in part or f"{media}_url" in part or (isinstance(kind, str) and media in kind):
                raise RecordRejectedError(f"{media}_part", f"{where}: a content part of type {kind!r}")
        if kind != "text" or not isinstance(part.get("text"), str):
            raise RecordRejectedError("content_type", f"{where}: a content part of type {kind!r} is not text")
        texts.append(part["text"])
    return "".join(texts)


def _train_flag(item: Mapping[str, Any], number: int) -> bool:
    values = {}
    for flag in TRAIN_FLAGS:
        value = item.get(flag)
        if value is None:
            continue
        # True == 1 and False == 0.0, so this is exactly: bool, 0, 1, 0.0, 1.0
        if not isinstance(value, (bool, int, float)) or value not in (0, 1):
            raise RecordRejectedError(
                "turn_weight", f"turn {number}: {flag} is {value!r}; only 0, 1, true, false"
            )
        values[flag] = bool(value)
    if len(set(values.values())) > 1:
        raise RecordRejectedError("turn_weight", f"turn {number}: the flags {', '.join(values)} disagree")
    return next(iter(values.values()), True)


def _check_tool_calls(calls: object, number: int) -> None:
    if calls is None:
        return
    if not isinstance(calls, list) or not all(isinstance(call, dict) for call in calls):
        raise RecordRejectedError("turn_type", f"turn {number}: tool_calls is not a list of objects")
    for call in calls:
        function = call.get("function", call)
        if not isinstance(function, dict):
            raise RecordRejectedError(
                "turn_type", f"turn {number}: the function of a tool call is not an object"
            )
        if "arguments" in function:
            decode_arguments(function["arguments"], number)


def decode_arguments(arguments: object, number: int) -> dict[str, Any]:
    """The arguments of a tool call as an object; on the wire they are a JSON string.

    Raises:
        RecordRejectedError: they are not a JSON object.
    """
    if isinstance(arguments, str):
        try:
            arguments = msgspec.json.decode(arguments)
        except (msgspec.DecodeError, RecursionError) as error:
            raise RecordRejectedError(
                "tool_arguments", f"turn {number}: the arguments are not JSON: {error}"
            ) from error
    if not isinstance(arguments, dict):
        raise RecordRejectedError(
            "tool_arguments", f"turn {number}: the arguments are {_kind(arguments)}, not an object"
        )
    return arguments


def _parse_tools(tools: object) -> tuple[dict[str, Any], ...] | None:
    if isinstance(tools, str) and tools.strip():
        try:
            tools = msgspec.json.decode(tools)
        except (msgspec.DecodeError, RecursionError) as error:
            raise RecordRejectedError("tools", f"the tool list is not JSON: {error}") from error
    if not tools:
        return None
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise RecordRejectedError("tools", "the tool list is not a list of objects")
    return tuple(tools)


def _kind(value: object) -> str:
    match value:
        case None:
            return "null"
        case bool():
            return "a boolean"
        case int() | float():
            return "a number"
        case str():
            return "text"
        case list():
            return "a list"
        case _:
            return "an object"
