"""The worker's side of the Mooncake process: started at the first use, killed when it does not respond in time.

Each run of the process has lanes of its own, so a killed one cannot write into memory that is still in use.  Blocking,
for threads; each waits for its own lane.  A lane is a ``SOCK_SEQPACKET`` socket, and memory of one value that both
processes have mapped.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import socket
import threading
import time
from collections.abc import Iterator

import msgspec

from penstock import sidecar
from penstock.errors import TierError

MAX_REQUEST_BYTES = 128 << 10
"""The longest question: whether some hundred keys are there."""

MAX_RESPONSE_BYTES = 8 << 10

KEYS_PER_REQUEST = 256
"""Keys in one question."""

NO_ROOM = -200
TOO_LONG = -600
NOT_READY = -703
NOT_THERE = -704
THERE_ALREADY = -705
"""Of Mooncake's codes those that mean something else than that it failed.
https://github.com/kvcache-ai/Mooncake/blob/main/mooncake-store/include/types.h"""


class MooncakeSetup(msgspec.Struct, frozen=True, kw_only=True):
    """What the process starts with."""

    master: str  # HOST:PORT
    metadata: str  # where Mooncake's clients find each other
    protocol: str
    devices: str
    segment_bytes: int  # that it gives to all; 0: none
    value_bytes: int  # the memory of a lane
    timeout_s: float  # of one word with the master
    lanes: tuple[tuple[int, int], ...]  # descriptors: socket, memory


class HasRequest(msgspec.Struct, frozen=True, tag="has"):
    """Which of these keys are stored."""

    keys: list[str]


class GetRequest(msgspec.Struct, frozen=True, tag="get"):
    """Read this value into the lane's memory."""

    key: str


class PutRequest(msgspec.Struct, frozen=True, tag="put"):
    """Store the lane's memory under this key."""

    key: str


class RemoveRequest(msgspec.Struct, frozen=True, tag="remove"):
    """Delete this value even if it is being read."""

    key: str


MooncakeRequest = HasRequest | GetRequest | PutRequest | RemoveRequest


class MooncakeResponse(msgspec.Struct, frozen=True):
    """``code``: 0, the bytes of a value, or one of Mooncake's codes, which are negative.

    The first response says whether the client has come up.
    """

    code: int
    found: list[bool] = []


PROCESS = "penstock.kv.store.mooncake.process"

OWN_SHARE = 0.8
"""Of our deadline, that the library gets for its own: an answer that it failed spares its life."""


class ProcessEndedError(Exception):
    """This run of the process is over."""


class MooncakeLane:
    """The worker's end of a lane.  ``value`` is its memory; to be used with the lock held."""

    def __init__(self, value_bytes: int, timeout_s: float) -> None:
        self.lock = threading.Lock()
        self.greeted = False
        self._timeout_s = timeout_s
        self._socket, self._theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._memory = os.memfd_create("penstock-mooncake", os.MFD_CLOEXEC)
        try:
            os.ftruncate(self._memory, value_bytes)
            self._mapped = mmap.mmap(self._memory, value_bytes)
        except OSError:
            os.close(self._memory)
            raise
        self.value = memoryview(self._mapped)

    @property
    def descriptors(self) -> tuple[int, int]:
        """The process's end of the socket, and the memory."""
        return self._theirs.fileno(), self._memory

    def close_child_ends(self) -> None:
        """Close the process's ends here once it has inherited them."""
        self._theirs.close()
        os.close(self._memory)

    def request(self, question: MooncakeRequest) -> MooncakeResponse:
        """The response.  Raises ProcessEndedError when it does not come in time."""
        self._deadline()
        try:
            self._socket.send(msgspec.msgpack.encode(question))
        except TimeoutError:
            raise ProcessEndedError(f"no answer in {self._timeout_s:g} s") from None
        except OSError:
            raise ProcessEndedError("its process has ended") from None
        answer = self.receive()
        if answer is None:
            raise ProcessEndedError(f"no answer in {self._timeout_s:g} s")
        return answer

    def receive(self) -> MooncakeResponse | None:
        """The next response; None on timeout."""
        self._deadline()
        try:
            raw = self._socket.recv(MAX_RESPONSE_BYTES)
            if raw:
                return msgspec.msgpack.decode(raw, type=MooncakeResponse)
        except TimeoutError:
            return None
        except (OSError, msgspec.DecodeError):
            pass
        raise ProcessEndedError("its process has ended")

    def shut_down(self) -> None:
        """Ends the process's side of the lane."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Idempotent."""
        self._socket.close()
        self.value.release()
        with contextlib.suppress(BufferError):
            self._mapped.close()

    def _deadline(self) -> None:
        try:
            self._socket.settimeout(self._timeout_s)
        except OSError:
            raise ProcessEndedError("its process has ended") from None


class _ProcessRun:
    """One run of the process."""

    def __init__(self, setup: MooncakeSetup, names: tuple[str, ...], timeout_s: float) -> None:
        """Raises TierError when the process cannot be started."""
        self.lanes: dict[str, MooncakeLane] = {}
        self.began = time.monotonic()
        self.over = False
        try:
            for name in names:
                self.lanes[name] = MooncakeLane(setup.value_bytes, timeout_s)
            self._process = _start(setup, tuple(lane.descriptors for lane in self.lanes.values()))
        except OSError as error:
            for lane in self.lanes.values():
                lane.close()
            raise TierError(f"mooncake: no process: {error.strerror or error}") from None
        finally:
            for lane in self.lanes.values():
                lane.close_child_ends()

    @property
    def pid(self) -> int | None:
        return self._process.pid

    def end(self, patience_s: float = 0.0) -> None:
        """Wait ``patience_s`` for it to exit, then kill it.  A lane in use is closed by its user.  Idempotent."""
        self.over = True
        for lane in self.lanes.values():
            lane.shut_down()
        if patience_s:
            self._process.wait(patience_s)
        self._process.kill()
        for lane in self.lanes.values():
            if lane.lock.acquire(blocking=False):
                lane.close()
                lane.lock.release()


def _start(setup: MooncakeSetup, descriptors: tuple[tuple[int, int], ...]) -> sidecar.ChildProcess:
    """The started process, with these lanes.  Raises OSError."""
    word = msgspec.json.encode(msgspec.structs.replace(setup, lanes=descriptors)).decode()
    try:
        process = sidecar.ChildProcess(
            PROCESS, word, [each for pair in descriptors for each in pair], name="kv-mooncake"
        )
    except RuntimeError as error:
        raise OSError(errno.EAGAIN, str(error)) from None
    process.wait_started()
    return process


class MooncakeClient:
    """Starts one process at a time, and another after each that has ended."""

    def __init__(self, setup: MooncakeSetup, lanes: tuple[str, ...], timeout_s: float) -> None:
        """``lanes``: names of the lanes; ``timeout_s``: per response.  Starts nothing."""
        self._setup = msgspec.structs.replace(setup, timeout_s=OWN_SHARE * timeout_s)
        self._names = lanes
        self._timeout_s = timeout_s
        self._lock = threading.Lock()  # of the two below
        self._life: _ProcessRun | None = None
        self._closed = False

    @property
    def pid(self) -> int | None:
        """Process id of the running client."""
        with self._lock:
            return None if self._life is None or self._life.over else self._life.pid

    @contextlib.contextmanager
    def lane(self, name: str) -> Iterator[MooncakeLane]:
        """Exclusive use of a lane.  Raises TierError when the process is not ready, or fails meanwhile."""
        life = self._alive()
        lane = life.lanes[name]
        with lane.lock:
            try:
                self._greet(life, lane)
                yield lane
            except ProcessEndedError as error:
                life.end()
                raise TierError(f"mooncake: {error}") from None
            finally:
                if life.over:
                    lane.close()

    def close(self) -> None:
        """Let the process exit, which withdraws its memory segment.  Idempotent."""
        with self._lock:
            self._closed = True
            life, self._life = self._life, None
        if life is not None:
            life.end(LEAVE_S)

    def _alive(self) -> _ProcessRun:
        with self._lock:
            if self._closed:
                raise TierError("mooncake: closed")
            if self._life is None or self._life.over:
                self._life = _ProcessRun(self._setup, self._names, self._timeout_s)
            return self._life

    def _greet(self, life: _ProcessRun, lane: MooncakeLane) -> None:
        if life.over:
            raise ProcessEndedError("its process has ended")
        if lane.greeted:
            return
        first = lane.receive()
        if first is None and time.monotonic() - life.began < START_S:
            raise TierError(f"mooncake: its process is not ready, {self._setup.master} does not answer yet")
        if first is None or first.code:
            code = "" if first is None else f", code {first.code}"
            raise ProcessEndedError(f"no client of {self._setup.master}{code}: is a mooncake_master there?")
        lane.greeted = True


START_S = 30.0


LEAVE_S = 2.0
