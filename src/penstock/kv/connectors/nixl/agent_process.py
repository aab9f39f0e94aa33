"""The process that runs NIXL: ``python -m penstock.kv.connectors.nixl.agent_process SETUP``.

Exports its memory, or reads other agents' memory into it; knows nothing of pages.  Ends with its worker.
"""

from __future__ import annotations

import importlib
import mmap
import os
import select
import signal
import socket
import sys
import time
from typing import Any

import msgspec

from penstock import sidecar
from penstock.kv.connectors.nixl.agent_client import (
    MESSAGE_BYTES,
    AddPeer,
    AgentCommand,
    AgentEvent,
    AgentReady,
    AgentSetup,
    AgentUnavailable,
    ReadDone,
    ReadPages,
)

PACKAGES = ("nixl_cu12", "nixl_cu13")
PAUSE_S = 50e-6
"""Between two looks at reads that are under way."""

_MEMORY = "DRAM"
_DONE, _UNDER_WAY = "DONE", "PROC"


def run_agent() -> None:
    """Runs until the worker's socket closes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the server, which ends the socket
    sidecar.end_with_parent()
    begin = msgspec.json.decode(sys.argv[1], type=AgentSetup)
    said = socket.socket(fileno=begin.descriptors[0])
    protection = mmap.PROT_READ | (mmap.PROT_WRITE if begin.writable else 0)
    mapped = mmap.mmap(begin.descriptors[1], begin.nbytes, flags=mmap.MAP_SHARED, prot=protection)
    base = buffer_address(mapped)
    try:
        agent = create_agent(begin, base)
        news: AgentEvent = AgentReady(bytes(agent.get_agent_metadata()), base)
    except Exception as error:  # noqa: BLE001 - the library's own, or whatever it meets
        agent, news = None, AgentUnavailable(f"{type(error).__name__}: {error}"[:500])
    said.send(msgspec.msgpack.encode(news))
    if agent is not None:
        AgentLoop(agent, said, base).run()
    os._exit(0)  # whatever threads the library has


def buffer_address(mapped: mmap.mmap) -> int:
    """Address of a mapping, also of a read-only one, for which ctypes has no call."""
    import numpy as np

    return int(np.frombuffer(mapped, np.uint8).ctypes.data)


def create_agent(begin: AgentSetup, base: int) -> Any:
    """An agent with the memory registered.  Raises what the library raises, or ImportError."""
    os.environ |= {
        "UCX_TLS": begin.transports,
        "UCX_NET_DEVICES": begin.devices,
        "UCX_LOG_LEVEL": "fatal",
        "NIXL_LOG_LEVEL": "FATAL",
    }
    nixl = nixl_package()
    # An exporter must make progress without being polled; a reader polls.
    config = nixl.nixl_agent_config(enable_prog_thread=begin.exports, backends=["UCX"])
    agent = nixl.nixl_agent(begin.name, config)
    agent.register_memory([(base, begin.nbytes, 0, "")], _MEMORY)
    return agent


def nixl_package() -> Any:
    """The installed package.  Raises ImportError."""
    for name in PACKAGES:
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError as error:
            if error.name != name:
                raise
    raise ImportError(f"none of the packages {', '.join(PACKAGES)} is installed")


class AgentLoop:
    """Carries out commands and reports their ends."""

    def __init__(self, agent: Any, said: socket.socket, base: int) -> None:
        self._agent = agent
        self._said = said
        self._base = base
        self._peers: dict[int, str] = {}
        self._flying: dict[int, Any] = {}
        self._decoder = msgspec.msgpack.Decoder(AgentCommand)

    def run(self) -> None:
        """Runs until the socket closes."""
        while True:
            if select.select([self._said], [], [], 0 if self._flying else None)[0]:
                raw = self._said.recv(MESSAGE_BYTES)
                if not raw:
                    return
                self._obey(self._decoder.decode(raw))
            elif not self._look():
                time.sleep(PAUSE_S)

    def _obey(self, order: AgentCommand) -> None:
        match order:
            case AddPeer():
                try:
                    self._peers[order.peer] = self._agent.add_remote_agent(order.agent)
                except Exception:  # noqa: BLE001 - reads from it will say so
                    self._peers.pop(order.peer, None)
            case ReadPages():
                self._begin(order)

    def _begin(self, read: ReadPages) -> None:
        peer = self._peers.get(read.peer)
        if peer is None:
            return self._report(read.number, "that agent cannot be reached")
        try:
            here = self._agent.get_xfer_descs([(self._base + at, read.nbytes, 0) for at in read.offsets], _MEMORY)
            there = self._agent.get_xfer_descs([(at, read.nbytes, 0) for at in read.addresses], _MEMORY)
            handle = self._agent.initialize_xfer("READ", here, there, peer)
            self._agent.transfer(handle)
        except Exception as error:  # noqa: BLE001 - said to the worker
            return self._report(read.number, f"{type(error).__name__}: {error}"[:200])
        self._flying[read.number] = handle
        return None

    def _look(self) -> bool:
        """Whether any read has ended."""
        ended = False
        for number, handle in list(self._flying.items()):
            try:
                state = self._agent.check_xfer_state(handle)
                failure = None if state == _DONE else f"the read ended as {state}"
            except Exception as error:  # noqa: BLE001 - said to the worker
                state, failure = "", f"{type(error).__name__}: {error}"[:200]
            if state == _UNDER_WAY:
                continue
            ended = True
            del self._flying[number]
            self._report(number, failure)
        return ended

    def _report(self, number: int, failure: str | None) -> None:
        self._said.send(msgspec.msgpack.encode(ReadDone(number, failure)))


if __name__ == "__main__":
    run_agent()
