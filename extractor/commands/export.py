"""`tapdeck export`: a data set in the layout that a trainer reads.

Owns the choice of the layout and what is reported; the layouts themselves are in
`extractor.store.layouts`, which are imported only here since they need torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from extractor.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from extractor.commands.output import Output

LAYOUTS = ("speculators-v1",)
"""Layouts that can be written."""


def run(
    output: Path,
    *,
    layout: str,
    target: Path,
    out: Output,
    taps: Sequence[str] | None = None,
    force: bool = False,
    allow_incomplete: bool = False,
) -> int:
    """Exports a data set. Blocking; what is there of the same export is kept.

    Args:
        output: the data set.
        layout: one of `LAYOUTS`.
        target: folder for the export.
        out: where to print.
        taps: taps to export; None takes what the layout can hold of those stored.
        force: export also what the layout's trainer would misread.
        allow_incomplete: export also a data set that is not finished.

    Returns:
        The exit code: 0.

    Raises:
        ConfigError: an unknown layout.
        PreflightError: the taps or the target do not fit the layout, or the data set is not finished.
        AccessError: the target is no folder, or may not be written.
        StoreError: the data set is damaged, or a file cannot be written.
    """
    if layout not in LAYOUTS:
        raise ConfigError(f"--layout {layout}: unknown", remedy=f"choose one of: {', '.join(LAYOUTS)}")
    from extractor.store.layouts import speculators_v1

    result = speculators_v1.export(
        output, target, taps=taps, force=force, allow_incomplete=allow_incomplete, note=out.note
    )
    kept = result.samples - result.written
    out.line(
        f"{result.samples} samples, {result.tokens} tokens in {target} ({layout}; {', '.join(result.taps)})"
        + (f"; {kept} were there already" if kept else "")
    )
    out.result(
        {
            "output": str(output),
            "target": str(target),
            "layout": layout,
            "taps": list(result.taps),
            "samples": result.samples,
            "written": result.written,
            "tokens": result.tokens,
            "warnings": list(result.warnings),
        }
    )
    return 0
