"""A service whose children do nothing but beat; run as a program by test_supervise.

    python fake_service.py '{"config": {"wedge_s": 0.4}, "decode-0": "crash"}'

Behaviours of a child: "beat" (the default), "crash" (before it is ready), "deaf" (ignores SIGTERM); of the whole:
"load_s" (how long loading takes), "thread" (the incarnations of decode-0 that this process has a second thread for),
"ranks" (processes of decode-0: those but the first only sleep), "lease" (a file), "lease_s" (how long it goes on when
that is not locked).
Everything that is heard or done goes to stdout, one line each.
"""

from __future__ import annotations

import json
import os
import select
import signal
import sys
import threading
import time
from functools import partial
from pathlib import Path

from penstock.config.limits import SuperviseConfig
from penstock.errors import RestartLimitReached
from penstock.launch import node_lease
from penstock.launch.channel import Channel
from penstock.launch.heartbeat import HeartbeatTable
from penstock.launch.restart_policy import GATEWAY
from penstock.launch.supervisor import ChildSpec, StoppedEarly, Supervisor
from penstock.types import Role, WorkerId, WorkerState
from penstock.wire.supervisor_messages import ServiceDraining, SuspectWorker, WorkerDown, WorkerUp

SCRIPT = json.loads(sys.argv[1])
ROLES = {WorkerId("prefill-0"): Role.PREFILL, WorkerId("decode-0"): Role.DECODE}
NAMES = (GATEWAY, *ROLES)
SLOTS = dict(zip(NAMES, HeartbeatTable(len(NAMES)).slots, strict=True))


def say(*words: object) -> None:
    os.write(1, (" ".join(map(str, words)) + "\n").encode())


class FakeJobs:
    def gateway_spec(self, name: str, incarnation: int, channel: Channel) -> ChildSpec:
        return ChildSpec(main=lambda: gateway(incarnation, channel), inherited_fds=())

    def __init__(self) -> None:
        self._over = threading.Event()
        self._thread: threading.Thread | None = None

    def worker_spec(self, worker: WorkerId, incarnation: int, predecessor_fault: str) -> ChildSpec:
        if worker == "decode-0" and "thread" in SCRIPT:
            first, last = SCRIPT["thread"]
            if incarnation == first:
                self._thread = threading.Thread(target=self._over.wait, daemon=True)
                self._thread.start()
            elif incarnation > last and self._thread is not None:
                self._over.set()
                self._thread.join()
        ranks = SCRIPT.get("ranks", 1) if worker == "decode-0" else 1
        return ChildSpec(
            main=lambda: child(worker),
            followers={rank: partial(follower, worker, rank) for rank in range(1, ranks)},
            endpoint=f"nowhere-{worker}-{incarnation}",
        )


def beat(name: str) -> None:
    now = time.monotonic_ns()
    SLOTS[name].beat(now, now + 10**8, 0)


def gateway(incarnation: int, channel: Channel) -> int:
    SLOTS[GATEWAY].set_state(WorkerState.READY)
    say("gateway", incarnation, "runs", os.getpid())
    while True:
        beat(GATEWAY)
        select.select([channel], [], [], 0.05)
        while (message := channel.receive()) is not None:
            if isinstance(message, WorkerUp):
                say("gateway", incarnation, "up", message.worker, message.incarnation, message.pid, message.endpoint)
                if SCRIPT.get("suspect") == message.worker and message.incarnation == 1:
                    channel.send(SuspectWorker(worker=message.worker, incarnation=1, reason="no tokens"))
            elif isinstance(message, WorkerDown):
                say("gateway", incarnation, "down", message.worker, message.incarnation, message.state.value)
            elif isinstance(message, ServiceDraining):
                say("gateway", incarnation, "draining")
                if not SCRIPT.get("endless"):
                    return 0


def child(name: str) -> int:
    behaviour = SCRIPT.get(name, "beat")
    if behaviour == "crash":
        raise ValueError("I was told to")
    if behaviour == "deaf":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    SLOTS[name].set_state(WorkerState.READY)
    say("worker", name, "runs", os.getpid())
    while True:
        beat(name)
        time.sleep(0.02)


def follower(name: str, rank: int) -> int:
    say("worker", f"{name}/{rank}", "runs", os.getpid())
    if SCRIPT.get("follower") == "crash":
        raise ValueError("I was told to")
    while True:
        signal.pause()


def main() -> int:
    config = SuperviseConfig(**SCRIPT.get("config", {}))
    node_lease.LEASE_S = SCRIPT.get("lease_s", node_lease.LEASE_S)
    lease = node_lease.LeaseWatch(Path(SCRIPT["lease"])) if "lease" in SCRIPT else None
    with Supervisor(config, FakeJobs(), SLOTS, lease=lease) as supervisor:
        supervisor.on_stopping(lambda: say("stopping"))
        supervisor.start()
        try:
            loaded = time.monotonic() + SCRIPT.get("load_s", 0.0)
            while time.monotonic() < loaded:
                supervisor.poll()
                time.sleep(0.01)
            code = supervisor.run(ROLES, lambda: say("ready"))
        except StoppedEarly:
            supervisor.wait_until_stopped()
            say("stopped while loading")
            return 0
        except RestartLimitReached as error:
            say("gave up:", error)
            return 1
    try:
        os.waitpid(-1, os.WNOHANG)
    except ChildProcessError:
        say("no child left")
    return code


if __name__ == "__main__":
    sys.exit(main())
