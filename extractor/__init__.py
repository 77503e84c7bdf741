"""tapdeck's engine. What other programs may use of it is listed in `__all__`.

Nothing heavy is loaded by `import extractor`: each public name is imported when it is first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from extractor.generator import HiddenStatesGenerator

__all__ = ["HiddenStatesGenerator"]

_HOMES = {"HiddenStatesGenerator": "extractor.generator"}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value: object = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
