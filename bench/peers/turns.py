"""Decode by turns: every system's driver is loaded and waits while the others have their turn of a second.

What one second gives is compared with what the next one gives, on a machine that may be another a minute later.
llama.cpp has no driver: its tool is started for each of its turns.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from threading import Timer
from types import TracebackType
from typing import IO, Any, Final

from bench.peers import offline
from bench.peers.offline import TIMEOUT_S, Ask, MeasureError
from bench.peers.places import Workplace
from bench.peers.processes import own_environment, stop
from bench.peers.roofline import READ

STREAMS: Final = (1, 4, 16)


class Resident:
    """A process that answers lines with lines of JSON, the first without being asked.  Raises MeasureError."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], log: Path) -> None:
        log.parent.mkdir(parents=True, exist_ok=True)
        self._log = log
        with log.open("wb") as file:
            self._process = subprocess.Popen(
                command,
                env=dict(environment),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=file,
                start_new_session=True,
            )

    def ask(self, question: Mapping[str, object]) -> dict[str, Any]:
        try:
            _pipe(self._process.stdin).write(json.dumps(question).encode() + b"\n")
            _pipe(self._process.stdin).flush()
        except BrokenPipeError:
            raise MeasureError(self._last_words()) from None
        return self.hear()

    def hear(self) -> dict[str, Any]:
        """The next line that is an object; systems say other things in between."""
        timer = Timer(TIMEOUT_S, self._process.kill)
        timer.start()
        try:
            for line in _pipe(self._process.stdout):
                if line.startswith(b"{"):
                    said: dict[str, Any] = json.loads(line)
                    return said
        finally:
            timer.cancel()
        raise MeasureError(self._last_words())

    def close(self) -> None:
        stop(self._process)
        _pipe(self._process.stdin).close()
        _pipe(self._process.stdout).close()

    def _last_words(self) -> str:
        lines = self._log.read_text(errors="replace").strip().splitlines()
        return f"ended with {self._process.wait()}:\n" + "\n".join(lines[-8:])


class Turns:
    """A round: ``enter`` the systems, ``take`` turns; then ``found`` or ``failures`` has each of them."""

    def __init__(self, place: Workplace, model: str, ask: Ask) -> None:
        self.found: dict[str, dict[str, list[float]]] = {}
        self.failures: dict[str, str] = {}
        self._place = place
        self._model = model
        self._ask = ask
        self._drivers: dict[str, Resident] = {}
        command = [sys.executable, "-m", "bench.peers.roofline", str(ask.threads), "--stay"]
        self._roofline = Resident(command, own_environment(), place.logs / "turns-roofline.log")
        self._roofline.hear()

    def __enter__(self) -> Turns:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for resident in (*self._drivers.values(), self._roofline):
            resident.close()

    def enter(self, system: str) -> None:
        """Load it, and let it write once with every number of streams."""
        self.found[system] = {str(streams): [] for streams in STREAMS} | {READ: []}
        ask = replace(self._ask, decode=STREAMS)
        driver = offline.command_of(self._place, system, self._model, ask)
        if driver is None:
            return
        self._drivers[system] = Resident(*driver, self._place.logs / f"turns-{system}.log")
        try:
            self._drivers[system].hear()
        except MeasureError as error:
            self.failures[system] = str(error)

    def take(self, systems: Sequence[str], seed: int) -> None:
        """One turn of each, with each number of streams; the memory's bandwidth is looked at beside a single one."""
        for streams in STREAMS:
            for system in systems:
                if system in self.failures:
                    continue
                found = self.found[system]
                try:
                    if streams == 1:
                        found[READ].append(self._roofline.ask({})[READ])
                    found[str(streams)] += self._decode(system, streams, seed)
                except MeasureError as error:
                    self.failures[system] = str(error)

    def _decode(self, system: str, streams: int, seed: int) -> list[float]:
        if system in self._drivers:
            said = self._drivers[system].ask({"decode": [streams], "seed": seed})
        else:
            ask = replace(self._ask, decode=(streams,), seed=seed)
            said = offline.measure(self._place, system, self._model, ask)
        rates: list[float] = said["decode"][str(streams)]
        return rates


def _pipe(pipe: IO[bytes] | None) -> IO[bytes]:
    assert pipe is not None
    return pipe
