"""The process that runs Mooncake's client: ``python -m penstock.kv.store.mooncake.process SETUP``.

Serves requests until a lane closes, which it does with the worker.  Knows nothing about pages: keys are strings, values
are bytes.  Library calls that hang during start and exit are ended by an alarm.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import signal
import socket
import sys
import threading
from typing import Any

import msgspec

from penstock import sidecar
from penstock.kv.store.mooncake.client import (
    LEAVE_S,
    MAX_REQUEST_BYTES,
    START_S,
    THERE_ALREADY,
    GetRequest,
    HasRequest,
    MooncakeRequest,
    MooncakeResponse,
    MooncakeSetup,
    PutRequest,
    RemoveRequest,
)

BUFFER_BYTES = 16 << 20
"""Of the client's own, for what is not done here; it takes no less."""


class ServedLane:
    """The process's end of a lane."""

    def __init__(self, descriptors: tuple[int, int], value_bytes: int) -> None:
        self._socket = socket.socket(fileno=descriptors[0])
        self._mapped = mmap.mmap(descriptors[1], value_bytes)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._mapped))
        self.bytes = value_bytes
        self._decoder = msgspec.msgpack.Decoder(MooncakeRequest)

    def receive(self) -> MooncakeRequest | None:
        """The next request; None when the worker has gone."""
        raw = self._socket.recv(MAX_REQUEST_BYTES)
        return self._decoder.decode(raw) if raw else None

    def send(self, answer: MooncakeResponse) -> None:
        """Send a response."""
        self._socket.send(msgspec.msgpack.encode(answer))


def run_mooncake() -> None:
    """Runs until the worker has gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the server, which ends the lanes
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    sidecar.end_with_parent()  # should the worker be killed while this is stopped
    setup = msgspec.json.decode(sys.argv[1], type=MooncakeSetup)
    lanes = [ServedLane(each, setup.value_bytes) for each in setup.lanes]
    signal.setitimer(signal.ITIMER_REAL, START_S)
    store, code = open_client(setup, lanes)
    signal.setitimer(signal.ITIMER_REAL, 0)
    for lane in lanes:
        lane.send(MooncakeResponse(code))
    if code == 0:
        ended = threading.Event()
        for lane in lanes:
            threading.Thread(target=serve_lane, args=(lane, store, setup, ended), daemon=True).start()
        ended.wait()
    signal.setitimer(signal.ITIMER_REAL, LEAVE_S)
    store.close()
    os._exit(0)  # whatever threads the library still has


def open_client(setup: MooncakeSetup, lanes: list[ServedLane]) -> tuple[Any, int]:
    """Mooncake's client, and 0 or the code of its failure."""
    _environment(setup)
    from mooncake.store import MooncakeDistributedStore

    store = MooncakeDistributedStore()
    here = own_address(setup.master)
    code = store.setup(
        here,
        setup.metadata,
        setup.segment_bytes,
        BUFFER_BYTES,
        setup.protocol,
        setup.devices,
        setup.master,
    )
    for lane in lanes:
        code = code or store.register_buffer(lane.address, lane.bytes)
    return store, int(code)


def own_address(master: str) -> str:
    """This host's address as seen from the master's host.  Raises OSError for an unknown host."""
    host, _, port = master.rpartition(":")
    family, kind, _, _, address = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(address)
        return str(probe.getsockname()[0])


def serve_lane(lane: ServedLane, store: Any, setup: MooncakeSetup, ended: threading.Event) -> None:
    """Serve requests on a lane until it closes."""
    try:
        while (question := lane.receive()) is not None:
            lane.send(_answer(lane, store, question))
    finally:
        ended.set()


def _answer(lane: ServedLane, store: Any, question: MooncakeRequest) -> MooncakeResponse:
    match question:
        case HasRequest(keys):
            found = store.batch_is_exist(keys)
            failed = next((each for each in found if each < 0), 0)
            return MooncakeResponse(failed, [each == 1 for each in found])
        case GetRequest(key):
            return MooncakeResponse(store.get_into(key, lane.address, lane.bytes))
        case PutRequest(key):
            code = store.put_from(key, lane.address, lane.bytes)
            return MooncakeResponse(0 if code == THERE_ALREADY else code)
        case RemoveRequest(key):
            return MooncakeResponse(store.remove(key, True))  # or who has just read it keeps it for some seconds


def _environment(setup: MooncakeSetup) -> None:
    """Settings that the library reads from the environment."""
    milliseconds = str(max(1, int(setup.timeout_s * 1000)))
    for name, value in (
        ("MC_RPC_TIMEOUT_MS", milliseconds),
        ("MC_RPC_CONNECT_TIMEOUT_MS", milliseconds),
        ("MC_STORE_CLIENT_METRIC", "0"),
        ("MC_LOG_LEVEL", "ERROR"),
        ("GLOG_minloglevel", "2"),
        ("GLOG_logtostderr", "1"),
    ):
        os.environ.setdefault(name, value)


if __name__ == "__main__":
    run_mooncake()
