"""The worker's side of the process that runs NIXL, and the messages between them (over a ``SOCK_SEQPACKET`` socket)."""

from __future__ import annotations

import contextlib
import socket

import msgspec

from penstock import sidecar

MESSAGE_BYTES = 128 << 10


class AgentSetup(msgspec.Struct, frozen=True, kw_only=True):
    """What the process starts with."""

    name: str  # of the agent; no other has it
    transports: str  # UCX_TLS
    devices: str  # UCX_NET_DEVICES
    exports: bool  # others read its memory; otherwise it reads theirs into it
    writable: bool  # how its memory is mapped
    nbytes: int  # of its memory
    descriptors: tuple[int, int]  # socket, memory


class AddPeer(msgspec.Struct, frozen=True, tag="meet"):
    """A remote agent to read from."""

    peer: int
    agent: bytes


class ReadPages(msgspec.Struct, frozen=True, tag="read"):
    """Read ``nbytes`` from each of a peer's addresses to offsets of the process's memory."""

    number: int
    peer: int
    nbytes: int
    addresses: list[int]
    offsets: list[int]


AgentCommand = AddPeer | ReadPages


class AgentReady(msgspec.Struct, frozen=True, tag="ready"):
    """The agent is up.  ``base``: the address of its memory in the process."""

    agent: bytes
    base: int


class AgentUnavailable(msgspec.Struct, frozen=True, tag="absent"):
    """NIXL cannot be used here."""

    reason: str


class ReadDone(msgspec.Struct, frozen=True, tag="done"):
    """The end of a ``ReadPages``."""

    number: int
    failure: str | None = None


AgentEvent = AgentReady | AgentUnavailable | ReadDone


PROCESS = "penstock.kv.connectors.nixl.agent_process"


class AgentGoneError(Exception):
    """The process has ended, or did not start."""


class NixlUnavailableError(AgentGoneError):
    """NIXL cannot be used here."""


class AgentClient:
    """One process.  ``send`` and ``receive`` are for one thread each; ``kill`` for any thread, repeatedly."""

    def __init__(self, begin: AgentSetup, memory: int) -> None:
        """``memory``: descriptor of the memory to map; stays the caller's.

        Raises OSError and RuntimeError when no socket or thread can be had.
        """
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._decoder: msgspec.msgpack.Decoder[AgentEvent] = msgspec.msgpack.Decoder(AgentEvent)
        setup = msgspec.structs.replace(begin, descriptors=(theirs.fileno(), memory))
        try:
            self._process = sidecar.ChildProcess(
                PROCESS,
                msgspec.json.encode(setup).decode(),
                setup.descriptors,
                name="kv-nixl-process",
                handed_over=theirs,
            )
        except RuntimeError:
            self._socket.close()
            theirs.close()
            raise

    @property
    def pid(self) -> int | None:
        """None before the process has started, and if it could not."""
        return self._process.pid

    def send(self, order: AgentCommand) -> None:
        """Raises AgentGoneError."""
        try:
            self._socket.send(msgspec.msgpack.encode(order))
        except OSError:
            raise AgentGoneError("its process has ended") from None

    def receive(self, timeout_s: float | None) -> AgentEvent | None:
        """None on timeout.  Raises AgentGoneError."""
        try:
            self._socket.settimeout(timeout_s)
            raw = self._socket.recv(MESSAGE_BYTES)
            if raw:
                return self._decoder.decode(raw)
        except TimeoutError:
            return None
        except (OSError, msgspec.DecodeError):
            pass
        raise AgentGoneError("its process has ended")

    def kill(self) -> None:
        """Kill the process.  Memory that it may have been writing to must not be reused."""
        self._process.kill()
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """``kill``, and close the socket, once no thread is receiving."""
        self.kill()
        self._socket.close()
