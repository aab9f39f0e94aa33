"""Which event loop runs the processes that speak HTTP: uvloop where it is installed, else asyncio's own.

What is answered is the same on both; docs/dependencies.md says what either costs.  Knows nothing about what runs on it.
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
"""What installs the other one."""

NO_ROOM = frozenset((errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM))
"""Why the system gives no descriptor for a connection; the loop tries again after a second."""
TOLD_EVERY_S = 10.0

log = logging.getLogger(__name__)

_Result = TypeVar("_Result")


def event_loop_name(wanted: EventLoop = "auto") -> Literal["uvloop", "asyncio"]:
    """The loop that ``run`` takes.  Imports none.  Raises ConfigError when it is not installed."""
    if wanted == "asyncio":
        return wanted
    if find_spec("uvloop") is not None:
        return "uvloop"
    if wanted == "uvloop":
        raise ConfigError(f"--event-loop uvloop: uvloop is not installed; pip install '{EXTRA}'")
    return "asyncio"


def run(work: Coroutine[Any, Any, _Result], wanted: EventLoop = "auto") -> _Result:
    """``asyncio.run`` on that loop.  One that is not there is a ConfigError where settings are read: see ``event_loop_name``."""
    with asyncio.Runner(loop_factory=_factory(wanted)) as runner:
        runner.get_loop().set_exception_handler(AcceptErrorHandler())
        return runner.run(work)


class AcceptErrorHandler:
    """A loop's exception handler: connections that find no descriptor are one line now and then.

    asyncio tells of each of them with a traceback, up to the whole backlog in a turn.
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
