import asyncio

import pytest

from extractor.supervisor.waiting import until_set


@pytest.mark.parametrize("turns", range(3))
def test_a_cancellation_that_comes_with_the_event_is_not_swallowed(turns):
    async def main():
        event = asyncio.Event()

        async def loop():
            while True:
                await until_set(event, 60.0)
                await asyncio.sleep(0)

        task = asyncio.create_task(loop())
        # It waits; then both come at once, or the one while the other is on its way.
        for _ in range(3):
            await asyncio.sleep(0)
        event.set()
        for _ in range(turns):
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait({task}, timeout=5.0)
        return task.cancelled()

    assert asyncio.run(main())


def test_an_event_that_never_comes_is_waited_for_so_long_and_no_longer():
    async def main():
        event = asyncio.Event()
        async with asyncio.timeout(30.0):
            await until_set(event, 0.01)
        return event.is_set()

    assert not asyncio.run(main())
