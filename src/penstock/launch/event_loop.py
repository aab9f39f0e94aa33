"""The event loop of gateways: uvloop if it is installed, else asyncio's own.

Responses are the same on both; docs/dependencies.md compares their cost.  Knows nothing about what runs on the loop.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import time
from collections.abc import Callable, Coroutine
from importlib.util import find_spec
from typing import Any, Literal, TypeVar

from penstock.config.schema import EventLoop
from penstock.errors import ConfigError

EXTRA = "penstock[uvloop]"
"""The extra that installs uvloop."""

NO_ROOM = frozenset((errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM))
"""Errors of accept(2) for lack of descriptors or memory; the loop retries after a second."""
TOLD_EVERY_S = 10.0

log = logging.getLogger(__name__)

_Result = TypeVar("_Result")


def event_loop_name(wanted: EventLoop = "auto") -> Literal["uvloop", "asyncio"]:
    """The loop that ``run`` uses.  Imports none.  Raises ConfigError if it is not installed."""
    if wanted == "asyncio":
        return wanted
    if find_spec("uvloop") is not None:
        return "uvloop"
    if wanted == "uvloop":
        raise ConfigError(f"--event-loop uvloop: uvloop is not installed; pip install '{EXTRA}'")
    return "asyncio"


def run(work: Coroutine[Any, Any, _Result], wanted: EventLoop = "auto") -> _Result:
    """``asyncio.run`` on the wanted loop.  Raises ConfigError as ``event_loop_name``."""
    with asyncio.Runner(loop_factory=_factory(wanted)) as runner:
        runner.get_loop().set_exception_handler(AcceptErrorHandler())
        return runner.run(work)


class AcceptErrorHandler:
    """A loop's exception handler: one log line in ``TOLD_EVERY_S`` for connections without a descriptor.

    asyncio logs a traceback for each of them, up to the whole backlog in one turn.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._silent_until = 0.0

    def __call__(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error = context.get("exception")
        if not isinstance(error, OSError) or error.errno not in NO_ROOM or "accept" not in context.get("message", ""):
            loop.default_exception_handler(context)
            return
        now = self._clock()
        if now >= self._silent_until:
            self._silent_until = now + TOLD_EVERY_S
            log.warning("connections wait: %s (ulimit -n allows more)", error.strerror)


def _factory(wanted: EventLoop) -> Callable[[], asyncio.AbstractEventLoop]:
    if event_loop_name(wanted) == "asyncio":
        return asyncio.new_event_loop
    import uvloop

    return uvloop.new_event_loop
