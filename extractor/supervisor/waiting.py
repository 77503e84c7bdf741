"""Waiting for an event, but not for ever."""

from __future__ import annotations

import asyncio
import contextlib


async def until_set(event: asyncio.Event, seconds: float) -> None:
    """Returns when the event is set, or after `seconds`.

    Not by `asyncio.wait_for`: on Python 3.11 it swallows a cancellation that comes when the event has just been
    set, and whoever was cancelled goes on.
    """
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await event.wait()
