"""Several streams as one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import TypeVar

T = TypeVar("T")


async def merge(streams: Sequence[AsyncGenerator[T]]) -> AsyncGenerator[T]:
    """Yields the items of all streams as they come, each stream's in its own order.

    A stream waits until its last item was taken, so that a slow reader fills no memory. The first
    error of any stream ends all of them and is raised.
    """
    if len(streams) == 1:
        async with aclosing(streams[0]) as only:
            async for item in only:
                yield item
        return
    queue: asyncio.Queue[T] = asyncio.Queue(1)

    async def forward(stream: AsyncGenerator[T]) -> None:
        async with aclosing(stream) as items:
            async for item in items:
                await queue.put(item)

    forwarding = {asyncio.create_task(forward(stream)) for stream in streams}
    taking = asyncio.create_task(queue.get())
    try:
        while forwarding or not queue.empty() or taking.done():
            done, _ = await asyncio.wait({*forwarding, taking}, return_when=asyncio.FIRST_COMPLETED)
            if taking in done:
                yield taking.result()
                taking = asyncio.create_task(queue.get())
            for ended in [task for task in forwarding if task in done]:
                forwarding.remove(ended)
                ended.result()
    finally:
        for task in (*forwarding, taking):
            task.cancel()
        await asyncio.gather(*forwarding, taking, return_exceptions=True)
