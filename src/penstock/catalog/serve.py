"""``penstock serve --catalogue``: a front process, and a whole service for every loaded model.

::

    supervisor: one thread, no model
      |-- gateway-0          the front: HTTP, and which models are loaded
      |-- small              a supervisor as of `penstock serve small`, forked when the front requests it
      |     |-- gateway-0    on a loopback port, with a key that only the front has
      |     |-- prefill-0, decode-0
      |-- large ...

A model that cannot be loaded ends its own process only, and the front learns the reason.  Unloading ends the process
after its last request; the weights stay in the page cache as long as there is room.
"""

from __future__ import annotations

import secrets
import socket
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from msgspec import structs

from penstock.api.audit_log import check_audit_log
from penstock.catalog.config import CatalogEntry, CatalogModel, FrontConfig, load_catalog
from penstock.config.api_keys import check_key_file
from penstock.config.decoded_weights import reserved_bytes
from penstock.config.kv_memory import format_size
from penstock.config.schema import ServeConfig
from penstock.errors import ConfigError, ModelError
from penstock.launch import event_loop
from penstock.launch.channel import Channel
from penstock.launch.compose import (
    GATEWAY_MODULES,
    ParentLink,
    begin_service,
    bind_socket,
    event_key,
    heartbeat_slots,
    log_lines,
    prepare_response_store,
    publish_service,
    run_supervised,
    serve,
    service_url,
    trace_config,
    warn_short_key,
)
from penstock.launch.heartbeat import HeartbeatSlot
from penstock.launch.http_server import ProcessIo
from penstock.launch.model_path import locate_model
from penstock.launch.restart_policy import GATEWAY
from penstock.launch.run_folder import RunFolder
from penstock.launch.shared_rates import SharedTokenBuckets
from penstock.launch.supervisor import ChildSpec, Supervisor
from penstock.launch.tls import checked_tls
from penstock.processing.model_aliases import check_aliases
from penstock.telemetry.log import configure_logging
from penstock.types import WorkerId

WEIGHTS = ("*.safetensors", "*.gguf")


def serve_catalog(config: ServeConfig) -> int:
    """Run until it ends; returns the exit code.  Raises as ``launch.compose.serve``, but not for one of the models."""
    if config.gateways > 1:
        raise ConfigError("--gateways: the front of a catalogue is one process; leave it out")
    phases = begin_service(config)
    check_key_file(config.api_keys, config.scheduling.max_tenants)
    warn_short_key(config.api_key)
    trace_config(config)
    event_loop.event_loop_name(config.event_loop)
    entries = load_catalog(config)
    places = tuple(_place(entry, config.model_memory) for entry in entries)
    check_aliases(config.model_alias, [name for place in places for name in place.names])
    with ExitStack() as stack:
        listener = stack.enter_context(bind_socket(config.host, config.port))
        port = listener.getsockname()[1]
        slots = heartbeat_slots((GATEWAY, *(entry.name for entry in entries)))
        run_folder = stack.enter_context(closing(RunFolder()))
        store = FrontConfig(
            models=places,
            model_memory=config.model_memory,
            api_key=config.api_key,
            api_keys=config.api_keys,
            scheduling=config.scheduling,
            audit_log=check_audit_log(config.audit_log, config.audit),
            audit=config.audit,
            upstream_key=secrets.token_urlsafe(24),
            limits=config.limits,
            created=int(time.time()),
            event_loop=config.event_loop,
            allowed_origins=config.allowed_origin,
            allowed_hosts=config.allowed_host,
            tls=checked_tls(config),
            model_alias=config.model_alias,
            response_store=prepare_response_store(config, run_folder),
        )
        buckets = SharedTokenBuckets(config.scheduling.max_tenants)
        jobs = CatalogProcesses(
            {entry.name: entry for entry in entries}, store, listener, slots, buckets, config.log_json
        )
        supervisor = stack.enter_context(Supervisor(config.supervise, jobs, slots))
        supervisor.on_stopping(listener.close)

        def ready() -> None:
            publish_service(config, port, run_folder)
            log_lines(_lines(places, config.model_memory))
            log_lines([f"ready after {phases}: {service_url(config, port)}"])

        return run_supervised(
            supervisor, None, None, phases, ready, modules=(*GATEWAY_MODULES, "penstock.catalog.model_manager")
        )


@dataclass(frozen=True, slots=True)
class CatalogProcesses:
    """``supervisor.ChildSpecs`` of a catalog: the front is its gateway, its models are its workers."""

    entries: Mapping[str, CatalogEntry]
    store: FrontConfig
    listener: socket.socket
    slots: Mapping[str, HeartbeatSlot]
    buckets: SharedTokenBuckets  # of tenants' rates, over all models
    log_json: bool

    def gateway_spec(self, name: str, incarnation: int, channel: Channel) -> ChildSpec:
        """The front."""
        io = ProcessIo(listener=self.listener, channel=channel, slot=self.slots[GATEWAY])
        return ChildSpec(main=partial(self._front, io), inherited_fds=(self.listener.fileno(), channel.fileno()))

    def worker_spec(self, worker: WorkerId, incarnation: int, predecessor_fault: str) -> ChildSpec:
        """One model on its own port, whose listener this process closes once the child has it."""
        own = socket.create_server(("127.0.0.1", 0))
        host, port = own.getsockname()
        return ChildSpec(
            main=partial(self._model, self.entries[worker], own),
            inherited_fds=(own.fileno(), self.buckets.descriptor),
            endpoint=f"{host}:{port}",
            on_forked=own.close,
        )

    def _front(self, io: ProcessIo) -> int:
        configure_logging(GATEWAY, as_json=self.log_json)
        from penstock.catalog.model_manager import run_front

        return run_front(self.store, io)

    def _model(self, entry: CatalogEntry, listener: socket.socket) -> int:
        """The model's whole service, in the forked child."""
        settings = structs.replace(
            entry.settings,
            host="127.0.0.1",
            port=listener.getsockname()[1],
            api_key=self.store.upstream_key,
            api_keys=None,
            audit_log=None,  # the front has it
            device="cpu" if entry.settings.device == "auto" else entry.settings.device,  # "auto" would take a whole GPU
        )
        return serve(
            settings,
            ParentLink(
                name=entry.name,
                listener=listener,
                slot=self.slots[entry.name],
                event_key=event_key(self.store.api_key, self.store.api_keys, self.store.scheduling.max_tenants),
                buckets=self.buckets,
                response_store=self.store.response_store,
            ),
        )


def _place(entry: CatalogEntry, budget: int | None) -> CatalogModel:
    """The front's view of an entry.  A missing model fails its requests, not the start."""
    own = entry.settings
    try:
        weights = _weight_bytes(locate_model(entry.path).path)
    except (ConfigError, ModelError):
        weights = 0
    copies = reserved_bytes(own)
    nbytes = weights + copies + (own.kv_memory or 0) * entry.workers
    if budget is not None and nbytes > budget:
        raise ConfigError(
            f"model {entry.name} needs {format_size(nbytes)} ({format_size(weights + copies)} of weights and "
            f"{entry.workers} times {format_size(own.kv_memory or 0)} of KV pages), more than --model-memory "
            f"{format_size(budget)}: give it a smaller kv_memory, or all of them more"
        )
    adapters = tuple(text.partition("=")[0] for text in own.lora)
    return CatalogModel(
        name=entry.name,
        aliases=entry.aliases,
        adapters=adapters,
        nbytes=nbytes,
        pinned=entry.pinned,
        max_model_len=own.max_model_len,
    )


def _weight_bytes(path: Path) -> int:
    files = [path] if path.is_file() else [file for pattern in WEIGHTS for file in path.glob(pattern)]
    return sum(file.stat().st_size for file in files)


def _lines(places: Sequence[CatalogModel], budget: int | None) -> list[str]:
    room = "as much memory as there is" if budget is None else f"{format_size(budget)} of memory"
    lines = [f"{len(places)} models share {room}"]
    for place in places:
        kind = "pinned" if place.pinned else "on demand"
        also = f", also {', '.join((*place.aliases, *place.adapters))}" if place.names[1:] else ""
        lines.append(f"model {place.name}: {format_size(place.nbytes)}, {kind}{also}")
    return lines
