"""What a hand that strikes has done, what came of it, and how parts of a long run are kept and put together."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from bench.faults.result import quantile

NO_BLOW = "no blow"
"""Of a stall that is measured where nothing was struck: what the machine alone makes clients wait."""


@dataclass(frozen=True)
class Stall:
    """From a blow to the next token of an answer that was under way."""

    seconds: float
    kind: str  # the signal's name, or NO_BLOW
    target: str
    served: bool  # by what was struck
    begun: bool  # had it a token already?


@dataclass
class Toll:
    """What was done, and what came of it."""

    blows: Counter[str] = field(default_factory=Counter)  # by target
    points: Counter[str] = field(default_factory=Counter)
    signals: Counter[str] = field(default_factory=Counter)
    touched: int = 0  # answers under way when something was hit, each once
    resumed: int = 0  # of those, asked for again after a gateway's death
    stalls: list[Stall] = field(default_factory=list)
    answers: int = 0
    wrong: list[str] = field(default_factory=list)  # answers that failed or differ
    left: list[str] = field(default_factory=list)  # what somebody held when all was over
    seconds: float = 0.0
    load: float = 0.0  # the machine's, with the run itself

    def add(self, other: Toll) -> None:
        """Another part of the same run."""
        for name in ("blows", "points", "signals"):
            getattr(self, name).update(getattr(other, name))
        for name in ("touched", "resumed", "answers", "seconds"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        for name in ("stalls", "wrong", "left"):
            getattr(self, name).extend(getattr(other, name))
        self.load = max(self.load, other.load)

    def of(self, kind: str, only: Callable[[Stall], bool] = lambda stall: True) -> list[float]:
        """Seconds of the stalls of this kind."""
        return [stall.seconds for stall in self.stalls if stall.kind == kind and only(stall)]

    @property
    def hangs(self) -> int:
        """Answers that never came."""
        return sum("TimeoutError" in wrong for wrong in self.wrong)

    def as_json(self) -> dict[str, Any]:
        """For ``of_json``."""
        plain = {key: dict(value) if isinstance(value, Counter) else value for key, value in vars(self).items()}
        return plain | {"stalls": [asdict(stall) for stall in self.stalls]}

    @classmethod
    def of_json(cls, known: dict[str, Any]) -> Toll:
        """What ``as_json`` made of one."""
        counters = {name: Counter(known[name]) for name in ("blows", "points", "signals")}
        return cls(**known | counters | {"stalls": [Stall(**stall) for stall in known["stalls"]]})


class Parts:
    """Tolls by the names of parts, in a file: a run that was cut short goes on with what is not there.

    ``plan`` says what the parts are of; those of another plan are not taken.
    """

    def __init__(self, path: Path | None, plan: str) -> None:
        self._path = path
        self._plan = plan
        known = json.loads(path.read_text()) if path is not None and path.exists() else {}
        self._done: dict[str, Any] = known.get("done", {}) if known.get("plan") == plan else {}

    def get(self, name: str) -> Toll | None:
        """What is known of this part."""
        return Toll.of_json(self._done[name]) if name in self._done else None

    def put(self, name: str, toll: Toll) -> None:
        """It is done."""
        self._done[name] = toll.as_json()
        if self._path is not None:
            self._path.write_text(json.dumps({"plan": self._plan, "done": self._done}))


def together(tolls: Iterable[Toll]) -> Toll:
    """Of a whole run."""
    whole = Toll()
    for toll in tolls:
        whole.add(toll)
    return whole


def histogram(values: list[float]) -> list[float]:
    """Every hundredth part of the way: enough for a plot."""
    return [round(quantile(values, share / 100), 4) for share in range(101)] if values else []
