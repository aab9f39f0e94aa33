"""The event loop that is there, the one that was asked for, or a line that says what would install it."""

from __future__ import annotations

import asyncio
import errno

import pytest

from penstock.cli import doctor
from penstock.errors import ConfigError
from penstock.launch import event_loop


async def _module() -> str:
    return type(asyncio.get_running_loop()).__module__


def test_the_one_that_was_asked_for_runs() -> None:
    assert event_loop.run(_module(), "asyncio").startswith("asyncio")
    assert event_loop.run(_module(), "uvloop").startswith("uvloop")
    assert event_loop.run(_module()).startswith("uvloop")
    assert (event_loop.event_loop_name("asyncio"), event_loop.event_loop_name()) == ("asyncio", "uvloop")
    assert doctor.check_event_loop().found.startswith("uvloop 0.")


def test_without_the_extra_asyncio_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event_loop, "find_spec", lambda name: None)
    assert event_loop.run(_module()).startswith("asyncio")
    assert (event_loop.event_loop_name("asyncio"), event_loop.event_loop_name()) == ("asyncio", "asyncio")
    with pytest.raises(ConfigError, match=r"pip install 'penstock\[uvloop\]'"):
        event_loop.event_loop_name("uvloop")
    assert "penstock[uvloop]" in doctor.check_event_loop().found


def test_connections_without_descriptors_are_one_line_now_and_then(caplog: pytest.LogCaptureFixture) -> None:
    now = [0.0]
    troubles, loop = event_loop.AcceptErrorHandler(lambda: now[0]), asyncio.new_event_loop()
    full = {"message": "socket.accept() out of system resource", "exception": OSError(errno.EMFILE, "too many")}
    for at in (0.0, 0.1, event_loop.TOLD_EVERY_S - 0.1, event_loop.TOLD_EVERY_S):
        now[0] = at
        troubles(loop, full)
    assert [(record.levelname, record.exc_info) for record in caplog.records] == [("WARNING", None)] * 2
    troubles(loop, {"message": "a task failed", "exception": ValueError("as ever")})
    assert "as ever" in caplog.text
    loop.close()
