"""Lines of text with roles: what the panels are made of. Pure; no Textual, no colours.

A `Line` is a run of `Span`s; a span's role says what it means (good, bad, ...), and the style sheet says how
that looks. Text is data: every function here takes it as it is, and `visible` turns control characters into
signs, so that no text from outside can reach the terminal as anything but text.
"""

from __future__ import annotations

from typing import Literal, NamedTuple, TypeAlias

from rich.cells import cell_len, chop_cells, set_cell_size

Role = Literal["", "strong", "dim", "good", "warn", "bad", "busy", "key", "reverse"]
ROLES: tuple[Role, ...] = ("strong", "dim", "good", "warn", "bad", "busy", "key", "reverse")


class Span(NamedTuple):
    """Text of one role."""

    text: str
    role: Role = ""


Line: TypeAlias = tuple[Span, ...]

_DELETE = 0x7F
# Unicode's own pictures of C0 controls and DEL; C1 controls and what reorders text have none.
_PICTURES = {code: chr(0x2400 + code) for code in range(0x20)} | {_DELETE: "\u2421"}
_UNSAFE = [*range(0x80, 0xA0), 0x061C, 0x200E, 0x200F, *range(0x2028, 0x202F), *range(0x2066, 0x206A), 0xFEFF]
_PICTURES |= dict.fromkeys(_UNSAFE, "\ufffd")
_PICTURES_ASCII = dict.fromkeys(_PICTURES, "?") | {code: f"^{chr(code + 0x40)}" for code in range(0x20)}


def visible(text: str, *, ascii_only: bool = False) -> str:
    """Text that a terminal shows and does not obey: control characters become signs, one for each."""
    if not ascii_only:
        return text.translate(_PICTURES)
    return text.translate(_PICTURES_ASCII).encode("ascii", errors="replace").decode("ascii")


def line(*parts: str | tuple[str, Role] | Span) -> Line:
    """A line of parts; empty ones are left out."""
    spans = (Span(part) if isinstance(part, str) else Span(*part) for part in parts)
    return tuple(span for span in spans if span.text)


def width_of(content: Line) -> int:
    """Cells that a line takes."""
    return sum(cell_len(span.text) for span in content)


def plain(content: Line) -> str:
    """A line without its roles."""
    return "".join(span.text for span in content)


def fitted(content: Line, width: int, *, more: str) -> Line:
    """The line, cut to a width; `more` stands for what is cut."""
    if width_of(content) <= width:
        return content
    left = width - cell_len(more)
    spans: list[Span] = []
    for span in content:
        size = cell_len(span.text)
        if size > left:
            spans.append(Span(set_cell_size(span.text, max(0, left)) + more, span.role))
            break
        spans.append(span)
        left -= size
    return tuple(spans)


def apart(left: Line, right: Line, width: int, *, more: str) -> Line:
    """Two lines on one, at both ends of it; when there is no room the left one is cut."""
    space = width - width_of(left) - width_of(right)
    if space < 1:
        left = fitted(left, max(0, width - width_of(right) - 1), more=more)
        space = max(1, width - width_of(left) - width_of(right))
    return (*left, Span(" " * space), *right)


def wrapped(text: str, width: int, *, role: Role = "", most: int = 3, more: str) -> list[Line]:
    """Text over several lines, broken at blanks where there are any; the last one says when there is more."""
    lines: list[str] = []
    for paragraph in text.split("\n"):
        lines.extend(_broken(paragraph, max(1, width)))
    if len(lines) > most:
        lines = [*lines[: most - 1], lines[most - 1] + more]
    return [fitted(line((one, role)), width, more=more) for one in lines]


def _broken(text: str, width: int) -> list[str]:
    lines: list[str] = []
    while cell_len(text) > width:
        head = chop_cells(text, width)[0]
        at_blank = head.rstrip().rfind(" ")
        cut = at_blank + 1 if at_blank > width // 2 else len(head)
        lines.append(text[:cut].rstrip(" "))
        text = text[cut:].lstrip(" ")
    return [*lines, text]
