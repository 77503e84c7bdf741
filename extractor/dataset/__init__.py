"""Conversations to token ids and loss masks: readers, chat templates, masks, rejects, and their cache.

Entry points: `extractor.dataset.prepare.prepare` makes a prepared data set (needs transformers);
`PreparedDataset` reads one (needs neither transformers nor torch, so engine workers start fast). The names
below are loaded when first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from extractor.dataset.prepare import PrepareProgress
    from extractor.dataset.prepared import PreparedDataset, PreparedMeta, PreparedSample

__all__ = ["PrepareProgress", "PreparedDataset", "PreparedMeta", "PreparedSample"]

_HOMES = {
    "PrepareProgress": "extractor.dataset.prepare",
    "PreparedDataset": "extractor.dataset.prepared",
    "PreparedMeta": "extractor.dataset.prepared",
    "PreparedSample": "extractor.dataset.prepared",
}


def __getattr__(name: str) -> Any:  # Any: whatever the name stands for
    if name not in _HOMES:
        raise AttributeError(f"module {__name__} has no attribute {name}")
    return getattr(importlib.import_module(_HOMES[name]), name)
