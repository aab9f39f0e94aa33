"""Prompts read elsewhere than answers are written: what it takes, and what is refused."""

from __future__ import annotations

import msgspec
import pytest

from penstock.config.device import excludes_gpu
from penstock.config.facts import GpuFacts, GpuReport, MachineFacts, ModelFacts
from penstock.config.load import load_serve, load_worker
from penstock.config.mixed_numerics import fleet_numerics
from penstock.config.resolve import ServePlan, resolve, resolve_worker
from penstock.config.schema import PoolingConfig, ServeConfig, WorkerServeConfig
from penstock.errors import ConfigError
from penstock.kv_spec import KvSpec
from penstock.types import ModelIdentity, Role, WorkerId

GIB = 1 << 30
H200 = GpuFacts(name="NVIDIA H200", capability=(9, 0), total_bytes=139 * GIB, free_bytes=138 * GIB)
HOST = MachineFacts(
    cpus=tuple(range(16)),
    cores=16,
    memory_bytes=256 * GIB,
    kernel_families=("avx512_bf16", "portable", "reference"),
    gpu=GpuReport(gpu=H200, reason=""),
)
LLAMA = ModelFacts(
    name="llama-8b", max_positions=8192, parameters=8 * 10**9, auto_dtype="bf16", page_bytes_bf16=2 << 20
)
MIXED = {"prefill_device": "cuda", "allow_mixed_numerics": True}


def plan(machine: MachineFacts = HOST, model: ModelFacts = LLAMA, **flags: object) -> ServePlan:
    return resolve(ServeConfig(**flags), machine, model)  # type: ignore[arg-type]


def refused(*because: str, machine: MachineFacts = HOST, model: ModelFacts = LLAMA, **flags: object) -> None:
    with pytest.raises(ConfigError) as refusal:
        plan(machine, model, **flags)
    for part in because:
        assert part in str(refusal.value)


def test_prompts_on_the_gpu_answers_on_the_processors() -> None:
    made = plan(decode=2, **MIXED)
    assert (made.device, made.family, made.split, made.mixed_numerics) == ("cpu", "avx512_bf16", True, True)
    assert [(w.worker, w.role) for w in made.workers] == [
        ("prefill-0", Role.PREFILL),
        ("decode-0", Role.DECODE),
        ("decode-1", Role.DECODE),
    ]
    reads, *writes = made.workers
    assert made.prefill_plan_of(reads) is made.prefill_plan
    assert made.pages_on_device(reads)
    assert not any(made.pages_on_device(w) or made.prefill_plan_of(w) for w in writes)
    assert [w.threads for w in writes] == [8, 8]  # all cores are theirs
    assert all(loan.lender != "prefill-0" for w in writes for loan in w.loans)
    assert made.prefill_plan is not None
    assert (made.prefill_plan.device, made.prefill_plan.family) == ("cuda", "triton")
    assert made.prefill_plan.pages == made.scheduler.pages  # each has a twin
    assert made.notes[0] == ("on NVIDIA H200: 138.0 of 139.0 GiB free; as --prefill-device cuda says, for prompts only")


def test_no_more_pages_than_the_gpu_has_room_for() -> None:
    small = msgspec.structs.replace(H200, free_bytes=24 * GIB)
    made = plan(msgspec.structs.replace(HOST, gpu=GpuReport(gpu=small)), **MIXED)
    assert made.prefill_plan is not None
    left = 24 * GIB - 16 * 10**9 - (896 << 20)
    assert made.prefill_plan.pages == left // (2 << 20) < made.scheduler.pages
    tiny = msgspec.structs.replace(H200, free_bytes=16 * 10**9)
    refused("NVIDIA H200 has", machine=msgspec.structs.replace(HOST, gpu=GpuReport(gpu=tiny)), **MIXED)
    none = msgspec.structs.replace(H200, free_bytes=16 * 10**9 + (996 << 20))
    refused("for prefill", "--max-model-len 800 or less", machine=msgspec.structs.replace(HOST,
        gpu=GpuReport(gpu=none)), **MIXED)  # fmt: skip


def test_it_is_asked_for_twice() -> None:
    refused("--prefill-device cuda:", "add --allow-mixed-numerics", prefill_device="cuda")
    refused("--prefill-kernels portable:", "add --allow-mixed-numerics", prefill_kernels="portable")
    assert plan(allow_mixed_numerics=True).prefill_plan is None
    assert plan(prefill_device="cpu", prefill_kernels="avx512_bf16").prefill_plan is None
    assert not excludes_gpu(ServeConfig(prefill=1, prefill_device="cuda"))
    assert excludes_gpu(ServeConfig(prefill=1, prefill_kernels="portable"))


@pytest.mark.parametrize(
    ("flags", "why"),
    [
        ({"aggregated": True}, "--aggregated"),
        ({"device": "cuda"}, "--device cuda: --prefill-device asks for workers of one phase"),
        ({"prefill": 2}, "two processes on one GPU take turns; use --prefill 1"),
        ({"prefill_kernels": "avx2"}, "prefill workers have triton, reference there"),
        ({"kv_dtype": "fp8_e4m3"}, "keep KV pages in the compute type"),
        ({"activation_dtype": "int8"}, "both phases need inputs of one type"),
        ({"kv_disk": "/d"}, "--kv-disk with --prefill-device cuda: stored pages are for prefill workers"),
        ({"prefill_cores": "0-3"}, "--prefill-cores are for prefill workers on processors"),
    ],
)
def test_what_does_not_go_together_is_refused(flags: dict[str, object], why: str) -> None:
    refused(why, **(MIXED | flags))


def test_models_that_cannot_be_read_apart_are_refused() -> None:
    replace = msgspec.structs.replace
    refused("--encode-workers", model=replace(LLAMA, multimodal=True), encode_workers=1, **MIXED)
    pooling = PoolingConfig(whole_prompts=True, share_prefixes=False)
    refused("pooling model", model=replace(LLAMA, pooling=pooling), **MIXED)
    refused("recurrent layers", model=replace(LLAMA, reaches=(KvSpec(state_interval=512),)), **MIXED)
    missing = replace(HOST, gpu=GpuReport(reason="there is no CUDA driver"))
    refused("--prefill-device cuda: there is no CUDA driver", machine=missing, **MIXED)


def test_two_families_of_one_processor() -> None:
    made = plan(prefill_kernels="portable", allow_mixed_numerics=True)
    assert made.prefill_plan is not None
    assert (made.prefill_plan.device, made.prefill_plan.family, made.prefill_plan.has_own_memory) == (
        "cpu",
        "portable",
        False,
    )
    assert all(w.lent_cores for w in made.workers)
    oracle = plan(prefill_kernels="reference", allow_mixed_numerics=True, prefill=2)
    assert oracle.prefill_plan is not None
    assert oracle.prefill_plan.has_own_memory
    assert not any(w.lent_cores or w.loans for w in oracle.workers)
    refused("turn them round", kernels="reference", prefill_kernels="portable", allow_mixed_numerics=True)
    refused("--prefill-kernels avx2", prefill_kernels="avx2", allow_mixed_numerics=True)


def joined(role: Role, **flags: object) -> ServePlan:
    config = WorkerServeConfig(role=role, **flags)  # type: ignore[arg-type]
    return resolve_worker(config, WorkerId("w"), HOST, LLAMA)


def test_a_joined_worker_names_the_class_of_the_others() -> None:
    reads = joined(Role.PREFILL, mixed_with="cpp-avx512_bf16-1-bf16")
    assert (reads.device, reads.family, reads.mixed_numerics) == ("cuda", "triton", True)
    assert reads.scheduler.pages * reads.page_bytes <= HOST.memory_bytes // 2  # twins of all of them
    writes = joined(Role.DECODE, mixed_with="triton-1-sm90-3.6.0-torch2.11.0-bf16")
    assert (writes.device, writes.mixed_with) == ("cpu", "triton-1-sm90-3.6.0-torch2.11.0-bf16")
    for role, flags, why in (
        (Role.BOTH, {}, "use --role prefill or --role decode"),
        (Role.DECODE, {"device": "cuda"}, "--role decode serves one phase"),
        (Role.DECODE, {"mixed_with": "a>b"}, "expected the numerics class"),
        (Role.DECODE, {"mixed_with": ""}, "expected the numerics class"),
        (Role.DECODE, {"activation_dtype": "int8"}, "both phases need inputs of one type"),
    ):
        with pytest.raises(ConfigError, match=why):
            joined(role, **({"mixed_with": "cpp-x"} | flags))
    with pytest.raises(ConfigError, match="--device cuda: --role prefill serves one phase"):
        joined(Role.PREFILL, device="cuda")


@pytest.mark.parametrize("flags", [{"kernels": "reference"}, {"device": "cuda"}])
def test_a_joined_reader_whose_pages_nobody_stores_is_given_no_store(flags: dict[str, object]) -> None:
    store = {"mixed_with": "cpp-x", "kv_redis": "redis://h:6379/0"}
    with pytest.raises(ConfigError, match=r"--kv-redis with --mixed-with cpp-x .*: stored pages .* leave it out"):
        joined(Role.PREFILL, **store, **flags)
    assert joined(Role.DECODE, **store, kernels="reference").mixed_with == "cpp-x"
    assert joined(Role.PREFILL, **store).family == "avx512_bf16"


def test_flags_of_either_command(tmp_path) -> None:
    config = load_serve({"prefill_device": "cuda", "allow_mixed_numerics": True}, {})
    assert (config.prefill_device, config.allow_mixed_numerics) == ("cuda", True)
    with pytest.raises(ConfigError, match="--prefill-device"):
        load_serve({"prefill_device": "tpu"}, {})
    with pytest.raises(ConfigError, match="--prefill-device cuda is for one model"):
        load_serve({"prefill_device": "cuda", "catalogue": "models.toml"}, {})
    with pytest.raises(ConfigError, match="--prefill-device belongs to them"):
        load_serve({"prefill_device": "cuda", "join": ["tcp://h:1"], "keys": str(tmp_path)}, {})
    assert load_worker({"keys": "k", "mixed_with": "cpp-x"}, {}).mixed_with == "cpp-x"


def test_the_third_class_is_neither_and_says_both() -> None:
    numerics = fleet_numerics("triton-1", "cpp-1")
    assert numerics == "triton-1>cpp-1"
    assert ModelIdentity(fingerprint="f", numerics=numerics).mixed
    assert not ModelIdentity(fingerprint="f", numerics=fleet_numerics("cpp-1", "cpp-1")).mixed
