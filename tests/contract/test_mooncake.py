"""What only Mooncake's store can do wrong, and what becomes of it: its master, its other clients, its own process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import msgspec
import psutil
import pytest
from tests.mooncake_rig import Mooncake, free_ports, mooncake_store, mooncake_tier
from tests.store_rig import IDENTITY, LAYOUT, final_of, key_of, page_of

from blows import strike
from penstock.errors import ConfigError, PageCorrupt, TierError
from penstock.kernels.operands import KvShape
from penstock.kv.page_memory import KvLayout
from penstock.kv.store.envelope import EncryptedEnvelope, PageEnvelope
from penstock.kv.store.mooncake.client import MooncakeClient, PutRequest
from penstock.kv.store.mooncake.tier import MooncakeConfig, MooncakeTier
from penstock.types import ModelIdentity

SEAL = PageEnvelope(IDENTITY, LAYOUT)
long = pytest.mark.long


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Mooncake]:
    with mooncake_store(tmp_path) as made:
        yield made


@pytest.fixture
def tier(store: Mooncake) -> Iterator[MooncakeTier]:
    made = mooncake_tier(store, SEAL, timeout_s=2.0)
    yield made
    made.close()


def put(tier: MooncakeTier, number: int) -> bool:
    return tier.write_page(final_of(number), memoryview(page_of(number)))


def get(tier: MooncakeTier, number: int) -> bytes | None:
    into = bytearray(LAYOUT.page_bytes)
    return bytes(into) if tier.read_page(key_of(number), memoryview(into)) else None


def until(true: Callable[[], bool], seconds: float = 60.0) -> None:
    """Failures on the way are what a worker would see, too."""
    deadline = time.monotonic() + seconds
    while True:
        try:
            if true():
                return
        except TierError:
            pass
        assert time.monotonic() < deadline, "it did not come true"
        time.sleep(0.05)


@pytest.mark.parametrize("master", ["", "host", "host:", ":1", "host:0", "host:65536", "http://host:1", "a b:1"])
def test_an_address_that_is_none_is_refused_with_an_example(master: str):
    with pytest.raises(ConfigError, match="HOST:PORT"):
        MooncakeTier(MooncakeConfig(master=master), SEAL, timeout_s=1.0)


@long
def test_values_that_others_put_there_are_not_believed(store: Mooncake, tier: MooncakeTier):
    put(tier, 1)
    whole = tier._value_bytes
    good = b"".join(reversed(SEAL.seal(key_of(1), memoryview(page_of(1)))))
    assert len(good) == whole
    flipped = good[:50] + bytes([good[50] ^ 1]) + good[51:]
    for number, bad in enumerate((good[:-1], good + b"x", good[:40], b"x", flipped, good * 1000), start=10):
        setup = msgspec.structs.replace(tier._keeper._setup, value_bytes=len(bad))
        stranger = MooncakeClient(setup, ("write",), 5.0)
        name = tier._name(key_of(number))

        def write(keeper: MooncakeClient = stranger, name: str = name, bad: bytes = bad) -> bool:
            with keeper.lane("write") as lane:
                lane.value[:] = bad
                return lane.request(PutRequest(name)).code == 0

        until(write)
        stranger.close()
        assert tier.contains([key_of(number)]) == [True]
        with pytest.raises(PageCorrupt):
            get(tier, number)
        assert tier.contains([key_of(number)]) == [False], "it is not offered again"
    assert get(tier, 1) == page_of(1), "it goes on"


@long
def test_pages_of_another_model_are_not_offered(store: Mooncake, tier: MooncakeTier):
    put(tier, 1)
    identity = ModelIdentity(fingerprint="b" * 64, numerics=IDENTITY.numerics)
    other = mooncake_tier(store, PageEnvelope(identity, LAYOUT))
    assert other.contains([key_of(1)]) == [False]
    other.close()


def test_pages_of_another_key_have_other_names():
    pytest.importorskip("cryptography", reason="the extra with cryptography is not installed")
    seals = [SEAL, *(EncryptedEnvelope(IDENTITY, LAYOUT, bytes([byte]) * 32) for byte in (1, 2))]
    names = [MooncakeTier(MooncakeConfig(master="host:1"), seal, timeout_s=1.0)._name(key_of(1)) for seal in seals]
    assert len(set(names)) == 3
    again = EncryptedEnvelope(IDENTITY, LAYOUT, bytes([1]) * 32)
    assert MooncakeTier(MooncakeConfig(master="host:1"), again, timeout_s=1.0)._name(key_of(1)) == names[1]


def no_thread(_: threading.Thread) -> None:
    raise RuntimeError("can't start new thread")


def no_process(*_: object, **__: object) -> None:
    raise subprocess.SubprocessError("not in this state")


@pytest.mark.parametrize(
    ("what", "name", "lacking"), [(threading.Thread, "start", no_thread), (subprocess, "Popen", no_process)]
)
def test_without_room_for_its_process_it_fails_and_nothing_is_left(
    monkeypatch: pytest.MonkeyPatch, what: object, name: str, lacking: Callable[..., None]
):
    tier = MooncakeTier(MooncakeConfig(master="127.0.0.1:1"), SEAL, timeout_s=1.0)
    with monkeypatch.context() as patch:
        patch.setattr(what, name, lacking)
        with pytest.raises(TierError, match=r"no process: (can't start new thread|SubprocessError)"):
            tier.contains([key_of(1)])
    open_files = [os.readlink(each) for each in Path("/proc/self/fd").iterdir() if each.is_symlink()]
    assert not [each for each in open_files if "memfd:penstock-mooncake" in each]
    assert tier.pid is None
    tier.close()


@long
def test_more_keys_than_one_question_has_room_for(tier: MooncakeTier):
    numbers = list(range(300))
    assert all(put(tier, number) for number in numbers)
    keys = [key_of(number) for number in numbers]
    assert tier.contains(keys) == [True] * 300
    found = tier.contains([*keys, key_of(9999), *keys])
    assert found[:301] == [True] * 300 + [False]
    assert len(found) == 601
    assert not any(found[512:]), "nobody asked"


@long
def test_a_full_store_refuses_or_gives_up_pages_and_nothing_fails(store: Mooncake):
    layout = KvLayout.for_shape(KvShape.plain(layers=1, kv_heads=1, head_dim=1 << 14), "bf16")
    assert layout.page_bytes == 1 << 20
    tier = mooncake_tier(store, PageEnvelope(IDENTITY, layout))
    taken = [tier.write_page(final_of(number), memoryview(page_of(number, layout))) for number in range(80)]
    into = bytearray(layout.page_bytes)
    found = 0
    for number in range(80):
        if tier.read_page(key_of(number), memoryview(into)):
            found += 1
            assert taken[number]
            assert into == page_of(number, layout)
    assert 10 < found < 64, "of 64 MB"
    tier.close()


@long
def test_a_killed_master_forgets_and_that_is_a_miss(store: Mooncake, tier: MooncakeTier):
    put(tier, 1)
    store.master.kill()
    store.master.wait()
    for ask in (lambda: get(tier, 1), lambda: put(tier, 2), lambda: tier.contains([key_of(1)])):
        began = time.monotonic()
        with pytest.raises(TierError, match="mooncake"):
            ask()
        assert time.monotonic() - began < 20, "not the library's own 30 seconds"
    store.start_master()
    until(lambda: tier.contains([key_of(1)]) == [False])
    assert get(tier, 1) is None
    until(lambda: put(tier, 3))
    assert get(tier, 3) == page_of(3)


@long
def test_a_stopped_master_costs_our_deadline_and_no_process(store: Mooncake):
    # A fifth of that is between the library's deadline and ours.
    with closing(mooncake_tier(store, SEAL, timeout_s=8.0)) as tier:
        put(tier, 1)
        process = tier.pid
        assert process is not None
        strike(store.master.pid, signal.SIGSTOP)
        began = time.monotonic()
        with pytest.raises(TierError):
            tier.contains([key_of(1)])
        assert time.monotonic() - began < 25, "not the library's own 30 seconds"
        store.master.send_signal(signal.SIGCONT)
        until(lambda: tier.contains([key_of(1)]) == [True])
        assert tier.pid == process
        until(lambda: get(tier, 1) == page_of(1))


@long
@pytest.mark.parametrize("how", [signal.SIGSTOP, signal.SIGKILL])
def test_who_has_the_page_hangs_or_dies(store: Mooncake, tier: MooncakeTier, how: signal.Signals):
    assert store.giver is not None
    put(tier, 1)
    strike(store.giver.pid, how)
    with pytest.raises(TierError):
        get(tier, 1)
    until(lambda: get(tier, 1) is None)
    assert tier.contains([key_of(1)]) == [False], "its master has found out"


@long
@pytest.mark.parametrize("how", [signal.SIGSTOP, signal.SIGKILL, signal.SIGABRT])
def test_its_own_process_hangs_or_dies_and_another_takes_its_place(tier: MooncakeTier, how: signal.Signals):
    put(tier, 1)
    first = tier.pid
    assert first is not None
    strike(first, how)
    with pytest.raises(TierError):
        get(tier, 1)
    assert not psutil.pid_exists(first), "killed and reaped"
    until(lambda: get(tier, 1) == page_of(1))
    assert tier.pid not in (None, first)


@long
@pytest.mark.parametrize("stopped", [False, True])
def test_its_process_ends_with_a_worker_that_is_killed(store: Mooncake, stopped: bool):
    code = (
        "import sys, time\n"
        "from tests.mooncake_rig import mooncake_tier\n"
        "from tests.store_rig import IDENTITY, LAYOUT\n"
        "from penstock.kv.store.envelope import PageEnvelope\n"
        "class At: at = sys.argv[1]\n"
        "tier = mooncake_tier(At, PageEnvelope(IDENTITY, LAYOUT))\n"
        "print(tier.pid, flush=True)\n"
        "sys.stdin.read()\n"
    )
    root = Path(__file__).parents[2]
    with subprocess.Popen(
        [sys.executable, "-c", code, store.at],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": f"{root}/src:{root}"},
        cwd=root,
    ) as worker:
        try:
            assert worker.stdout is not None
            client = int(worker.stdout.readline())
            assert psutil.pid_exists(client)
            if stopped:
                os.kill(client, signal.SIGSTOP)
        finally:
            worker.kill()
    until(lambda: not psutil.pid_exists(client))


@long
def test_without_a_master_it_fails_and_says_so(store: Mooncake):
    (port,) = free_ports(1)
    tier = MooncakeTier(MooncakeConfig(master=f"127.0.0.1:{port}"), SEAL, timeout_s=1.0)
    with pytest.raises(TierError, match="mooncake"):
        tier.contains([key_of(1)])
    tier.close()
    with pytest.raises(TierError, match="closed"):
        tier.contains([key_of(1)])


@long
def test_memory_that_a_worker_gives_is_taken_back_when_it_ends(tmp_path: Path):
    with mooncake_store(tmp_path, gives=False) as store:
        giving = mooncake_tier(store, SEAL, segment_bytes=32 << 20)
        reading = mooncake_tier(store, SEAL)
        until(lambda: put(reading, 1))
        assert get(reading, 1) == page_of(1)
        giving.close()
        until(lambda: get(reading, 1) is None)
        assert not put(reading, 2), "nobody else gives any"
        reading.close()
