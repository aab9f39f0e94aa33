"""Which way pages travel, by a worker's configuration."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import closing

import pytest

from penstock.config.schema import SchedulerConfig, WorkerConfig
from penstock.kernels.operands import KvShape
from penstock.kv.checksum import PageChecksum
from penstock.kv.connectors.tcp.connector import TcpConnector
from penstock.kv.page_memory import KvLayout, KvMemory
from penstock.launch.worker_process import _carrier
from penstock.types import ModelIdentity, Role, WorkerId

LAYOUT = KvLayout.for_shape(KvShape.plain(layers=2, kv_heads=2, head_dim=8), "fp32")
SEAL = PageChecksum(ModelIdentity(fingerprint="f" * 64, numerics="test-1-fp32"), LAYOUT)


@pytest.fixture
def own() -> Iterator[KvMemory]:
    with closing(KvMemory.anonymous(LAYOUT, 8)) as memory:
        yield memory


def config(*, hands_over: bool) -> WorkerConfig:
    return WorkerConfig(
        worker=WorkerId("w"),
        incarnation=1,
        role=Role.BOTH,
        endpoint="tcp://127.0.0.1:0",
        connector="tcp",
        scheduler=SchedulerConfig(pages=8, max_model_len=64),
        transfers_pages=hands_over,
    )


def test_a_worker_whose_pages_stay_where_they_are_opens_no_port(own: KvMemory, monkeypatch: pytest.MonkeyPatch) -> None:
    carrier = _carrier(config(hands_over=True), own, {}, SEAL)
    assert isinstance(carrier, TcpConnector)
    carrier.close()

    def listen(*_: object, **__: object) -> None:
        raise AssertionError("it listens")

    monkeypatch.setattr(socket, "create_server", listen)
    staying = _carrier(config(hands_over=False), own, {}, SEAL)
    assert staying.descriptors == ()
    assert staying.own is own
