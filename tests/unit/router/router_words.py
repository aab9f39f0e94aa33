"""Short ways to say requests, fleets and workers in the router's tests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from hashlib import blake2b

from penstock.engine.service.kv_events import KvEventLog
from penstock.hashing import block_hashes, chain_root
from penstock.router.fleet import Fleet
from penstock.router.prefix_index import PrefixIndex
from penstock.types import (
    BlockHash,
    ModelIdentity,
    RequestId,
    Role,
    SamplingParams,
    ValidRequest,
    WorkerId,
    WorkerState,
    pack_token_ids,
)
from penstock.wire.gateway_messages import WorkerReport
from penstock.wire.supervisor_messages import WorkerUp

IDENTITY = ModelIdentity(fingerprint="f" * 64, numerics="null-1")
OTHER = ModelIdentity(fingerprint="0" * 64, numerics="null-1")
OTHER_CLASS = ModelIdentity(fingerprint="f" * 64, numerics="null-2")
ROOT = chain_root(IDENTITY)


def request(
    name: str = "r", *, prompt: tuple[int, ...] = tuple(range(40)), arrival: float = 0.0, **sampling: object
) -> ValidRequest:
    """A request of 40 prompt tokens and 8 of answer, unless said otherwise."""
    params: dict[str, object] = {"seed": 7, "max_tokens": 8} | sampling
    return ValidRequest(
        id=RequestId(name),
        prompt=pack_token_ids(prompt),
        block_hashes=tuple(block_hashes(ROOT, prompt)),
        sampling=SamplingParams(**params),  # type: ignore[arg-type]
        arrival=arrival,
    )


def up(fleet: Fleet, name: str, *, incarnation: int = 1, now: float = 0.0) -> None:
    """A worker process is started; its role is in its name."""
    role = Role(name.split("-", maxsplit=1)[0])
    worker = WorkerId(name)
    message = WorkerUp(worker=worker, incarnation=incarnation, role=role, pid=100, endpoint=f"memory://{name}")
    fleet.on_worker_up(message, now)


def report(
    name: str, *, incarnation: int = 1, state: WorkerState = WorkerState.READY, **fields: object
) -> WorkerReport:
    """A worker's report: ready, 100 free pages, unless said otherwise."""
    values: dict[str, object] = {
        "worker": WorkerId(name),
        "incarnation": incarnation,
        "role": Role(name.split("-", maxsplit=1)[0]),
        "state": state,
        "pid": 100,
        "identity": IDENTITY,
        "max_model_len": 2048,
        "kv_pages_free": 100,
    }
    return WorkerReport(**(values | fields))  # type: ignore[arg-type]


def fleet_of(*names: str) -> Fleet:
    """Ready workers."""
    fleet = Fleet()
    for name in names:
        up(fleet, name)
        assert fleet.on_report(report(name), 0.0)
    return fleet


def hashes_of(prompt: tuple[int, ...]) -> tuple[BlockHash, ...]:
    """The block hashes of a prompt."""
    return tuple(block_hashes(ROOT, prompt))


def chain(blocks: int, branch: str = "a", fork: int = 0) -> list[BlockHash]:
    """Names of blocks: common to all prompts below ``fork``, those of this very branch from there on."""
    names = (f"{i}" if i < fork else f"{branch}@{fork}:{i}" for i in range(blocks))
    return [BlockHash(blake2b(name.encode(), digest_size=32).digest()) for name in names]


def holds(
    index: PrefixIndex,
    slot: int,
    hashes: Sequence[BlockHash],
    incarnation: int = 1,
    lower: Mapping[BlockHash, int] | None = None,
) -> None:
    """The worker of this slot has begun, and told that these blocks are all that it has; ``lower``: in which tier."""
    index.add_worker(slot, incarnation)
    below = lower or {}
    log = KvEventLog(WorkerId("w"), incarnation, lambda: hashes, below.items, max(below.values(), default=0))
    for message in log.snapshot():
        index.on_kv_events(slot, message)
