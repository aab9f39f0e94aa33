"""Which models of a catalogue are in memory: a pure state machine, (what happened, now) -> what to start and to stop.

::

               Start                  up                     Stop                    down
    unloaded ----------> loading -------------> loaded ----------------> unloading --------> unloaded
                            | down: told to          |                     ^
                            v its requesters         | room is wanted      | its last answer ended
                         unloaded                    +------> closing -----+

A model that somebody waits for is started as soon as the memory budget has room.  To make room, loaded models that
nobody uses are stopped, the one used longest ago first; if all are in use, that one is closed: its answers go on to
their end, new requests for it wait.  Who came first is served first, so nobody waits for ever.  Knows no processes and
no requests.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any


class ModelState(StrEnum):
    """As an operator sees it."""

    UNLOADED = "unloaded"
    LOADING = "loading"
    LOADED = "loaded"
    CLOSING = "closing"  # finishes its answers, takes nothing new
    UNLOADING = "unloading"


@dataclass(frozen=True, slots=True, kw_only=True)
class ResidentModel:
    """One entry of the catalogue."""

    name: str
    nbytes: int  # of memory while it is loaded
    pinned: bool = False  # loaded at the start, and never unloaded to make room


@dataclass(frozen=True, slots=True)
class StartModel:
    """Load this model now."""

    name: str


@dataclass(frozen=True, slots=True)
class StopModel:
    """Unload this model now: nobody uses it."""

    name: str


ResidencyEffects = list[StartModel | StopModel]


@dataclass(slots=True)
class _Model:
    entry: ResidentModel
    state: ModelState = ModelState.UNLOADED
    uses: int = 0
    promised: int = 0  # requests that waited for it and have not begun yet: it stays for them
    used: float = 0.0  # when it was used last
    loads: int = 0
    reason: str = ""  # why it was not loaded, the last time


_IN_MEMORY = frozenset({ModelState.LOADING, ModelState.LOADED, ModelState.CLOSING, ModelState.UNLOADING})


@dataclass(slots=True)
class ModelResidency:
    """All models.  Every verb returns what is to be done, in order."""

    budget: int | None  # bytes; None: no limit
    _models: dict[str, _Model] = field(default_factory=dict)
    _wanted: list[str] = field(default_factory=list)  # somebody waits for them, who came first in front

    @classmethod
    def of(cls, entries: Iterable[ResidentModel], budget: int | None) -> ModelResidency:
        """Nothing is loaded yet."""
        return cls(budget, {entry.name: _Model(entry) for entry in entries})

    def state(self, name: str) -> ModelState:
        return self._models[name].state

    def rows(self) -> Sequence[dict[str, Any]]:
        """One mapping a model, as ``/admin/models`` shows it."""
        return [
            {
                "name": name,
                "state": model.state.value,
                "requests": model.uses,
                "bytes": model.entry.nbytes,
                "pinned": model.entry.pinned,
                "loads": model.loads,
                "reason": model.reason,
            }
            for name, model in self._models.items()
        ]

    # --- what happened -----------------------------------------------------------------------------------------------

    def request_model(self, name: str) -> ResidencyEffects:
        """Somebody waits for this model."""
        if self._models[name].state is not ModelState.LOADED and name not in self._wanted:
            self._wanted.append(name)
        return self._settle()

    def drop_request(self, name: str, *, nobody: bool) -> ResidencyEffects:
        """One who waited for it does so no more; ``nobody``: it was the last."""
        model = self._models[name]
        model.promised = 0 if nobody else max(0, model.promised - 1)
        if nobody:
            self._drop(name)
        return self._settle()

    def on_process_running(self, name: str) -> None:
        """Its process runs, whoever asked for it (an earlier front)."""
        model = self._models[name]
        if model.state is ModelState.UNLOADED:
            model.state = ModelState.LOADING

    def on_request_started(self, name: str, now: float) -> ResidencyEffects:
        """A request uses the loaded model."""
        model = self._models[name]
        model.uses += 1
        model.used = now
        model.promised = max(0, model.promised - 1)
        return self._settle()

    def on_request_ended(self, name: str, now: float) -> ResidencyEffects:
        """It uses it no more."""
        model = self._models[name]
        model.uses -= 1
        model.used = now
        return self._settle()

    def on_loaded(self, name: str, now: float, promised: int = 0) -> ResidencyEffects:
        """The model is loaded; so many wait for it, and it is theirs before it can go again."""
        model = self._models[name]
        if model.state is ModelState.LOADING:
            model.state, model.used, model.reason = ModelState.LOADED, now, ""
            model.promised = promised
            model.loads += 1
            self._drop(name)
        return self._settle()

    def on_exited(self, name: str, reason: str) -> ResidencyEffects:
        """Its process has ended.  Who waited while it was loaded is told; who waits behind an unloading waits on."""
        model = self._models[name]
        if model.state is not ModelState.UNLOADING:
            model.reason = reason
            self._drop(name)
        model.state, model.promised = ModelState.UNLOADED, 0
        return self._settle()

    def request_unload(self, name: str) -> ResidencyEffects:
        """An operator wants it out of memory, as soon as its answers have ended."""
        model = self._models[name]
        self._drop(name)
        if model.state in (ModelState.LOADED, ModelState.LOADING):
            model.state, model.promised = ModelState.CLOSING, 0
        return self._settle()

    # --- what follows ------------------------------------------------------------------------------------------------

    def _drop(self, name: str) -> None:
        if name in self._wanted:
            self._wanted.remove(name)

    def _settle(self) -> ResidencyEffects:
        effects: ResidencyEffects = []
        for name in tuple(self._wanted):
            model = self._models[name]
            if model.state is not ModelState.UNLOADED:
                continue  # it comes, or must first be gone
            if not self._has_room(model.entry.nbytes):
                self._make_room(model.entry.nbytes)
                break  # nobody overtakes
            model.state = ModelState.LOADING
            effects.append(StartModel(name))
        for name, model in self._models.items():
            if model.state is ModelState.CLOSING and model.uses == 0:
                model.state = ModelState.UNLOADING
                effects.append(StopModel(name))
        return effects

    def _has_room(self, nbytes: int) -> bool:
        taken = sum(model.entry.nbytes for model in self._models.values() if model.state in _IN_MEMORY)
        return self.budget is None or taken == 0 or taken + nbytes <= self.budget

    def _make_room(self, nbytes: int) -> None:
        """Close as many as are needed beside those that go already: idle ones first, then by their last use."""
        stays = [m for m in self._models.values() if m.state in (ModelState.LOADING, ModelState.LOADED)]
        left = sum(model.entry.nbytes for model in stays)
        may_go = [m for m in stays if m.state is ModelState.LOADED and not m.entry.pinned and not m.promised]
        may_go.sort(key=lambda model: (model.uses > 0, model.used))
        assert self.budget is not None
        while may_go and left + nbytes > self.budget:
            victim = may_go.pop(0)
            victim.state = ModelState.CLOSING
            left -= victim.entry.nbytes
