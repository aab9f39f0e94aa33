"""Which way pages travel, by a worker's configuration."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import closing

import msgspec
import pytest

from penstock.config.schema import SchedulerConfig, WorkerConfig
from penstock.errors import PageCorrupt
from penstock.kernels.operands import KvShape
from penstock.kv.checksum import PageChecksum
from penstock.kv.connectors.base import FetchRequest
from penstock.kv.connectors.tcp.connector import TcpConnector
from penstock.kv.page_memory import KvLayout, KvMemory
from penstock.launch.worker_process import _carrier
from penstock.types import ModelIdentity, PageId, RequestId, Role, WorkerId
from penstock.wire.gateway_messages import PageSource
from penstock.wire.transfer_messages import PageReady

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
    carrier = _carrier(config(hands_over=True), own, {}, SEAL, {})
    assert isinstance(carrier, TcpConnector)
    carrier.close()

    def listen(*_: object, **__: object) -> None:
        raise AssertionError("it listens")

    monkeypatch.setattr(socket, "create_server", listen)
    staying = _carrier(config(hands_over=False), own, {}, SEAL, {})
    assert staying.descriptors == ()
    assert staying.own is own


def test_pages_of_a_neighbor_are_copied_out_of_its_memory(own: KvMemory) -> None:
    """Those of a worker of its name elsewhere are not."""
    here = PageSource(worker=WorkerId("a-prefill-0"), incarnation=1, endpoint="tcp://10.0.0.1:9000")
    with closing(KvMemory.anonymous(LAYOUT, 8)) as memory:
        memory.view(PageId(3))[:] = os.urandom(LAYOUT.page_bytes)
        frame = PageReady(
            request=RequestId("r"),
            epoch=1,
            index=0,
            tokens=16,
            page=PageId(3),
            generation=0,
            checksum=SEAL.checksum(memory.view(PageId(3)), 0),
        )
        neighbors = {(here.worker, here.endpoint): memory}
        carrier = _carrier(config(hands_over=True), own, {here.worker: memory}, SEAL, neighbors)
        assert isinstance(carrier, TcpConnector)
        with closing(carrier):
            assert carrier.fetch_page(FetchRequest(here, frame, own.view(PageId(5))))
            assert own.view(PageId(5)) == memory.view(PageId(3))
            memory.view(PageId(3))[0] ^= 1
            with pytest.raises(PageCorrupt):
                carrier.fetch_page(FetchRequest(here, frame, own.view(PageId(5))))
            elsewhere = msgspec.structs.replace(here, endpoint="tcp://10.0.0.2:9000")
            assert not carrier.fetch_page(FetchRequest(elsewhere, frame, own.view(PageId(6))))
