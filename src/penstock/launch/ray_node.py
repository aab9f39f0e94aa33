"""The actor that ``penstock ray up`` starts on each Ray node: it runs ``penstock node`` as its child.

::

    Ray's GCS --- restarts ---> actor --- starts again ---> penstock node --- forks ---> workers, gateways
                                  ^                               |
                                  '------- ready (sd_notify) -----'

A node ends with its actor, so an actor that Ray restarts finds no rival at its ports.  The actor knows nothing of
requests, and only the fleet file's text and reports travel over Ray.  Of this module only ``FleetNodeActor`` needs Ray.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import re
import secrets
import selectors
import signal
import socket
import subprocess
import threading
import time
import tomllib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, BinaryIO, Literal, NamedTuple, TypeAlias

import msgspec

from penstock import sidecar
from penstock.config.fleet_file import FleetFile, FleetNode, check_fleet_file
from penstock.config.limits import SuperviseConfig
from penstock.config.load import load_node
from penstock.errors import ConfigError
from penstock.launch.members.interface import Member
from penstock.launch.service_notify import NOTIFY_SOCKET, READY

log = logging.getLogger(__name__)

NodeState: TypeAlias = Literal["starting", "ready", "waiting", "draining", "stopped"]
"""Of the child; ``waiting``: it has ended and is started again after a pause."""

MAX_LOG_BYTES = 64 << 20
"""Of a node's log file; a longer one is put aside when the node is started the next time."""
REASON_CHARS = 500
DRAIN_LOOK_S = 1.0
"""Between two looks whether the Ray node is being drained."""

Text = Annotated[str, msgspec.Meta(max_length=4096)]


class NodeOrder(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What an actor is made with."""

    fleet: Text  # its name
    node: Text
    text: Annotated[str, msgspec.Meta(max_length=1 << 20)]  # of the fleet file
    digest: Text  # of what this node must be restarted for

    def parsed(self) -> tuple[FleetFile, FleetNode]:
        """Raises ConfigError, msgspec.ValidationError, tomllib.TOMLDecodeError."""
        fleet = check_fleet_file(msgspec.convert(tomllib.loads(self.text), FleetFile))
        return fleet, fleet.node(self.node)


class NodeReport(msgspec.Struct, frozen=True, kw_only=True):
    """What an actor knows of its node."""

    node: Text
    digest: Text
    state: NodeState
    pid: Annotated[int, msgspec.Meta(ge=0)] = 0  # of the node's supervisor; 0: it does not run
    actor_pid: Annotated[int, msgspec.Meta(ge=0)] = 0
    ray_node: Text = ""  # its id
    ray_address: Text = ""
    restarts: Annotated[int, msgspec.Meta(ge=0)] = 0  # of the child, by this actor
    reason: Text = ""  # why it ended the last time, or is being drained
    ready_after_s: Annotated[float, msgspec.Meta(ge=0)] | None = None
    log: Text = ""  # file on its host
    members: Annotated[tuple[Member, ...], msgspec.Meta(max_length=4096)] = ()  # its workers
    gateways: Annotated[tuple[Member, ...], msgspec.Meta(max_length=1)] = ()  # its port of HTTP


def node_digest(fleet: FleetFile, node: FleetNode) -> str:
    """A hash of all of the file that this node reads: a change of anything else needs no restart."""
    others = fleet.endpoints(but=node.name) if node.gateways else ()
    split = sorted({group.role.value for group in fleet.groups}) if node.gateways else ()
    parts = (fleet.model, fleet.keys, fleet.settings, node, others, split)
    return hashlib.sha256(msgspec.json.encode(parts, order="deterministic")).hexdigest()[:16]


def node_members(node: FleetNode) -> tuple[Member, ...]:
    """Its workers, as gateways elsewhere may find them."""
    return tuple(
        Member(name=name, endpoint=node.endpoint(port), labels={"node": node.name}) for name, _, port in node.members()
    )


def node_gateways(node: FleetNode, port: int) -> tuple[Member, ...]:
    """The port that all its gateways share, as an endpoint picker may find it; empty if it has none."""
    if not node.gateways:
        return ()
    return (Member(name=f"{node.name}-gateway", endpoint=node.endpoint(port), labels={"node": node.name}),)


class NodeProcess:
    """A child process that is started again whenever it ends, with a growing pause, until it is drained.

    It tells by sd_notify that it is ready.  One thread starts and watches it and lives as long as this process, so that
    the child may ask the kernel to end with it.  Thread-safe.
    """

    def __init__(
        self, command: Sequence[str], environ: Mapping[str, str], log_file: Path, limits: SuperviseConfig
    ) -> None:
        self.log_file = log_file
        self._command = list(command)
        self._limits = limits
        self._notified = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK)
        name = f"penstock-node-{secrets.token_hex(8)}"
        self._notified.bind(f"\0{name}")
        self._environ = {**environ, NOTIFY_SOCKET: f"@{name}"}
        self._lock = threading.Lock()  # of what follows
        self._state: NodeState = "starting"
        self._process: subprocess.Popen[bytes] | None = None
        self._restarts, self._reason = 0, ""
        self._ready_after_s: float | None = None
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="penstock node", daemon=True)

    def start(self) -> None:
        """Start it, and return at once."""
        self._thread.start()

    def report(
        self, order: NodeOrder, members: tuple[Member, ...] = (), gateways: tuple[Member, ...] = ()
    ) -> NodeReport:
        """How it is now."""
        with self._lock:
            return NodeReport(
                node=order.node,
                digest=order.digest,
                state=self._state,
                pid=0 if self._process is None else self._process.pid,
                actor_pid=os.getpid(),
                restarts=self._restarts,
                reason=self._reason,
                ready_after_s=self._ready_after_s,
                log=str(self.log_file),
                members=members,
                gateways=gateways,
            )

    def begin_drain(self, reason: str) -> None:
        """Let it finish or move its requests and end; it is not started again.  Idempotent."""
        with self._lock:
            if self._stopping.is_set():
                return
            self._stopping.set()
            self._reason = reason
            if self._process is not None:
                self._state = "draining"
                self._process.send_signal(signal.SIGTERM)

    def wait_drained(self) -> None:
        """Until it has ended; it is killed where it does not end within its own limits."""
        self._thread.join(self._limits.drain_s + self._limits.grace_s + DRAIN_LOOK_S)
        with self._lock:
            if self._process is not None:
                self._process.kill()
        self._thread.join()

    def _run(self) -> None:
        pause_s = self._limits.backoff_first_s
        while not self._stopping.is_set():
            try:
                was_ready_s = self._run_once()
            except OSError as error:
                self._ended(f"cannot be started: {error}")
                was_ready_s = 0.0
            if was_ready_s >= self._limits.stable_s:
                pause_s = self._limits.backoff_first_s
            if self._stopping.wait(pause_s):
                break
            pause_s = min(2 * pause_s, self._limits.backoff_max_s)
            with self._lock:
                self._restarts += 1
        with self._lock:
            self._state = "stopped"
        self._notified.close()

    def _run_once(self) -> float:
        """Run it until it ends; returns for how long it was ready.  Raises OSError."""
        self._drop_notifications()
        began = time.monotonic()
        with _opened_log(self.log_file) as output, self._lock:
            if self._stopping.is_set():
                return 0.0
            process = self._process = subprocess.Popen(
                self._command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=self._environ,
                start_new_session=True,
            )
            begin_bytes = output.tell()
            self._state, self._ready_after_s = "starting", None
        ready_since = self._watch(process, began)
        code = process.wait()
        self._ended(_why_ended(code, self.log_file, begin_bytes))
        return 0.0 if ready_since is None else time.monotonic() - ready_since

    def _watch(self, process: subprocess.Popen[bytes], began: float) -> float | None:
        """Until it ends; returns since when it was ready, by the monotonic clock."""
        ready_since = None
        descriptor = os.pidfd_open(process.pid)
        try:
            with selectors.DefaultSelector() as selector:
                selector.register(descriptor, selectors.EVENT_READ)
                selector.register(self._notified, selectors.EVENT_READ)
                while True:
                    found = {key.fileobj for key, _ in selector.select()}
                    if self._notified in found and READY in self._drop_notifications() and ready_since is None:
                        ready_since = time.monotonic()
                        with self._lock:
                            self._ready_after_s = ready_since - began
                            if self._state == "starting":
                                self._state = "ready"
                    if descriptor in found:
                        return ready_since
        finally:
            os.close(descriptor)

    def _ended(self, reason: str) -> None:
        with self._lock:
            self._process = None
            if not self._stopping.is_set():
                self._state, self._reason = "waiting", reason
                log.warning("the node ended: %s", reason)

    def _drop_notifications(self) -> list[str]:
        """All lines of those that have arrived."""
        lines: list[str] = []
        with contextlib.suppress(BlockingIOError):
            while True:
                lines += self._notified.recv(4096).decode(errors="replace").splitlines()
        return lines


def _opened_log(path: Path) -> BinaryIO:
    """To append to; a long one is put aside."""
    with contextlib.suppress(OSError):
        if path.stat().st_size > MAX_LOG_BYTES:
            path.replace(path.with_suffix(".log.1"))
    return path.open("ab")


def _why_ended(code: int, log_file: Path, begin_bytes: int) -> str:
    """The exit code or signal, and the last line that it wrote."""
    how = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
    lines: list[str] = []
    with contextlib.suppress(OSError), log_file.open("rb") as file:
        end = file.seek(0, os.SEEK_END)
        file.seek(max(begin_bytes, end - 8192))
        lines = file.read().decode(errors="replace").strip().splitlines()
    return f"{how}: {lines[-1]}"[:REASON_CHARS] if lines else how


def child_environ(environ: Mapping[str, str]) -> dict[str, str]:
    """The actor's environment without what Ray sets for work in its own process."""
    found = {name: value for name, value in environ.items() if name != "OMP_NUM_THREADS"}
    if not found.get("CUDA_VISIBLE_DEVICES", "unset"):  # Ray hides all GPUs from actors that reserve none
        del found["CUDA_VISIBLE_DEVICES"]
    root = str(Path(sidecar.__file__).parent.parent)  # the node runs this same package
    found["PYTHONPATH"] = os.pathsep.join(filter(None, (root, found.get("PYTHONPATH"))))
    return found


class StartedNode(NamedTuple):
    """A node's process, and where its workers and gateways are reached."""

    process: NodeProcess
    members: tuple[Member, ...]
    gateways: tuple[Member, ...]


def started_node(order: NodeOrder, folder: Path) -> StartedNode:
    """``penstock node`` of an order, started; its file and its log are in ``folder``.

    Raises ConfigError, msgspec.ValidationError, OSError.
    """
    fleet, node = order.parsed()
    stem = f"penstock-{re.sub('[^A-Za-z0-9.]+', '-', fleet.name)}-{node.name}"
    file = folder / f"{stem}.toml"
    config = load_node(fleet, node, str(file))
    file.unlink(missing_ok=True)
    with os.fdopen(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as output:
        output.write(order.text)
    words = ("node", str(file), "--name", node.name, "--end-with-parent", str(os.getpid()))
    process = NodeProcess(
        sidecar.python_command("penstock", *words), child_environ(os.environ), folder / f"{stem}.log", config.supervise
    )
    process.start()
    return StartedNode(process, node_members(node), node_gateways(node, config.port))


class FleetNodeActor:
    """The class of the actors.  Methods return ``NodeReport`` as JSON, and may be called at the same time."""

    def __init__(self, order: bytes) -> None:
        """``order``: a ``NodeOrder`` as JSON.  An error is reported, not raised: Ray would try again at once."""
        import ray
        from ray._private import worker

        self._order = msgspec.json.decode(order, type=NodeOrder)
        self._ray_node = ray.get_runtime_context().get_node_id()
        self._ray_address = ray.util.get_node_ip_address()
        self._node: StartedNode | None = None
        self._error = ""
        try:
            folder = Path(worker._global_node.get_logs_dir_path())
            self._node = started_node(self._order, folder)
        except (ConfigError, msgspec.ValidationError, tomllib.TOMLDecodeError, OSError) as error:
            self._error = str(error)[:REASON_CHARS]
        else:
            watch = threading.Thread(target=_drain_with_ray_node, args=(self._ray_node, self._node.process.begin_drain))
            watch.daemon = True
            watch.start()

    def report(self) -> bytes:
        """How the node is now."""
        if self._node is None:
            found = NodeReport(
                node=self._order.node,
                digest=self._order.digest,
                state="stopped",
                actor_pid=os.getpid(),
                reason=self._error,
            )
        else:
            found = self._node.process.report(self._order, self._node.members, self._node.gateways)
        return msgspec.json.encode(
            msgspec.structs.replace(found, ray_node=self._ray_node, ray_address=self._ray_address)
        )

    def drain(self) -> bytes:
        """Drain the node, and report when it has ended."""
        if self._node is not None:
            self._node.process.begin_drain("drained by `penstock ray`")
            self._node.process.wait_drained()
        return self.report()


def _drain_with_ray_node(ray_node: str, begin_drain: Callable[[str], None]) -> None:
    """In a thread of its own: a call to a GCS that is away may block for long, and hurts nothing."""
    from ray._private.state import state

    while True:
        time.sleep(DRAIN_LOOK_S)
        try:
            drained = ray_node in state.get_draining_nodes()
        except Exception as error:  # noqa: BLE001 - whatever Ray raises, the next look may succeed
            log.debug("cannot ask which Ray nodes are being drained: %s", error)
            continue
        if drained:
            begin_drain("its Ray node is being drained")
            return
