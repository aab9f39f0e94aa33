"""Runs the comparison: rounds, and in each the machine's own limits and then every system, in an order that turns.

What has been measured in an earlier run of the same file is not measured again.  A system that fails is said to have
failed, and the others go on.
"""

from __future__ import annotations

import json
import os
import platform
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeVar

from bench.peers import offline, online
from bench.peers.offline import Ask, MeasureError
from bench.peers.places import AGGREGATED, CODED, LLAMA, OFFLINE_SYSTEMS, QUANTS, SERVERS, SPLIT, Workplace
from bench.peers.processes import compile_sources, own_environment
from bench.peers.records import ABOUT, Record, Records
from bench.peers.roofline import READ
from bench.peers.servers import running
from bench.peers.steady import TRIES, Steady, usual_read_gbs
from bench.peers.turns import Turns

DECODE: Final = "decode"
PREFILL: Final = "prefill"
OFFLINE: Final = (DECODE, PREFILL)
ONLINE: Final = ("start", "http1", "http8", "stutter", "memory", "kill")
MACHINE: Final = "machine"
ROOFLINE: Final = "roofline"
MEASURES: Final = (*OFFLINE, *ONLINE)
SYSTEMS: Final = tuple(dict.fromkeys((*OFFLINE_SYSTEMS, *CODED, *SERVERS)))

PREFILL_TOKENS: Final = (128, 512, 2048)
READ_BYTES: Final = 1 << 24

One = TypeVar("One")


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """Which part of the matrix."""

    model: str
    rounds: int
    systems: tuple[str, ...]
    measures: tuple[str, ...]
    threads: int
    steps: int
    turns: int
    requests: int
    stutter_s: float


class Matrix:
    """One run."""

    def __init__(self, place: Workplace, records: Records, wanted: Wanted) -> None:
        self._place = place
        self._records = records
        self._wanted = wanted
        self._began = time.monotonic()
        self._failures = 0
        self._steady = Steady(lambda: usual_read_gbs(wanted.threads))

    def run(self) -> int:
        """Everything that is missing; returns how many measurements failed."""
        wanted = self._wanted
        keep_to_cores(wanted.threads)
        self._records.add(Record(model=wanted.model, round=-1, system=MACHINE, measure=ABOUT, figures=about()))
        compile_sources()
        warm_page_cache(self._place, wanted.model)
        for number in range(wanted.rounds):
            self._round(number)
        return self._failures

    def _round(self, number: int) -> None:
        done = self._records.done()
        decode_jobs = [system for system, _ in self._missing(done, number, (*OFFLINE_SYSTEMS, *CODED), (DECODE,))]
        offline_jobs = list(self._missing(done, number, (*OFFLINE_SYSTEMS, *CODED), (PREFILL,)))
        online_jobs = list(self._missing(done, number, SERVERS, ONLINE))
        if not decode_jobs and not offline_jobs and not online_jobs:
            return
        if (self._wanted.model, number, MACHINE, ROOFLINE) not in done:
            self._roofline(number)
        if decode_jobs:
            self._decode(number, decode_jobs)
        for system, _ in offline_jobs:
            self._prefill(number, system)
        for system, measures in online_jobs:
            self._online(number, system, measures)

    def _missing(
        self, done: set[tuple[str, int, str, str]], number: int, systems: Sequence[str], measures: Sequence[str]
    ) -> Iterator[tuple[str, list[str]]]:
        """(system, measures) in this round's order."""
        for system in turned(systems, number):
            if system not in self._wanted.systems:
                continue
            known = [m for m in measures if m in self._wanted.measures and (m != "kill" or kills(system))]
            left = [m for m in known if (self._wanted.model, number, system, m) not in done]
            if left:
                yield system, left

    def _roofline(self, number: int) -> None:
        command = [sys.executable, "-m", "bench.peers.roofline", str(self._wanted.threads)]
        self._note(number, MACHINE, ROOFLINE, json.loads(offline.run(command, own_environment())))

    def _decode(self, number: int, systems: Sequence[str]) -> None:
        """All systems wait beside each other and take turns, so that ratios are of one state of the machine."""
        wanted = self._wanted
        ask = Ask(threads=wanted.threads, seed=number, steps=wanted.steps, stay=True)
        with Turns(self._place, wanted.model, ask) as turns:
            for system in systems:
                turns.enter(system)
            for turn in range(wanted.turns):
                turns.take(turned(systems, turn), seed=number * wanted.turns + turn)
        for system in systems:
            if system in turns.failures:
                self._fail(number, system, DECODE, turns.failures[system])
            else:
                self._note(number, system, DECODE, turns.found[system])

    def _prefill(self, number: int, system: str) -> None:
        ask = Ask(threads=self._wanted.threads, seed=number, steps=self._wanted.steps, prefill=PREFILL_TOKENS)
        try:
            found, read_gbs = self._steadily(system, ask)
        except MeasureError as error:
            self._fail(number, system, PREFILL, str(error))
            return
        self._note(number, system, PREFILL, found[PREFILL] | {READ: read_gbs})

    def _steadily(self, system: str, ask: Ask) -> tuple[dict[str, dict[str, Any]], list[float]]:
        """What was found while the machine was the same before and after, and its GB/s then; or the last try."""
        for _ in range(TRIES):
            before = self._steady.wait()
            found = offline.measure(self._place, system, self._wanted.model, ask)
            after, steady = self._steady.look()
            if steady:
                break
        return found, [before, after]

    def _online(self, number: int, system: str, measures: Sequence[str]) -> None:
        wanted = self._wanted
        load = online.Load(
            seed=100 + number,
            requests=wanted.requests,
            stutter_s=wanted.stutter_s,
            weight_bytes=weight_bytes(self._place, system, wanted.model),
        )
        measure = "start"
        self._steady.wait()
        try:
            with running(self._place, system, wanted.model, wanted.threads) as server:
                if measure in measures:
                    self._note(number, system, measure, {"first_token_s": server.first_token_s})
                for measure, take in online.online_measures(system).items():
                    if measure in measures:
                        self._note(number, system, measure, take(server, load))
        except (MeasureError, OSError) as error:
            self._fail(number, system, measure, str(error))

    def _note(self, number: int, system: str, measure: str, figures: dict[str, Any]) -> None:
        record = Record(model=self._wanted.model, round=number, system=system, measure=measure, figures=figures)
        self._records.add(record)
        self._say(number, system, measure, short(figures))

    def _fail(self, number: int, system: str, measure: str, error: str) -> None:
        self._failures += 1
        self._records.add(Record(model=self._wanted.model, round=number, system=system, measure=measure, error=error))
        self._say(number, system, measure, f"failed: {error}")

    def _say(self, number: int, system: str, measure: str, text: str) -> None:
        minutes, seconds = divmod(int(time.monotonic() - self._began), 60)
        at = f"{minutes:3d}:{seconds:02d}  round {number + 1}/{self._wanted.rounds}"
        print(f"{at}  {system:21s} {measure:9s} {text}", flush=True)


def turned(systems: Sequence[One], number: int) -> list[One]:
    """Another first one each round, so that none is always measured after the same."""
    first = number % len(systems)
    return [*systems[first:], *systems[:first]]


def kills(system: str) -> bool:
    return "kill" in online.online_measures(system)


def keep_to_cores(threads: int) -> None:
    """All that is started from here on has so many processors and no more."""
    mine = sorted(os.sched_getaffinity(0))
    if threads < len(mine):
        os.sched_setaffinity(0, mine[:threads])


def weight_bytes(place: Workplace, system: str, model: str) -> int:
    """Of the file that this server reads."""
    if system == LLAMA:
        return place.gguf(model).stat().st_size
    folder = place.compressed(model) if system in (SPLIT, AGGREGATED) else place.checkpoint(model)
    return sum(path.stat().st_size for path in folder.glob("*.safetensors"))


def warm_page_cache(place: Workplace, model: str) -> None:
    """Read every file of weights once."""
    files = [place.checkpoint(model) / "model.safetensors", *(place.gguf(model, kind) for kind in ("BF16", *QUANTS))]
    files += [*place.compressed(model).glob("*.safetensors"), *place.openvino(model).glob("*.bin")]
    for path in filter(Path.exists, files):
        with path.open("rb", buffering=0) as file:
            while file.read(READ_BYTES):
                pass


def about() -> dict[str, Any]:
    """The machine."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    facts = dict(part.partition(":")[::2] for part in lines if ":" in part)
    cpu = {name.strip(): value.strip() for name, value in facts.items()}
    return {
        "processor": cpu.get("model name", platform.machine()),
        "family": f"{cpu.get('cpu family')}/{cpu.get('model')}",
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
    }


def short(figures: dict[str, Any]) -> str:
    """One line for people."""
    return json.dumps(rounded(figures)).replace('"', "")


def rounded(value: Any) -> Any:
    """Three digits of every number."""
    if isinstance(value, dict):
        return {name: rounded(each) for name, each in value.items()}
    if isinstance(value, list):
        return [rounded(each) for each in value]
    return float(f"{value:.3g}") if isinstance(value, float) else value
