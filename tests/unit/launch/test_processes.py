"""What a run's incarnations are counted from, and when a worker that loads for itself says that it is alive."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from penstock.config.mesh import Mesh
from penstock.config.resolve import WorkerPlan
from penstock.launch.heartbeat import HeartbeatTable
from penstock.launch.processes import LoadingHeartbeat, ModelDivision, incarnations_of_a_run
from penstock.types import (
    MAX_INCARNATION,
    RESTART_BITS,
    BlockHash,
    ModelIdentity,
    RequestId,
    RequestStage,
    Role,
    SamplingParams,
    WorkerId,
    is_older_incarnation,
    pack_token_ids,
)
from penstock.weights.inspect import read_outline
from penstock.wire.codec import decode_peer, encode_message
from penstock.wire.gateway_messages import PageSource, Recipient, Submit

CONFIGS = Path(__file__).parents[2] / "fixtures/configs"


def test_no_restart_of_a_run_is_older_or_newer_than_one_of_another() -> None:
    one, other = incarnations_of_a_run(), incarnations_of_a_run()
    assert is_older_incarnation(one + 1, one + 2)
    assert not is_older_incarnation(one + 2, one + 1)
    assert not is_older_incarnation(one + 1, other + 2)
    assert not is_older_incarnation(other + 2, one + 1)
    assert 0 < one < MAX_INCARNATION - (1 << RESTART_BITS)


def test_the_last_restart_of_the_last_run_travels() -> None:
    source = PageSource(worker=WorkerId("p"), incarnation=MAX_INCARNATION, endpoint="tcp://a:1")
    identity = ModelIdentity(fingerprint="f", numerics="n")
    submit = Submit(
        recipient=Recipient(worker=WorkerId("d"), incarnation=source.incarnation, identity=identity),
        request=RequestId("r"),
        epoch=1,
        stage=RequestStage.DECODE,
        prompt=bytes(pack_token_ids((1,))),
        sampling=SamplingParams(seed=1, max_tokens=1),
        root=BlockHash(bytes(32)),
        pages_from=source,
    )
    assert decode_peer(encode_message(submit)) == submit


def test_stages_of_a_prefill_worker_are_cut_without_the_head() -> None:
    """The 1 B model's head costs a decode step as much as 4.3 layers, and a chunk of a prompt next to nothing."""
    spec = read_outline(CONFIGS / "llama_3_2_1b.json").spec
    workers = [
        WorkerPlan(worker=WorkerId("w"), role=role, threads=1, cpus=(), mesh=Mesh(tensor=tensor, pipeline=pipeline))
        for role in (Role.PREFILL, Role.DECODE, Role.BOTH)
        for tensor, pipeline in ((1, 2), (2, 2), (2, 1))
    ]
    divisions = [ModelDivision.of(worker) for worker in workers]
    cuts = [[len(own.shard(spec, rank).layers) for rank in range(own.mesh.ranks)] for own in divisions]
    assert cuts == [[8, 8], [8] * 4, [16, 16], *[[10, 6], [10, 10, 6, 6], [16, 16]] * 2]
    assert len(set(divisions)) == 5  # without stages, roles share what they have loaded


def test_a_worker_that_loads_beats_while_it_gets_on() -> None:
    (slot,) = HeartbeatTable(1).slots
    slot.reset(1, now_ns=1)
    watch = LoadingHeartbeat(slot)
    watch(0, 0)
    assert slot.read().beat_s == 1e-9
    watch(5, 10)
    first = slot.read()
    assert first.beat_s > 1e-9
    assert first.predicted_end_s == first.beat_s
    watch(5, 10)
    assert slot.read() == first, "what stands still may hang"
    watch(6, 10)
    assert slot.read().beat_s > first.beat_s


GATEWAY = """
import os, sys
from penstock.config.schema import GatewayConfig
from penstock.launch import gateway_process
from penstock.launch.channel import Channel
from penstock.launch.heartbeat import HeartbeatTable
from penstock.launch.processes import GatewayProcesses
from penstock.launch.shared_rates import SharedRequestCounts, SharedTokenBuckets
from penstock.wire.curve_keys import CurveKeys

gateway_process.run_gateway = lambda *_: print(*sorted(name for name in os.environ if "RAY" in name)) or 0
gateways = GatewayProcesses(
    config=GatewayConfig(name="gateway-0", members=sys.argv[1] or None),
    listener=None,
    keys=CurveKeys.ephemeral(),
    slots={"gateway-0": HeartbeatTable(1).slots[0]},
    log_json=False,
    created=0,
    buckets=SharedTokenBuckets(1, b"key"),
    open_requests=SharedRequestCounts(1, 1),
)
sys.exit(gateways._run("gateway-0", 1, None))
"""


@pytest.mark.parametrize(
    ("members", "kept"), [("", ""), ("file:members.json", ""), ("ray:f", "RAY_AUTH_TOKEN RAY_TLS_SERVER_KEY")]
)
def test_gateways_keep_credentials_of_ray_for_its_members_only(members: str, kept: str) -> None:
    """A process that has them can run code on all hosts of the cluster."""
    environ = {**os.environ, "RAY_AUTH_TOKEN": "x", "RAY_TLS_SERVER_KEY": "x", "RAY_OTHER_TOKEN": "x"}
    words = [sys.executable, "-c", GATEWAY, members]
    run = subprocess.run(words, env=environ, capture_output=True, text=True, check=False, timeout=60)
    assert (run.returncode, run.stdout.strip()) == (0, kept), run.stderr
