"""How sizes and durations are said to people, by every part of tapdeck. Pure.

Sizes are decimal (1 GB is 10^9 bytes), as on the label of a disk.
"""

from __future__ import annotations

import math

UNKNOWN = "unknown"
_SIZES = ("kB", "MB", "GB", "TB", "PB", "EB")


def duration_words(seconds: float) -> str:
    """Its two largest units: "0.4 s", "45 s", "2m05s", "3h12m", "2d04h"."""
    if not math.isfinite(seconds):
        return UNKNOWN
    if 0 < seconds < 9.95:
        return f"{seconds:.1f} s"
    whole = max(0, round(seconds))
    minutes, rest_s = divmod(whole, 60)
    hours, rest_min = divmod(minutes, 60)
    days, rest_h = divmod(hours, 24)
    if not minutes:
        return f"{whole} s"
    if not hours:
        return f"{minutes}m{rest_s:02}s"
    return f"{days}d{rest_h:02}h" if days else f"{hours}h{rest_min:02}m"


def bytes_words(num_bytes: float) -> str:
    """Three digits and a decimal unit: "96 bytes", "57.3 kB", "711 GB", "1.02 TB"."""
    if not math.isfinite(num_bytes):
        return UNKNOWN
    if abs(num_bytes) < 1000:
        return "1 byte" if num_bytes == 1 else f"{num_bytes:.0f} bytes"
    value = float(num_bytes)
    for unit in _SIZES:
        value /= 1000
        # 999.6 would be printed as 1000: the next unit says it.
        if abs(value) < 999.5 or unit == _SIZES[-1]:
            break
    return f"{three_digits(value)} {unit}"


def three_digits(value: float) -> str:
    """A number below a thousand with three digits; from there on whole."""
    size = abs(value)
    digits = 2 if size < 9.995 else 1 if size < 99.95 else 0
    return f"{value:,.{digits}f}"
