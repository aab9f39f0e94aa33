"""Pages that outlive a version lie where they lay, with the bytes that they had in 0.1.0 (goldens of that code)."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from blake3 import blake3
from tests.store_rig import IDENTITY, LAYOUT, final_of, key_of, page_of, slab_tier

from penstock.kernels.operands import KvShape
from penstock.kv.page_memory import KvLayout
from penstock.kv.store.envelope import make_envelope
from penstock.kv.store.mooncake.tier import MooncakeConfig, MooncakeTier
from penstock.kv.store.redis_tier import RedisTier
from penstock.kv.store.store import StoreOwner, slab_file_name
from penstock.kv_spec import KvSpec
from penstock.types import WorkerId

KEY = bytes(range(32))
FILES = {
    None: "e3dc1cb666157aad2995b52886d353feb8f8a9d7d9bd845a0bd9f05b5c5a8ee4",
    KEY: "80b1bcc86dea0db50f91150dbae0bda10fc615723f2701b34c96b1e446ca923b",
}


@pytest.mark.parametrize("key", FILES, ids=["plain", "encrypted"])
def test_a_file_of_pages_has_the_bytes_that_it_had(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, key: bytes | None
) -> None:
    if key is not None:
        pytest.importorskip("cryptography", reason="the extra with cryptography is not installed")
        monkeypatch.setattr(os, "urandom", lambda count: bytes(range(1, count + 1)))
    path = tmp_path / "f"
    tier = slab_tier(path, seal=make_envelope(IDENTITY, LAYOUT, key))
    for number in range(5):
        assert tier.write_page(final_of(number, saves_s=0.5 * number), memoryview(page_of(number)))
    into = bytearray(LAYOUT.page_bytes)
    assert tier.read_page(key_of(3), memoryview(into))
    tier.close()
    assert blake3(path.read_bytes()).hexdigest() == FILES[key]
    head = json.loads(path.read_bytes()[:4080].rstrip(b"\0"))
    assert head == {
        "magic": "penstock-kv/1",
        "fingerprint": "a" * 64,
        "numerics": "null-1",
        "layout": "full-l1-h1-t16-k32-v32-bf16",
        "page_bytes": 2048,
        "slab_bytes": 4096,
        "places": 246,
        "encrypted": key is not None,
    }


def test_pages_have_the_names_that_they_had() -> None:
    place = StoreOwner(worker=WorkerId("one"), identity=IDENTITY, layout=LAYOUT, peers={})
    assert slab_file_name(place, encrypted=False) == "aaaaaaaaaaaaaaaa-a2decbb2.kv"
    assert slab_file_name(place, encrypted=True) == "aaaaaaaaaaaaaaaa-b46726e9.kv"
    seal = make_envelope(IDENTITY, LAYOUT, None)
    mooncake = MooncakeTier(MooncakeConfig(master="127.0.0.1:1"), seal, timeout_s=1.0)
    assert mooncake._name(key_of(1, 2)) == (
        "penstock.kv.1.33f858d8791f9d36696592aa765a019d.p."
        "f5b165224a58b791df6af1d8303e61cdc4bb86c3d1c427103c344c4189eb2f1e0200"
    )
    pytest.importorskip("redis", reason="the extra with redis is not installed")
    redis = RedisTier("redis://127.0.0.1:1", seal, timeout_s=1.0, expire_s=1.0)
    assert redis._name(key_of(1, 2)) == b"penstock:kv:1:" + bytes.fromhex(
        "33f858d8791f9d36696592aa765a019d70f5b165224a58b791df6af1d8303e61cdc4bb86c3d1c427103c344c4189eb2f1e0200"
    )


def test_layouts_have_the_names_that_they_had() -> None:
    plain = KvShape.plain(layers=4, kv_heads=2, head_dim=64)
    grouped = plain.grouped([KvSpec(window=128), KvSpec(), KvSpec(chunk=8192), KvSpec()])
    latent = KvShape(layers=2, kv_heads=1, key_dim=576, value_dim=512, shared=True)
    names = [
        KvLayout.for_shape(shape, dtype).name for shape in (plain, grouped, latent) for dtype in ("bf16", "fp8_e4m3")
    ]
    assert names == [
        "full-l4-h2-t16-k64-v64-bf16",
        "full-l4-h2-t16-k64-v64-fp8_e4m3",
        "full-l4-h2-t16-k64-v64-bf16-g1w0c0-g3w0c0-g0w128c0-g2w0c8192",
        "full-l4-h2-t16-k64-v64-fp8_e4m3-g1w0c0-g3w0c0-g0w128c0-g2w0c8192",
        "latent-l2-h1-t16-k576-v512-bf16",
        "latent-l2-h1-t16-k576-v512-fp8_e4m3",
    ]
