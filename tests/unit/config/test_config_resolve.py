"""Every "auto", for machines of all sizes."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.config.cores import Core
from penstock.config.load import parse_size
from penstock.config.resolve import MachineFacts, ModelFacts, ServePlan, resolve, resolve_worker, show_bytes
from penstock.config.schema import PoolingConfig, ServeConfig, WorkerServeConfig
from penstock.errors import ConfigError
from penstock.reach import EVERYTHING, Reach
from penstock.types import PAGE_TOKENS, Role, WorkerId

GIB = 1 << 30
LAPTOP = MachineFacts(cpus=(0, 1), cores=2, memory_bytes=16 * GIB, kernel_families=("avx512", "avx2", "portable"))
SERVER = MachineFacts(
    cpus=tuple(range(64)),
    cores=32,
    topology=tuple(Core(cpus=(i, i + 32)) for i in range(32)),
    memory_bytes=256 * GIB,
    kernel_families=("avx512_bf16",),
)
STORY = ModelFacts(
    name="storyteller", max_positions=2048, parameters=10_000_000, auto_dtype="bf16", page_bytes_bf16=32 << 10
)
LLAMA = ModelFacts(
    name="llama-8b", max_positions=131_072, parameters=8_000_000_000, auto_dtype="bf16", page_bytes_bf16=2 << 20
)


def plan(machine: MachineFacts = LAPTOP, model: ModelFacts = STORY, **flags: object) -> ServePlan:
    return resolve(ServeConfig(**flags), machine, model)  # type: ignore[arg-type]


def refused(*because: str, machine: MachineFacts = LAPTOP, model: ModelFacts = STORY, **flags: object) -> None:
    with pytest.raises(ConfigError) as refusal:
        plan(machine, model, **flags)
    for part in because:
        assert part in str(refusal.value)


def test_a_laptop_serves_the_storyteller_split() -> None:
    made = plan()
    assert [(w.worker, w.role, w.threads, w.cpus) for w in made.workers] == [
        ("prefill-0", Role.PREFILL, 1, ()),
        ("decode-0", Role.DECODE, 1, ()),
    ]
    assert made.split
    assert (made.carrier, made.family, made.dtype) == ("shm", "avx512", "bf16")
    assert made.scheduler.max_model_len == 2048
    assert made.scheduler.pages == 64 * 2048 // PAGE_TOKENS  # 64 full contexts, not a tenth of the memory
    assert made.notes == ()


def test_aggregated_is_one_worker_with_all_cores() -> None:
    made = plan(aggregated=True)
    assert [(w.worker, w.role, w.threads) for w in made.workers] == [("both-0", Role.BOTH, 2)]
    assert not made.split


def test_encode_workers_have_cores_and_no_part_of_the_memory() -> None:
    seeing = msgspec.structs.replace(LLAMA, sees=True)
    made = plan(SERVER, seeing, encode_workers=2)
    assert [(w.worker, w.role) for w in made.workers[2:]] == [
        ("encode-0", Role.ENCODE),
        ("encode-1", Role.ENCODE),
    ]
    assert len({w.cpus for w in made.workers}) == 4
    assert made.scheduler.pages == plan(SERVER, seeing).scheduler.pages
    assert made.split
    listed = plan(SERVER, seeing, encode_workers=1, prefill_cores="0-7", decode_cores="8-15")
    assert listed.workers[2].cpus[0] == 16
    both = plan(SERVER, seeing, encode_workers=1, aggregated=True)
    assert [w.role for w in both.workers] == [Role.BOTH, Role.ENCODE]
    refused("--encode-workers", "reads no images", encode_workers=1)
    with pytest.raises(ConfigError, match="--role encode: storyteller reads no images"):
        resolve_worker(WorkerServeConfig(role=Role.ENCODE), WorkerId("e"), LAPTOP, STORY)
    alone = resolve_worker(WorkerServeConfig(role=Role.ENCODE), WorkerId("e"), SERVER, seeing)
    assert [w.role for w in alone.workers] == [Role.ENCODE]


def test_a_model_that_only_reads_has_one_kind_of_worker() -> None:
    reads = PoolingConfig(whole_prompts=True, share_prefixes=False)
    bge = msgspec.structs.replace(STORY, name="bge", max_positions=512, page_bytes_bf16=128, pooling=reads)
    made = plan(model=bge)
    assert [(w.worker, w.role, w.threads) for w in made.workers] == [("both-0", Role.BOTH, 2)]
    assert made.scheduler.pooling == reads
    assert made.scheduler.pages == 64 * 512 // PAGE_TOKENS
    assert plan(model=bge, kv_memory=GIB).scheduler.pages == made.scheduler.pages  # more pages would count nothing
    assert [w.worker for w in plan(model=bge, prefill=2).workers] == ["both-0", "both-1"]
    for flag in ({"decode": 1}, {"prefill_cores": "0"}, {"decode_cores": "1"}):
        refused(f"--{next(iter(flag)).replace('_', '-')}: bge only reads", model=bge, **flag)
    with pytest.raises(ConfigError, match="--role prefill: bge only reads"):
        resolve_worker(WorkerServeConfig(role=Role.PREFILL), WorkerId("w"), LAPTOP, bge)


def test_a_server_gives_each_worker_cores_of_its_own() -> None:
    made = plan(SERVER, LLAMA, prefill=2, decode=2)
    assert [w.threads for w in made.workers] == [8] * 4
    pinned = [cpu for w in made.workers for cpu in w.cpus]
    assert sorted(pinned) == list(range(64))


def test_what_was_asked_for_is_done() -> None:
    made = plan(transfer="tcp", dtype="fp32", kernels="portable", threads=3, max_chunk_tokens=16, max_running=4)
    assert (made.carrier, made.dtype, made.family) == ("tcp", "fp32", "portable")
    assert made.page_bytes == 2 * STORY.page_bytes_bf16
    assert {w.threads for w in made.workers} == {3}
    assert (made.scheduler.max_chunk_tokens, made.scheduler.max_running) == (16, 4)


def test_an_unknown_family_names_those_there_are() -> None:
    refused("--kernels neon", "avx512, avx2, portable", kernels="neon")
    refused("penstock doctor", machine=msgspec.structs.replace(LAPTOP, kernel_families=()))


def test_a_gpu_serves_from_one_worker() -> None:
    refused("add --aggregated", device="cuda")
    machine = msgspec.structs.replace(LAPTOP, kernel_families=("reference",))
    assert plan(machine, device="cuda", aggregated=True).family == "reference"


def test_a_joined_worker_has_the_machine_to_itself_and_speaks_tcp() -> None:
    made = resolve_worker(WorkerServeConfig(role=Role.DECODE), WorkerId("d"), LAPTOP, STORY)
    assert [(w.worker, w.role, w.threads) for w in made.workers] == [("d", Role.DECODE, 2)]
    assert made.carrier == "tcp"
    with pytest.raises(ConfigError, match="use --role both"):
        resolve_worker(WorkerServeConfig(role=Role.DECODE, device="cuda"), WorkerId("d"), LAPTOP, STORY)


def test_a_long_context_is_cut_to_the_memory_and_told() -> None:
    made = plan(msgspec.structs.replace(LAPTOP, memory_bytes=20 * GIB), LLAMA)
    assert 256 <= made.scheduler.max_model_len < 131_072
    assert made.scheduler.pages * PAGE_TOKENS >= made.scheduler.max_model_len
    (note,) = made.notes
    assert "context cut from 131072" in note
    assert "--kv-memory 16GiB would hold all" in note


def test_windows_take_less_and_leave_longer_contexts() -> None:
    """A group of layers with a window of 1024 needs 64 pages for it, 128 for a step, and one that is given back."""
    windowed = msgspec.structs.replace(STORY, max_positions=16_384, reaches=(EVERYTHING, Reach(window=1024)))
    made = plan(model=windowed, kv_memory=1200 * STORY.page_bytes_bf16)
    assert made.scheduler.reaches == windowed.reaches
    assert made.scheduler.max_model_len == (1200 - 64 - 128 - 1) * PAGE_TOKENS
    small = plan(model=windowed, kv_memory=1200 * STORY.page_bytes_bf16, max_chunk_tokens=64)
    assert small.scheduler.max_model_len == 16_384
    refused("one context of 16384 tokens needs", "--max-model-len 112", model=windowed, max_model_len=16_384,
            kv_memory=15 * STORY.page_bytes_bf16)  # fmt: skip


def test_a_context_that_was_asked_for_fits_or_is_refused() -> None:
    size = 100 * STORY.page_bytes_bf16
    assert plan(kv_memory=size, max_model_len=1600).scheduler.max_model_len == 1600
    refused("one context of 1601 tokens needs 3232KiB", "holds 1600", "3232KiB or --max-model-len 1600",
            kv_memory=size, max_model_len=1601)  # fmt: skip
    assert plan(kv_memory=size).scheduler.max_model_len == 1600
    refused("--kv-memory 4MiB", kv_memory=1)


def test_more_than_the_model_or_the_machine_has_is_refused() -> None:
    refused("--max-model-len 4096", "made for 2048 tokens", max_model_len=4096)
    refused("14GiB for its weights", model=LLAMA, machine=msgspec.structs.replace(
        LAPTOP, memory_bytes=12 * GIB))  # fmt: skip
    refused("--kv-memory 12GiB for each of 2 workers", kv_memory=12 * GIB)


@given(
    memory=st.integers(GIB, 512 * GIB),
    cores=st.integers(1, 128),
    prefill=st.integers(1, 4),
    decode=st.integers(1, 4),
    asked=st.none() | st.integers(1, 2048),
)
def test_one_full_context_always_fits(memory: int, cores: int, prefill: int, decode: int, asked: int | None) -> None:
    machine = msgspec.structs.replace(LAPTOP, memory_bytes=memory, cores=cores, cpus=tuple(range(cores)))
    made = plan(machine, prefill=prefill, decode=decode, max_model_len=asked)
    assert made.scheduler.pages * PAGE_TOKENS >= made.scheduler.max_model_len >= min(256, asked or 2048)
    assert made.scheduler.pages * made.page_bytes * len(made.workers) <= memory
    assert all(w.threads >= 1 for w in made.workers)


@given(st.integers(1, 1 << 45))
def test_a_shown_size_can_be_given_back(count: int) -> None:
    assert parse_size(show_bytes(count)) <= count <= parse_size(show_bytes(count, up=True))
