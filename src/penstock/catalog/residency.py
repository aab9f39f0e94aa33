"""Which models of a catalog are in memory: a pure state machine, (event, now) -> models to start and stop.

::

               Start                  up                     Stop                    down
    unloaded ----------> loading -------------> loaded ----------------> unloading --------> unloaded
                            | down: reported to      |                     ^
                            v its requesters         | room is needed      | its last request ended
                         unloaded                    +------> closing -----+

A model with waiting requests is started as soon as the memory budget has room.  To make room, unused models are
stopped, the least recently used first; if all are in use, that one is closed: its requests finish, new ones wait.
Models are started in the order of their first waiting request, so none starves.  Knows no processes and no requests.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any


class ModelState(StrEnum):
    """State of a model, as shown to operators."""

    UNLOADED = "unloaded"
    LOADING = "loading"
    LOADED = "loaded"
    CLOSING = "closing"  # finishes its requests, takes no new ones
    UNLOADING = "unloading"


@dataclass(frozen=True, slots=True, kw_only=True)
class ResidentModel:
    """One entry of the catalog."""

    name: str
    nbytes: int  # memory while it is loaded
    pinned: bool = False  # loaded at the start, and never unloaded to make room


@dataclass(frozen=True, slots=True)
class StartModel:
    """Load this model now."""

    name: str


@dataclass(frozen=True, slots=True)
class StopModel:
    """Unload this model now: it is not in use."""

    name: str


ResidencyEffects = list[StartModel | StopModel]


@dataclass(slots=True)
class _Model:
    entry: ResidentModel
    state: ModelState = ModelState.UNLOADED
    uses: int = 0
    promised: int = 0  # requests that waited for it and have not started yet: it stays loaded for them
    used: float = 0.0  # time of its last use
    loads: int = 0
    reason: str = ""  # why the last load failed


_IN_MEMORY = frozenset({ModelState.LOADING, ModelState.LOADED, ModelState.CLOSING, ModelState.UNLOADING})


@dataclass(slots=True)
class ModelResidency:
    """All models.  Every event returns the effects to carry out, in order."""

    budget: int | None  # bytes; None: no limit
    _models: dict[str, _Model] = field(default_factory=dict)
    _wanted: list[str] = field(default_factory=list)  # models with waiting requests, in order of the first

    @classmethod
    def of(cls, entries: Iterable[ResidentModel], budget: int | None) -> ModelResidency:
        """No model is loaded yet."""
        return cls(budget, {entry.name: _Model(entry) for entry in entries})

    def state(self, name: str) -> ModelState:
        return self._models[name].state

    def rows(self) -> Sequence[dict[str, Any]]:
        """One mapping per model, as ``/admin/workers`` shows it."""
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
        """A request waits for this model."""
        if self._models[name].state is not ModelState.LOADED and name not in self._wanted:
            self._wanted.append(name)
        return self._settle()

    def drop_request(self, name: str, *, last: bool) -> ResidencyEffects:
        """A request no longer waits for this model; ``last``: it was the only one."""
        model = self._models[name]
        model.promised = 0 if last else max(0, model.promised - 1)
        if last:
            self._drop(name)
        return self._settle()

    def on_process_running(self, name: str) -> None:
        """The model's process runs, perhaps at the request of an earlier front."""
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
        """A request that used the model has ended."""
        model = self._models[name]
        model.uses -= 1
        model.used = now
        return self._settle()

    def on_loaded(self, name: str, now: float, promised: int = 0) -> ResidencyEffects:
        """The model is loaded; it stays so for the ``promised`` requests that waited for it."""
        model = self._models[name]
        if model.state is ModelState.LOADING:
            model.state, model.used, model.reason = ModelState.LOADED, now, ""
            model.promised = promised
            model.loads += 1
            self._drop(name)
        return self._settle()

    def on_exited(self, name: str, reason: str) -> ResidencyEffects:
        """The model's process has ended.  Requests waiting for its load fail; those behind an unload wait on."""
        model = self._models[name]
        if model.state is not ModelState.UNLOADING:
            model.reason = reason
            self._drop(name)
        model.state, model.promised = ModelState.UNLOADED, 0
        return self._settle()

    def request_unload(self, name: str) -> ResidencyEffects:
        """An operator unloads it: it is closed until its requests have ended."""
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
                continue  # loading, or still unloading
            if not self._has_room(model.entry.nbytes):
                self._make_room(model.entry.nbytes)
                break  # first come, first served
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
        """Close as many further models as necessary: idle ones first, then by their last use."""
        stays = [m for m in self._models.values() if m.state in (ModelState.LOADING, ModelState.LOADED)]
        left = sum(model.entry.nbytes for model in stays)
        may_go = [m for m in stays if m.state is ModelState.LOADED and not m.entry.pinned and not m.promised]
        may_go.sort(key=lambda model: (model.uses > 0, model.used))
        assert self.budget is not None
        while may_go and left + nbytes > self.budget:
            victim = may_go.pop(0)
            victim.state = ModelState.CLOSING
            left -= victim.entry.nbytes
