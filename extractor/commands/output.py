"""Where the verbs print: results to stdout, everything else to stderr.

With `--json` exactly one JSON object goes to stdout. No other module writes to the terminal.
"""

from __future__ import annotations

import io
import json
import sys
from typing import TYPE_CHECKING, Any, TextIO

if TYPE_CHECKING:
    from collections.abc import Mapping


class Output:
    """Standard output and diagnostics of one command."""

    def __init__(self, *, as_json: bool, stdout: TextIO | None = None, stderr: TextIO | None = None) -> None:
        self.as_json = as_json
        # Python has no stream for a descriptor that was closed before the start: then nobody listens.
        self.stdout: TextIO = stdout or sys.stdout or io.StringIO()
        self.stderr: TextIO = stderr or sys.stderr or io.StringIO()

    def line(self, text: str = "") -> None:
        """A line of the result for people; a diagnostic when JSON was asked for."""
        self._write(self.stderr if self.as_json else self.stdout, text)

    def note(self, text: str) -> None:
        """A diagnostic: progress, a warning, a hint."""
        self._write(self.stderr, text)

    def result(self, value: Mapping[str, Any]) -> None:
        """The result for programs; nothing is printed unless JSON was asked for."""
        if self.as_json:
            self._write(self.stdout, json.dumps(value))

    @staticmethod
    def _write(stream: TextIO, text: str) -> None:
        stream.write(text + "\n")
        stream.flush()
