"""Calls that may block for long, such as of the system's resolver: each in a thread that no exit waits for.

The event loop's own executor has few threads, which others need, and a process joins them when it ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable
from typing import TypeVar

_Result = TypeVar("_Result")


async def call_in_daemon_thread(call: Callable[[], _Result], *, name: str) -> _Result:
    """What ``call`` returns or raises.  If this is cancelled, the thread runs on and its result is dropped."""
    loop = asyncio.get_running_loop()
    result: asyncio.Future[_Result] = loop.create_future()

    def settle(value: _Result | None, error: Exception | None) -> None:
        if result.cancelled():
            return
        if error is not None:
            result.set_exception(error)
        else:
            result.set_result(value)  # type: ignore[arg-type]

    def run() -> None:
        value, raised = None, None
        try:
            value = call()
        except Exception as error:  # noqa: BLE001 - raised again in the caller's task
            raised = error
        with contextlib.suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(settle, value, raised)

    threading.Thread(target=run, name=name, daemon=True).start()
    return await result
