"""The front process of a catalog: loads and unloads models as ``residency`` decides, and lets requests wait for them.

The front asks the supervisor to start and end a model's process (``LoadModel``, ``UnloadModel``), is notified of its
state (``WorkerUp``, ``WorkerDown``), and polls the model's own gateway until it is ready.  Runs on one event loop.
"""

from __future__ import annotations

import asyncio
import logging
import sys
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Annotated, Any

import msgspec

from penstock import http_client
from penstock.api.audit import open_audit_log
from penstock.api.auth import load_api_keys, watch_api_keys
from penstock.api.openapi import Schemas
from penstock.api.response_store import SqliteResponseStore
from penstock.catalog.config import CatalogModel, FrontConfig
from penstock.catalog.http_proxy import CatalogModels, FrontServices, make_catalog_app
from penstock.catalog.residency import ModelResidency, ModelState, ResidencyEffects, ResidentModel, StartModel
from penstock.clock import Clock, MonotonicClock
from penstock.errors import NoWorkers, QueueFull
from penstock.http_client import Upstream
from penstock.launch import event_loop
from penstock.launch.http_server import SWITCH_S, HttpServer, ProcessIo
from penstock.launch.restart_policy import GATEWAY
from penstock.sidecar import drop_secrets, protect_memory
from penstock.types import WorkerId, WorkerState
from penstock.wire.supervisor_messages import LoadModel, SupervisorMessage, UnloadModel, WorkerDown, WorkerUp

log = logging.getLogger(__name__)

ASK_S = 0.02
"""Between two readiness checks of a starting model."""


class ModelManager(CatalogModels):
    """Use: ``start()`` on the running loop, ``on_supervisor`` for each message of the supervisor."""

    def __init__(self, config: FrontConfig, tell: Callable[[SupervisorMessage], None], clock: Clock) -> None:
        self._limits = config.limits
        self._key = config.upstream_key
        self._send = tell
        self._clock = clock
        self._places: Mapping[str, CatalogModel] = {place.name: place for place in config.models}
        self._entries = {name: place.name for place in config.models for name in place.names}
        residents = [
            ResidentModel(name=place.name, nbytes=place.nbytes, pinned=place.pinned) for place in config.models
        ]
        self._residency = ModelResidency.of(residents, config.model_memory)
        self._at: dict[str, tuple[int, Upstream]] = {}  # incarnation and address of running processes
        self._changed = asyncio.Condition()
        self._lengths: dict[str, int] = {}  # context of models that were loaded
        self._failed: Counter[str] = Counter()  # failed loads and deaths, by model
        self._waiting: Counter[str] = Counter()  # waiting requests, by model
        self._tasks: set[asyncio.Task[None]] = set()

    # --- life --------------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Load the pinned models, in order."""
        for place in self._places.values():
            if place.pinned:
                self._carry_out(self._residency.request_model(place.name))

    async def close(self) -> None:
        """Cancel all readiness checks."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    # --- CatalogModels -----------------------------------------------------------------------------------------------

    def find_entry(self, name: str) -> str | None:
        return self._entries.get(name)

    def names(self) -> Sequence[str]:
        return tuple(self._places)

    def rows(self) -> Sequence[dict[str, Any]]:
        rows = self._residency.rows()
        places = [self._places[row["name"]] for row in rows]
        return [
            row
            | {"aliases": list(place.aliases), "adapters": list(place.adapters)}
            | {"max_model_len": self._lengths.get(place.name, place.max_model_len)}
            for row, place in zip(rows, places, strict=True)
        ]

    def loaded_upstream(self, entry: str) -> Upstream | None:
        loaded = self._residency.state(entry) in (ModelState.LOADED, ModelState.CLOSING)
        return self._at[entry][1] if loaded and entry in self._at else None

    @asynccontextmanager
    async def use(self, entry: str) -> AsyncIterator[Upstream]:
        await self._wait(entry)
        # No other task ran since the model was found loaded; from here on it is in use.
        self._carry_out(self._residency.on_request_started(entry, self._clock.now()))
        try:
            yield self._at[entry][1]
        finally:
            self._carry_out(self._residency.on_request_ended(entry, self._clock.now()))

    async def load(self, entry: str) -> None:
        await self._wait(entry)
        self._leave(entry)

    async def _wait(self, entry: str) -> None:
        """Wait until the model is loaded.  Raises NoWorkers, QueueFull."""
        if self._residency.state(entry) is ModelState.LOADED:
            return
        waiting = self._waiting.total()
        if waiting >= self._limits.max_queued_loads:
            raise QueueFull(
                f"{waiting} requests wait for models to be loaded, as many as max_queued_loads allows.",
                retry_after=5,
            )
        self._waiting[entry] += 1
        try:
            async with asyncio.timeout(self._limits.load_s):
                await self._until_loaded(entry, self._failed[entry])
        except TimeoutError:
            self._leave(entry)
            raise NoWorkers(
                f"The model '{entry}' is {self._residency.state(entry).value}: "
                f"it was not loaded within load_s = {self._limits.load_s:g} s."
            ) from None
        except BaseException:
            self._leave(entry)
            raise
        finally:
            self._waiting[entry] -= 1

    def _leave(self, entry: str) -> None:
        """A request no longer waits for the model."""
        self._carry_out(self._residency.drop_request(entry, last=self._waiting[entry] <= 1))

    async def unload(self, entry: str) -> None:
        """As ``CatalogModels``.  Raises NoWorkers if the model's requests do not end in time."""
        try:
            async with asyncio.timeout(self._limits.load_s), self._changed:
                self._carry_out(self._residency.request_unload(entry))
                await self._changed.wait_for(lambda: self._residency.state(entry) is ModelState.UNLOADED)
        except TimeoutError:
            raise NoWorkers(f"The model '{entry}' still has requests to finish; it is unloaded after them.") from None

    async def _until_loaded(self, entry: str, failures: int) -> None:
        async with self._changed:
            while self._residency.state(entry) is not ModelState.LOADED:
                if self._failed[entry] > failures:
                    row = next(row for row in self._residency.rows() if row["name"] == entry)
                    raise NoWorkers(f"The model '{entry}' could not be loaded: {row['reason']}.")
                self._carry_out(self._residency.request_model(entry))
                await self._changed.wait()

    # --- the supervisor ----------------------------------------------------------------------------------------------

    def on_supervisor(self, message: SupervisorMessage) -> None:
        """Handle a message of the supervisor."""
        if isinstance(message, WorkerUp):
            host, _, port = message.endpoint.rpartition(":")
            at = Upstream(host, int(port), self._key)
            self._at[message.worker] = (message.incarnation, at)
            self._residency.on_process_running(message.worker)
            self._spawn(self._poll_until_ready(message.worker, message.incarnation, at))
        elif isinstance(message, WorkerDown) and message.state is WorkerState.DEAD:
            self._at.pop(message.worker, None)
            self._down(message.worker, message.reason)

    def _down(self, entry: str, reason: str) -> None:
        if self._residency.state(entry) is not ModelState.UNLOADING:
            log.warning("model %s: %s", entry, reason)
            self._failed[entry] += 1
        self._carry_out(self._residency.on_exited(entry, reason))
        self._spawn(self._notify())

    async def _poll_until_ready(self, entry: str, incarnation: int, at: Upstream) -> None:
        """Poll the model's gateway until it is ready or its process has ended."""
        while self._at.get(entry, (0, None))[0] == incarnation:
            try:
                async with http_client.open_request(at, "GET", "/ready") as answer:
                    ready = answer.status == 200
            except NoWorkers:
                ready = False
            if ready:
                self._lengths |= await _context_length(entry, at)
                self._carry_out(self._residency.on_loaded(entry, self._clock.now(), self._waiting[entry]))
                await self._notify()
                return
            await asyncio.sleep(ASK_S)

    # --- effects -----------------------------------------------------------------------------------------------------

    def _carry_out(self, effects: ResidencyEffects) -> None:
        for effect in effects:
            worker = WorkerId(effect.name)
            self._send(LoadModel(worker=worker) if isinstance(effect, StartModel) else UnloadModel(worker=worker))

    async def _notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()

    def _spawn(self, work: Any) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


async def _context_length(entry: str, at: Upstream) -> dict[str, int]:
    """The context of a model, as its gateway tells it; empty if it does not respond."""
    try:
        async with (
            asyncio.timeout(http_client.CONNECT_TIMEOUT_S),
            http_client.open_request(at, "GET", f"/v1/models/{entry}") as answer,
        ):
            return {entry: msgspec.json.decode(await answer.read(), type=_ContextLength).max_model_len}
    except (NoWorkers, TimeoutError, msgspec.DecodeError):
        return {}


class _ContextLength(msgspec.Struct):
    """A model's card, as far as it is read."""

    max_model_len: Annotated[int, msgspec.Meta(ge=1)]


def run_front(config: FrontConfig, io: ProcessIo) -> int:
    """Serve until drained or stopped; returns the exit code.  Runs in the forked child."""
    protect_memory()
    drop_secrets()
    sys.setswitchinterval(SWITCH_S)
    log.info("answers HTTP; event loop: %s", event_loop.event_loop_name(config.event_loop))
    return event_loop.run(_run(config, io), config.event_loop)


def _schemas(config: FrontConfig) -> Schemas:
    from penstock.processing.requests.schemas import request_schemas  # imported on demand

    return request_schemas(config.limits)


async def _run(config: FrontConfig, io: ProcessIo) -> int:
    clock = MonotonicClock()
    manager = ModelManager(config, io.channel.send, clock)
    audit = open_audit_log(config.audit_log, GATEWAY, config.audit)
    keys = load_api_keys(config.api_key, config.api_keys, config.scheduling, on_change=audit.on_key_changes)
    kept = None if config.response_store is None else SqliteResponseStore(Path(config.response_store), config.limits)
    app = make_catalog_app(
        FrontServices(
            models=manager,
            limits=config.limits,
            clock=clock,
            keys=keys,
            audit=audit.log,
            created=config.created,
            schemas=lambda: _schemas(config),
            allowed_origins=config.allowed_origins,
            allowed_hosts=config.allowed_hosts if keys.is_open else None,
            response_store=kept,
            model_alias=config.model_alias,
        )
    )
    manager.start()
    watching = asyncio.create_task(watch_api_keys(keys), name="API keys")
    try:
        await HttpServer(io, config.limits, manager.on_supervisor, config.tls).serve(app)
    finally:
        watching.cancel()
        await manager.close()
        audit.close()
    return 0
