"""A field to type into. Its cursor does not blink: each blink would be sent over the wire, for nothing."""

from __future__ import annotations

from textual.widgets import Input


class Field(Input):
    """Textual's field, still."""

    def __init__(self, value: str = "", *, id: str, placeholder: str = "") -> None:  # noqa: A002 -- Textual's name
        super().__init__(value, id=id, placeholder=placeholder, select_on_focus=False)
        self.cursor_blink = False
