"""The one composition root: from settings to running processes.

::

    this process (supervisor, zygote)      binds the port, makes keys, KV memory and the board, loads the weights
      |-- gateway-0                        forked first: it starts while the weights load
      |-- prefill-0, decode-0, ...         forked when the weights are there, and again whenever one ends

What is made here is handed down over fork and has no name outside: descriptors, anonymous memory, keys.
"""

from __future__ import annotations

import errno
import logging
import resource
import secrets
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from penstock.clock import MonotonicClock
from penstock.config.resolve import MachineFacts, ModelFacts, ServePlan, WorkerPlan, resolve
from penstock.config.schema import GatewayConfig, ServeConfig, WorkerConfig
from penstock.edge.app import Behind, make_app
from penstock.edge.auth import KeyRing
from penstock.engine.models.port import Model
from penstock.engine.models.registry import build_model
from penstock.errors import ConfigError
from penstock.intake.service import ModelIntake
from penstock.kernels.ops import Ops
from penstock.kernels.select import REFERENCE, available_families, make_ops
from penstock.kv.layout import KvLayout
from penstock.kv.memory import KvFile
from penstock.launch.announce import fleet_lines, model_lines, talk_lines
from penstock.launch.board import Board, Slot
from penstock.launch.channel import Channel
from penstock.launch.facts import machine_facts
from penstock.launch.gateway import BACKLOG, App, GatewayInheritance, run_gateway
from penstock.launch.locate import Located, locate
from penstock.launch.restart import GATEWAY
from penstock.launch.supervise import Job, Stopped, Supervisor
from penstock.launch.worker import Inheritance, run_worker
from penstock.launch.zygote import prefer_for_oom_kill
from penstock.router.service import RouterService
from penstock.telemetry.log import configure
from penstock.telemetry.registry import Metrics
from penstock.types import ModelIdentity, WorkerId
from penstock.weights.checkpoint import compute_dtype_for, inspect_model
from penstock.weights.load import LoadedModel, load_model
from penstock.weights.spec import ModelSpec
from penstock.wire.keys import Keys

log = logging.getLogger(__name__)

PROGRESS_EVERY_S = 2.0
"""Loading tells how far it is so often."""


def serve(config: ServeConfig) -> int:
    """``penstock serve`` from start to end; returns the exit code.

    Raises ConfigError, ModelError or KernelError before any process starts, GaveUp when one cannot be kept running.
    """
    configure("supervisor", as_json=config.log_json)
    started = time.monotonic()
    located = locate(config.model)
    spec = inspect_model(located.path)
    name = config.served_model_name or located.name
    plan = decide(config, name, spec)
    _raise_descriptor_limit()
    with ExitStack() as stack:
        listener = stack.enter_context(listening(config.host, config.port))
        service = _Service(config, plan, located, spec, listener)
        stack.callback(service.close)
        _say(model_lines(located, name, spec, plan))
        with Supervisor(config.supervise, service, service.slots) as supervisor:
            supervisor.when_stopping(listener.close)
            return _watch(service, supervisor, started)


def _watch(service: _Service, supervisor: Supervisor, started: float) -> int:
    try:
        supervisor.start()
        service.load(supervisor.keep_watch)

        def ready() -> None:
            plan = service.plan
            _say(fleet_lines(plan, {w.worker: supervisor.pid(w.worker) for w in plan.workers}))
            seconds = time.monotonic() - started
            _say(talk_lines(service.url, needs_key=service.config.api_key is not None, seconds=seconds))

        code = supervisor.run({worker.worker: worker.role for worker in service.plan.workers}, ready)
    except Stopped:
        code = 0
    log.info("stopped")
    return code


def _say(lines: Iterator[str]) -> None:
    for line in lines:
        log.info("%s", line)


# --- what is decided before anything starts --------------------------------------------------------------------------


def decide(config: ServeConfig, name: str, spec: ModelSpec) -> ServePlan:
    """What would run on this machine.  Raises ConfigError, KernelError."""
    return resolve(config, _machine(config), _model_facts(name, spec))


def _machine(config: ServeConfig) -> MachineFacts:
    return machine_facts(available_families() if config.device == "cpu" else (REFERENCE,))


def _model_facts(name: str, spec: ModelSpec) -> ModelFacts:
    return ModelFacts(
        name=name,
        max_positions=spec.max_positions,
        parameters=spec.parameters,
        auto_dtype=compute_dtype_for(spec, "auto"),
        page_bytes_bf16=_layout(spec, "bf16").page_bytes,
    )


def _layout(spec: ModelSpec, dtype: str) -> KvLayout:
    return KvLayout.full(layers=spec.layers, kv_heads=spec.kv_heads, head_dim=spec.head_dim, dtype=dtype)


def _raise_descriptor_limit() -> None:
    """As many connections as the system allows this process."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


@contextmanager
def listening(host: str, port: int) -> Iterator[socket.socket]:
    """A bound, listening socket.  Raises ConfigError when the port is taken or the address is not ours."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except socket.gaierror as error:
        raise ConfigError(f"--host {host}: {error.strerror}") from None
    with socket.socket(family, kind, protocol) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(address)
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise ConfigError(
                    f"port {port} on {host} is taken: stop what listens there, or try --port {port + 1}"
                ) from None
            raise ConfigError(f"cannot listen on {host} port {port}: {error.strerror}") from None
        listener.listen(BACKLOG)
        yield listener


def make_http_app(config: GatewayConfig, router: RouterService, metrics: Metrics, *, created: int) -> App:
    """Everything in front of the router; made in the gateway's process.  Raises ModelError."""
    intake = ModelIntake(
        Path(config.model_path),
        name=config.model_name,
        max_model_len=config.max_model_len,
        limits=config.limits,
        created=created,
    )
    return make_app(
        Behind(
            streams=router,
            intake=intake,
            limits=config.limits,
            clock=MonotonicClock(),
            metrics=metrics.exposition,
            keys=KeyRing.of([config.api_key] if config.api_key else []),
        )
    )


def _reachable(host: str) -> str:
    """The host as it stands in a URL; a wildcard address is reached over the loopback."""
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)  # noqa: S104 - nothing is bound here
    return f"[{host}]" if ":" in host else host


# --- what the children do --------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Loaded:
    model: Model
    identity: ModelIdentity


class _Service:
    """Everything that children inherit, and how each of them begins (``supervise.Jobs``)."""

    def __init__(
        self, config: ServeConfig, plan: ServePlan, located: Located, spec: ModelSpec, listener: socket.socket
    ) -> None:
        self.config = config
        self.plan = plan
        self._located = located
        self._spec = spec
        self._listener = listener
        self._created = int(time.time())
        self._run = secrets.token_hex(6)  # in mailbox names: no two runs on one host meet
        self._keys = Keys.ephemeral()
        self._layout = _layout(spec, plan.dtype)
        self._places = {worker.worker: worker for worker in plan.workers}
        self._kv = {worker: KvFile.create(self._layout, plan.scheduler.pages, label=worker) for worker in self._places}
        names = (GATEWAY, *self._places)
        self.slots: dict[str, Slot] = dict(zip(names, Board(len(names)).slots, strict=True))
        self._loaded: _Loaded | None = None
        self.url = f"http://{_reachable(config.host)}:{listener.getsockname()[1]}"

    def close(self) -> None:
        """Give the KV memory back."""
        for file in self._kv.values():
            file.close()

    def load(self, keep_watch: Callable[[], None]) -> None:
        """Load the weights that all workers share; ``keep_watch`` is called after each weight.

        Not for a GPU, whose workers load for themselves: a process that has touched it must not fork.
        """
        if self.config.device == "cpu":
            ops = self._ops(threads=1)
            self._loaded = self._load(ops, _LoadLog(keep_watch))

    def _load(self, ops: Ops, progress: Callable[[int, int], None]) -> _Loaded:
        begun = time.monotonic()
        loaded: LoadedModel = load_model(self._located.path, self._spec, ops, progress)
        model = build_model(loaded, ops, self.plan.scheduler.max_model_len)
        log.info("weights loaded in %.2f s: %.1f MiB", time.monotonic() - begun, loaded.nbytes / 2**20)
        return _Loaded(model, ModelIdentity(fingerprint=loaded.fingerprint, numerics=ops.numerics))

    def _ops(self, threads: int) -> Ops:
        family = self.plan.family if self.config.device == "cpu" else None
        return make_ops(family=family, compute_dtype=self.plan.dtype, device=self.config.device, threads=threads)

    def gateway(self, incarnation: int, channel: Channel) -> Job:
        config = GatewayConfig(
            name=GATEWAY,
            incarnation=incarnation,
            host=self.config.host,
            port=self._listener.getsockname()[1],
            model_path=str(self._located.path),
            model_name=self.config.served_model_name or self._located.name,
            max_model_len=self.plan.scheduler.max_model_len,
            split=self.plan.split,
            api_key=self.config.api_key,
            limits=self.config.limits,
            failover=self.config.failover,
        )
        inherited = GatewayInheritance(
            listener=self._listener,
            channel=channel,
            keys=self._keys,
            slot=self.slots[GATEWAY],
            make_app=partial(make_http_app, created=self._created),
        )

        def body() -> int:
            self._become(GATEWAY)
            return run_gateway(config, inherited)

        return Job(body=body, keep=(self._listener.fileno(), channel.fileno()))

    def worker(self, worker: WorkerId, incarnation: int) -> Job:
        place = self._places[worker]
        config = WorkerConfig(
            worker=worker,
            incarnation=incarnation,
            role=place.role,
            endpoint=f"ipc://@penstock-{self._run}-{worker}-{incarnation}",
            carrier=self.plan.carrier,
            scheduler=self.plan.scheduler,
            hand_over=self.config.hand_over,
            threads=place.threads,
            cpus=place.cpus,
        )
        return Job(
            body=lambda: self._run_worker(config, place),
            keep=tuple(file.descriptor for file in self._kv.values()),
            endpoint=config.endpoint,
        )

    def _run_worker(self, config: WorkerConfig, place: WorkerPlan) -> int:
        self._become(config.worker)
        prefer_for_oom_kill()
        ops = self._ops(place.threads)
        loaded = self._loaded or self._load(ops, lambda done, total: None)
        inherited = Inheritance(
            model=loaded.model,
            ops=ops,
            identity=loaded.identity,
            parameters=self._spec.parameters,
            kv=self._kv[config.worker],
            peers={worker: file for worker, file in self._kv.items() if worker != config.worker},
            keys=self._keys,
            slot=self.slots[config.worker],
            pages_on_device=self.config.device != "cpu",
        )
        return run_worker(config, inherited)

    def _become(self, name: str) -> None:
        configure(name, as_json=self.config.log_json)


class _LoadLog:
    """Called after each weight: lets the supervisor look around, and tells how far a long loading is."""

    def __init__(self, keep_watch: Callable[[], None]) -> None:
        self._keep_watch = keep_watch
        self._next = time.monotonic() + PROGRESS_EVERY_S

    def __call__(self, done: int, total: int) -> None:
        self._keep_watch()
        if time.monotonic() >= self._next and done < total:
            self._next += PROGRESS_EVERY_S
            log.info("loading weights: %d %%", 100 * done // total)
