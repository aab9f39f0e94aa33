"""The actor that ``penstock ray up`` starts on each Ray node: it runs ``penstock node`` as its child.

::

    Ray's GCS --- restarts ---> actor --- starts again ---> penstock node --- forks ---> workers, gateways
                                  ^                               |
                                  '------- ready (sd_notify) -----'

A node goes on when its actor ends, and the actor with which Ray replaces it takes it over (``node_lease``).  The actor
knows nothing of requests, and only the fleet file's text and reports travel over Ray.  Of this module only
``FleetNodeActor`` needs Ray.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import re
import selectors
import signal
import socket
import struct
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
from penstock.launch.members.file import node_gateways, node_members
from penstock.launch.members.interface import Member
from penstock.launch.node_lease import LeaseHolder, LeaseRecord, running_pid, start_ticks
from penstock.launch.service_notify import NOTIFY_SOCKET, READY

log = logging.getLogger(__name__)

NodeState: TypeAlias = Literal["starting", "ready", "waiting", "draining", "stopped"]
"""Of the child; ``waiting``: it has ended and is started again after a pause."""

PIN = 0.001
"""Of the resource ``node:ADDRESS``, which each Ray node has, 1 of it, and keeps when it comes back."""

MAX_LOG_BYTES = 64 << 20
"""Of a node's log file; a longer one is put aside when the node is started the next time."""
REASON_CHARS = 500
MAX_WATCH_S = 60.0
"""For a change of the node's state that somebody waits for."""
DRAIN_LOOK_S = 1.0
"""Between two looks whether the Ray node is being drained."""
START_AGAIN_S = 1.0
"""Before a node that its host did not let start is started again."""
RECORD_AGAIN_S = 1.0
"""Before a lease that could not be written is written again."""

_CREDENTIALS = struct.Struct("3i")  # process, user and group of a datagram's sender (unix(7))

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
    text: Text = ""  # hash of the fleet file's text that its gateways follow
    members: Annotated[tuple[Member, ...], msgspec.Meta(max_length=4096)] = ()  # its workers
    gateways: Annotated[tuple[Member, ...], msgspec.Meta(max_length=1)] = ()  # its port of HTTP
    only_follows: bool | None = None  # ``FleetFile.only_follows``; None: it does not say, as below
    stops_within_s: Annotated[float, msgspec.Meta(ge=0)] | None = None  # when it is drained


def node_digest(fleet: FleetFile, node: FleetNode) -> str:
    """A hash of all of the file that this node reads: a change of anything else needs no restart."""
    split = sorted({group.role.value for group in fleet.all_workers}) if node.gateways else ()
    led = [group for group in fleet.groups if node.name in group.nodes]
    masters = [worker.master() for worker in fleet.parts(node)]
    together = [other.name for other in fleet.joined_nodes(node)]  # placed at once
    parts = (fleet.model, fleet.keys, fleet.settings, node, split, led, masters, together)
    return hashlib.sha256(msgspec.json.encode(parts, order="deterministic")).hexdigest()[:16]


class _Child:
    """A process that is watched: one of ours, or one that the actor before this one had started."""

    def __init__(self, pid: int, own: subprocess.Popen[bytes] | None = None) -> None:
        """Raises OSError if there is no such process."""
        self.pid = pid
        self.descriptor = os.pidfd_open(pid)
        self._own = own

    def send_signal(self, signum: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self.descriptor, signum)

    def kill(self) -> None:
        """It has ended on return."""
        self.send_signal(signal.SIGKILL)
        self.wait()

    def wait(self) -> int | None:
        """Wait for its end; the exit code, negative for a signal, or None for one that is not ours."""
        with selectors.PollSelector() as selector:  # which needs no descriptor of its own
            selector.register(self.descriptor, selectors.EVENT_READ)
            selector.select()
        return None if self._own is None else self._own.wait()

    def close(self) -> None:
        os.close(self.descriptor)


class NodeProcess:
    """A child process that is started again whenever it ends, with a growing pause, until it is drained.

    It tells by sd_notify that it is ready, with a lease repeatedly.  One thread starts and watches it.  Thread-safe.
    """

    def __init__(
        self,
        command: Sequence[str],
        environ: Mapping[str, str],
        log_file: Path,
        limits: SuperviseConfig,
        *,
        lease: LeaseHolder | None = None,
        digest: str = "",
    ) -> None:
        """``lease``: by which the process is handed on when this one ends; ``digest``: of what it is started with, for
        one that was started with anything else is ended.  Raises OSError."""
        self.log_file = log_file
        self._command = list(command)
        self._limits = limits
        self._lease = lease
        self._unwritten: LeaseRecord | None = None  # in the lease
        self._digest = digest
        self._notified = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK)
        # The same for the process that comes next, to which a child says that it is ready.
        self._notified.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        name = f"penstock-node-{hashlib.sha256(str(log_file).encode()).hexdigest()[:32]}"
        self._notified.bind(f"\0{name}")
        self._environ = {**environ, NOTIFY_SOCKET: f"@{name}"}
        self._lock = threading.Condition()  # of what follows; notified when the state changes
        self._state: NodeState = "starting"
        self._process: _Child | None = None
        self._left_pid = 0  # of a node of the process before this one that is left to its lease
        self._restarts, self._reason = 0, ""
        self._ready_after_s: float | None = None
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="penstock node", daemon=True)

    def start(self) -> None:
        """Start it, and return at once.  Raises RuntimeError where there is no thread for it."""
        try:
            self._thread.start()
        except RuntimeError:
            self._notified.close()  # its name is free again
            raise

    def report(self, order: NodeOrder) -> NodeReport:
        """How it is now."""
        with self._lock:
            return NodeReport(
                node=order.node,
                digest=order.digest,
                state=self._state,
                pid=self._left_pid if self._process is None else self._process.pid,
                actor_pid=os.getpid(),
                restarts=self._restarts,
                reason=self._reason,
                ready_after_s=self._ready_after_s,
                log=str(self.log_file),
            )

    @property
    def state(self) -> NodeState:
        """The state of the child."""
        with self._lock:
            return self._state

    def wait_for_change(self, seen: str, timeout_s: float) -> None:
        """Until its state is another one than ``seen``, at most so long."""
        with self._lock:
            self._lock.wait_for(lambda: self._state != seen, timeout_s)

    def begin_drain(self, reason: str) -> None:
        """Let it finish or move its requests and end; it is not started again.  Idempotent."""
        with self._lock:
            if self._stopping.is_set():
                return
            self._stopping.set()
            self._reason = reason
            if self._process is not None:
                self._drain(self._process)

    def _drain(self, child: _Child) -> None:
        """With the lock, once: a second signal would end it at once."""
        self._enter("draining")
        child.send_signal(signal.SIGTERM)

    def wait_drained(self) -> None:
        """Until it has ended; it is killed where it does not end within its own limits."""
        self._thread.join(self._limits.stops_within_s + DRAIN_LOOK_S)
        with self._lock:
            if self._process is not None:
                self._process.send_signal(signal.SIGKILL)
        self._thread.join()

    def _run(self) -> None:
        try:
            self._run_until_drained()
        finally:
            with self._lock:
                self._enter("stopped")
            self._notified.close()
            if self._lease is not None:
                self._lease.close()

    def _run_until_drained(self) -> None:
        pause_s, has_run = self._limits.backoff_first_s, False
        while True:
            try:
                was_ready_s = self._run_once(None if has_run else self._taken_over())
                has_run = True
            except Exception as error:  # nothing runs that this process has started
                if not isinstance(error, OSError):
                    log.exception("the node cannot be watched")
                self._ended(f"cannot be started: {error}")
                was_ready_s = 0.0
            if was_ready_s >= self._limits.stable_s:
                pause_s = self._limits.backoff_first_s
            if self._stopping.wait(pause_s):
                break
            pause_s = min(2 * pause_s, self._limits.backoff_max_s)
            with self._lock:
                self._restarts += 1
        if not has_run:
            self._drain_found()

    def _drain_found(self) -> None:
        """The node that the process before this one had started, and that could not be watched.  Tried once."""
        try:
            self._run_once(self._taken_over())
        except OSError as error:
            log.warning("a node is left to its lease: %s", error)
            record = None if self._lease is None else self._lease.read()
            with self._lock:
                self._left_pid = 0 if record is None else record.pid

    def _enter(self, state: NodeState) -> None:
        """With the lock."""
        self._state = state
        self._lock.notify_all()

    def _taken_over(self) -> LeaseRecord | None:
        """What the process before this one had started, if it still runs and may go on; it is ended if it may not.

        Raises OSError.
        """
        record = None if self._lease is None else self._lease.read()
        if record is None or record.started < 0 or start_ticks(record.pid) != record.started:
            return None
        if record.digest == self._digest:
            return record
        with contextlib.suppress(ProcessLookupError), contextlib.closing(_Child(record.pid)) as other:
            other.kill()
        return None

    def _run_once(self, found: LeaseRecord | None) -> float:
        """Run it until it ends; returns for how long it was ready.  ``found``: it runs already.  Raises OSError."""
        began, ready_after_s = time.monotonic(), None if found is None else found.ready_after_s
        if found is None:
            self._drop_notifications()
        with _opened_log(self.log_file) as output, self._lock:
            if self._stopping.is_set() and found is None:
                return 0.0
            child = self._process = self._started(output) if found is None else _Child(found.pid)
            begin_bytes = output.tell()
            self._ready_after_s = ready_after_s
            self._enter("starting" if ready_after_s is None else "ready")
            if self._stopping.is_set():  # before it was known
                self._drain(child)
        with contextlib.closing(child):
            try:
                self._record(child.pid, ready_after_s)
                ready_since = self._watch(child, began, None if ready_after_s is None else began)
            except BaseException:
                child.kill()  # it would run on unwatched
                with self._lock:
                    self._process = None
                raise
            code = child.wait()
            self._ended(_why_ended(code, self.log_file, begin_bytes))
        return 0.0 if ready_since is None else time.monotonic() - ready_since

    def _started(self, output: BinaryIO) -> _Child:
        own = subprocess.Popen(
            self._command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=self._environ,
            start_new_session=True,
        )
        try:
            return _Child(own.pid, own)
        except OSError:  # it would run on unwatched
            own.kill()
            own.wait()
            raise

    def _record(self, pid: int, ready_after_s: float | None) -> None:
        """For the process that comes after this one.  The node goes on where it cannot be written."""
        if self._lease is None:
            return
        record = LeaseRecord(pid=pid, started=start_ticks(pid), digest=self._digest, ready_after_s=ready_after_s)
        try:
            self._lease.write(record)
            self._unwritten = None
        except OSError as error:
            if self._unwritten is None:
                log.warning("the lease is not written, so no other actor can take the node over: %s", error)
            self._unwritten = record

    def _watch(self, child: _Child, began: float, ready_since: float | None) -> float | None:
        """Until it ends; returns since when it was ready, by the monotonic clock."""
        with selectors.PollSelector() as selector:
            selector.register(child.descriptor, selectors.EVENT_READ)
            selector.register(self._notified, selectors.EVENT_READ)
            while True:
                found = {key.fileobj for key, _ in selector.select(None if self._unwritten is None else RECORD_AGAIN_S)}
                if self._unwritten is not None:
                    self._record(child.pid, self._unwritten.ready_after_s)
                heard = self._drop_notifications() if self._notified in found else set()
                if (child.pid, READY) in heard and ready_since is None:  # not by a node that is left to its lease
                    ready_since = time.monotonic()
                    self._record(child.pid, ready_since - began)
                    with self._lock:
                        self._ready_after_s = ready_since - began
                        if self._state == "starting":
                            self._enter("ready")
                if child.descriptor in found:
                    return ready_since

    def _ended(self, reason: str) -> None:
        with self._lock:
            self._process = None
            if not self._stopping.is_set():
                self._reason = reason
                self._enter("waiting")
                log.warning("the node ended: %s", reason)

    def _drop_notifications(self) -> set[tuple[int, str]]:
        """All lines of those that have arrived, each with the process that sent it."""
        found: set[tuple[int, str]] = set()
        with contextlib.suppress(BlockingIOError):
            while True:
                raw, attached, _, _ = self._notified.recvmsg(4096, socket.CMSG_SPACE(_CREDENTIALS.size))
                senders = [_CREDENTIALS.unpack(data)[0] for _, kind, data in attached if kind == socket.SCM_CREDENTIALS]
                found |= {(pid, line) for pid in senders for line in raw.decode(errors="replace").splitlines()}
        return found


def _opened_log(path: Path) -> BinaryIO:
    """To append to; a long one is put aside."""
    with contextlib.suppress(OSError):
        if path.stat().st_size > MAX_LOG_BYTES:
            path.replace(path.with_suffix(".log.1"))
    return path.open("ab")


def _why_ended(code: int | None, log_file: Path, begin_bytes: int) -> str:
    """The exit code or signal, and the last line that it wrote."""
    how = "ended" if code is None else f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
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


class NodeFacts(NamedTuple):
    """What a node's report says by its file: fields of ``NodeReport``."""

    members: tuple[Member, ...] = ()
    gateways: tuple[Member, ...] = ()
    only_follows: bool | None = None
    stops_within_s: float | None = None


def node_facts(order: NodeOrder, folder: Path) -> NodeFacts:
    """Return those of an order.  Raises as ``started_node``."""
    fleet, node = order.parsed()
    config = load_node(fleet, node, str(fleet_file_of(order, folder)))
    return NodeFacts(
        members=node_members(fleet, node),
        gateways=node_gateways(node, config.port),
        only_follows=fleet.only_follows(node.name),
        stops_within_s=config.supervise.stops_within_s,
    )


def started_node(order: NodeOrder, folder: Path) -> NodeProcess:
    """``penstock node`` of an order, started or taken over; its file and its log are in ``folder``.

    Raises ConfigError, msgspec.ValidationError, OSError, RuntimeError.
    """
    fleet, node = order.parsed()
    file = fleet_file_of(order, folder)
    config = load_node(fleet, node, str(file))
    place = lease_file_of(order, folder)
    lease = LeaseHolder(place)
    try:
        write_privately(file, order.text)  # with the lease: it may be what another node's gateways follow
        command = sidecar.python_command("penstock", "node", str(file), "--name", node.name, "--lease", str(place))
        process = NodeProcess(
            command,
            child_environ(os.environ),
            file.with_suffix(".log"),
            config.supervise,
            lease=lease,
            digest=order.digest,
        )
        process.start()
    except BaseException:
        lease.close()  # a node of an earlier actor would otherwise go on without one
        raise
    return process


def fleet_file_of(order: NodeOrder, folder: Path) -> Path:
    """Where a host has the fleet file of a node.  A hash keeps fleets apart whose names look alike in it."""
    fleet = f"{re.sub('[^A-Za-z0-9.]+', '-', order.fleet)}-{text_hash(order.fleet)[:8]}"
    return folder / f"penstock-{fleet}-{order.node}.toml"


def lease_file_of(order: NodeOrder, folder: Path) -> Path:
    """Where a host has the lease of a node."""
    return fleet_file_of(order, folder).with_suffix(".lease")


def write_privately(file: Path, text: str) -> None:
    """Replace the file at once, readable by this user alone.  Raises OSError."""
    new = file.with_name(f".{file.name}.{os.getpid()}")
    new.unlink(missing_ok=True)
    with os.fdopen(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as output:
        output.write(text)
    new.replace(file)


def latest_order(order: NodeOrder, folder: Path) -> NodeOrder:
    """The order with the text that an actor before this one was given last (``FleetNodeActor.update``)."""
    try:
        newer = msgspec.structs.replace(order, text=fleet_file_of(order, folder).read_text(encoding="utf-8"))
        return newer if node_digest(*newer.parsed()) == order.digest else order
    except (OSError, UnicodeDecodeError, ConfigError, msgspec.ValidationError, tomllib.TOMLDecodeError):
        return order


def text_hash(text: str) -> str:
    """Short, to compare texts of fleet files."""
    return hashlib.sha256(text.encode()).hexdigest()[:16]


class NodeRunner:
    """The node of an order.  One that its host does not let start, such as one whose lease the actor before this one
    still holds, is tried again by a thread.  Thread-safe."""

    def __init__(self, order: NodeOrder, folder: Path) -> None:
        """``folder``: as ``started_node`` has it.  An error is reported, not raised."""
        self.order = order
        self._folder = folder
        self._lease_path = lease_file_of(order, folder)
        self._starting = threading.Lock()  # while the node is started, or its file is replaced
        self._lock = threading.Condition()  # of what follows; notified when the state changes
        self._process: NodeProcess | None = None
        self._state: NodeState = "waiting"  # without a process
        self._reason = ""
        self._facts = NodeFacts()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._start_later, name="start of the node", daemon=True)
        if self._start():
            return
        try:
            self._thread.start()
        except RuntimeError:  # there is no thread for that either
            self._start_later()

    def report(self) -> NodeReport:
        """How the node is now.  It names its members while it waits, too: the actor before this one may run it.  A
        node that does so when this one is stopped is left to its lease, and its process is named."""
        with self._lock:
            if self._process is not None:
                found = self._process.report(self.order)
            else:
                found = NodeReport(
                    node=self.order.node,
                    digest=self.order.digest,
                    state=self._state,
                    pid=running_pid(self._lease_path) if self._state == "stopped" else 0,
                    actor_pid=os.getpid(),
                    reason=self._reason,
                )
            return msgspec.structs.replace(found, **self._facts._asdict())

    def wait_for_change(self, seen: str, timeout_s: float) -> None:
        """Until its state is another one than ``seen``, at most so long."""
        until = time.monotonic() + timeout_s
        with self._lock:
            self._lock.wait_for(lambda: self._process is not None or self._state != seen, timeout_s)
            process = self._process
        if process is not None:
            process.wait_for_change(seen, max(0.0, until - time.monotonic()))

    def update(self, text: str) -> None:
        """See ``FleetNodeActor.update``."""
        newer = msgspec.structs.replace(self.order, text=text)
        try:
            if node_digest(*newer.parsed()) == self.order.digest:
                with self._starting:
                    write_privately(fleet_file_of(newer, self._folder), text)
                    self.order = newer
        except (ConfigError, msgspec.ValidationError, tomllib.TOMLDecodeError, OSError) as error:
            log.warning("the fleet file is not replaced: %s", error)

    def begin_drain(self, reason: str) -> None:
        """Let the node finish or move its requests and end; it is not started any more.  Idempotent."""
        with self._lock:
            self._stopping.set()
            if self._process is not None:
                self._process.begin_drain(reason)
            elif self._state != "stopped":
                self._enter("stopped", reason)

    def wait_drained(self) -> None:
        """Until it has ended."""
        if self._thread.is_alive():
            self._thread.join()
        if self._process is not None:
            self._process.wait_drained()

    def _start_later(self) -> None:
        while not self._stopping.wait(START_AGAIN_S) and not self._start():
            pass

    def _start(self) -> bool:
        """Whether it has started or never will."""
        try:
            with self._starting:
                self._facts = node_facts(self.order, self._folder)
                process = started_node(self.order, self._folder)
        except (ConfigError, msgspec.ValidationError, tomllib.TOMLDecodeError) as error:
            with self._lock:
                self._enter("stopped", str(error))
            return True
        except (OSError, RuntimeError) as error:  # RuntimeError: the host has no thread left
            with self._lock:
                if not self._stopping.is_set():
                    self._enter("waiting", f"cannot be started: {error}")
            return False
        with self._lock:
            self._process = process
            self._lock.notify_all()
            if self._stopping.is_set():  # before it was known
                process.begin_drain(self._reason)
        return True

    def _enter(self, state: NodeState, reason: str) -> None:
        """With the lock."""
        if reason != self._reason:
            log.warning("the node is %s: %s", state, reason)
        self._state, self._reason = state, reason[:REASON_CHARS]
        self._lock.notify_all()


class FleetNodeActor:
    """The class of the actors.  Methods return ``NodeReport`` as JSON, and may be called at the same time."""

    def __init__(self, order: bytes) -> None:
        """``order``: a ``NodeOrder`` as JSON.  An error is reported, not raised: Ray would try again at once."""
        import ray
        from ray._private import worker

        started = msgspec.json.decode(order, type=NodeOrder)
        context = ray.get_runtime_context()
        self._ray_node = context.get_node_id()
        self._ray_address = ray.util.get_node_ip_address()
        folder = Path(worker._global_node.get_logs_dir_path())
        again = context.was_current_actor_reconstructed
        self._node = NodeRunner(latest_order(started, folder) if again else started, folder)
        watch = threading.Thread(
            target=_drain_with_ray_node, args=(self._ray_node, self._node.begin_drain), daemon=True
        )
        watch.start()

    def watch(self, seen: str, timeout_s: float) -> bytes:
        """How the node is as soon as its state is another one than ``seen``, or when so long has passed."""
        self._node.wait_for_change(seen, max(0.0, min(timeout_s, MAX_WATCH_S)))
        return self.report()

    def report(self) -> bytes:
        """How the node is now."""
        found = msgspec.structs.replace(
            self._node.report(),
            ray_node=self._ray_node,
            ray_address=self._ray_address,
            text=text_hash(self._node.order.text),
        )
        return msgspec.json.encode(found)

    def update(self, text: str) -> bytes:
        """The fleet file has another text, of which nothing concerns this node but the other nodes' workers: its
        gateways follow the file.  A text that would need a restart is not taken."""
        self._node.update(text)
        return self.report()

    def drain(self) -> bytes:
        """Drain the node, and report when it has ended."""
        self._node.begin_drain("drained by `penstock ray`")
        self._node.wait_drained()
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
