"""Every "auto", for machines of all sizes."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.config.auto_mesh import BARRIER_S, NODE_BYTES_S, OPERATIONS, ReadWeights, WorkerCores, token_s
from penstock.config.device import RUNTIME_BYTES, excludes_gpu
from penstock.config.facts import ExtraWeights, GpuFacts, GpuReport, MachineFacts, ModelFacts, PhysicalCore
from penstock.config.kv_memory import format_size
from penstock.config.limits import RequestLimits
from penstock.config.load import parse_size
from penstock.config.mesh import Mesh, NodePlace, WorkerPart
from penstock.config.resolve import ServePlan, resolve, resolve_kv_store, resolve_node, resolve_worker
from penstock.config.schema import COMPILED_GRAMMARS_BYTES, PoolingConfig, ServeConfig, WorkerServeConfig
from penstock.errors import ConfigError
from penstock.kv_spec import FULL_ATTENTION, KvSpec
from penstock.types import PAGE_TOKENS, Role, WorkerId

GIB = 1 << 30
LAPTOP = MachineFacts(cpus=(0, 1), cores=2, memory_bytes=16 * GIB, kernel_families=("avx512", "avx2", "portable"))
SERVER = MachineFacts(
    cpus=tuple(range(64)),
    cores=32,
    topology=tuple(PhysicalCore(cpus=(i, i + 32)) for i in range(32)),
    memory_bytes=256 * GIB,
    kernel_families=("avx512_bf16",),
)
STORY = ModelFacts(
    name="storyteller", max_positions=2048, parameters=10_000_000, auto_dtype="bf16", page_bytes_bf16=32 << 10
)
LLAMA = ModelFacts(
    name="llama-8b",
    max_positions=131_072,
    parameters=8_000_000_000,
    auto_dtype="bf16",
    page_bytes_bf16=2 << 20,
    page_bytes_fp8=129 << 13,
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
    assert (made.connector, made.family, made.dtype) == ("shm", "avx512", "bf16")
    assert made.scheduler.max_model_len == 2048
    assert made.scheduler.pages == 64 * 2048 // PAGE_TOKENS  # 64 full contexts, not a tenth of the memory
    assert made.notes == ()


def test_aggregated_is_one_worker_with_all_cores() -> None:
    made = plan(aggregated=True)
    assert [(w.worker, w.role, w.threads) for w in made.workers] == [("both-0", Role.BOTH, 2)]
    assert not made.split


def test_encode_workers_have_cores_and_no_part_of_the_memory() -> None:
    seeing = msgspec.structs.replace(LLAMA, multimodal=True)
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
    refused("--encode-workers", "takes no images", encode_workers=1)
    with pytest.raises(ConfigError, match="--role encode: storyteller takes no images"):
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
        refused(f"--{next(iter(flag)).replace('_', '-')}: bge is a pooling model", model=bge, **flag)
    with pytest.raises(ConfigError, match="--role prefill: bge is a pooling model"):
        resolve_worker(WorkerServeConfig(role=Role.PREFILL), WorkerId("w"), LAPTOP, bge)


def test_a_server_gives_each_worker_cores_of_its_own() -> None:
    made = plan(SERVER, LLAMA, prefill=2, decode=2)
    assert [w.threads for w in made.workers] == [8] * 4
    pinned = [cpu for w in made.workers for cpu in w.cpus]
    assert sorted(pinned) == list(range(64))


def test_what_was_asked_for_is_done() -> None:
    made = plan(transfer="tcp", dtype="fp32", kernels="portable", threads=3, max_chunk_tokens=16, max_running=4)
    assert (made.connector, made.dtype, made.family) == ("tcp", "fp32", "portable")
    assert made.page_bytes == 2 * STORY.page_bytes_bf16
    assert {w.threads for w in made.workers} == {3}
    assert (made.scheduler.max_chunk_tokens, made.scheduler.max_running) == (16, 4)


def test_an_unknown_family_names_those_there_are() -> None:
    refused("--kernels neon", "avx512, avx2, portable", kernels="neon")
    refused("penstock doctor", machine=msgspec.structs.replace(LAPTOP, kernel_families=()))


def test_pages_of_codes_are_a_gpus() -> None:
    """Twice as many of them; refused by name where nobody has kernels for them, or states would have to be codes."""
    plain, coded = (plan(GPU_SERVER, LLAMA, kv_dtype=kept) for kept in ("auto", "fp8_e4m3"))
    assert (plain.kv_dtype, coded.kv_dtype) == ("bf16", "fp8_e4m3")
    assert (plain.page_bytes, coded.page_bytes) == (LLAMA.page_bytes_bf16, LLAMA.page_bytes_fp8)
    room = H200.free_bytes - 2 * LLAMA.parameters - RUNTIME_BYTES
    assert coded.scheduler.pages == room // coded.page_bytes
    assert plan(kv_dtype="auto", dtype="fp32").kv_dtype == "fp32"
    tried = plan(msgspec.structs.replace(LAPTOP, kernel_families=("avx2", "reference")), LLAMA,
                 kernels="reference", kv_dtype="fp8_e4m3", kv_memory=GIB // 4, max_model_len=256)  # fmt: skip
    assert (tried.family, tried.kv_dtype) == ("reference", "fp8_e4m3")
    refused("--kv-dtype fp8_e4m3: the kernels of processors (avx512)", "--kernels reference", kv_dtype="fp8_e4m3")
    refused("it takes a GPU (NVIDIA H200 is not used: --threads is", machine=GPU_SERVER, kv_dtype="fp8_e4m3", threads=2)
    recurrent = msgspec.structs.replace(
        LLAMA, name="qwen", reaches=(FULL_ATTENTION, KvSpec(window=1, state_interval=512))
    )
    refused("qwen has recurrent layers", machine=GPU_SERVER, model=recurrent, kv_dtype="fp8_e4m3", device="cuda")


def test_inputs_of_eight_bits_are_a_processors() -> None:
    assert plan().activation_dtype is None
    assert plan(activation_dtype="int8").activation_dtype == "int8"
    refused("--activation-dtype int8: the kernels of GPUs", "use --device cpu",
            machine=GPU_SERVER, model=LLAMA, activation_dtype="int8")  # fmt: skip
    assert plan(GPU_SERVER, LLAMA, activation_dtype="int8", device="cpu").activation_dtype == "int8"


H200 = GpuFacts(name="NVIDIA H200", capability=(9, 0), total_bytes=140 * GIB, free_bytes=139 * GIB)
GPU_SERVER = msgspec.structs.replace(SERVER, gpu=GpuReport(gpu=H200, reason=""))


def test_a_gpu_is_found_and_serves_both_phases_from_what_is_free() -> None:
    model = msgspec.structs.replace(LLAMA, activation_bytes=GIB // 2)
    made = plan(GPU_SERVER, model)
    assert (made.device, made.family, made.split) == ("cuda", "triton", False)
    assert [(w.worker, w.role) for w in made.workers] == [("both-0", Role.BOTH)]
    left = H200.free_bytes - 2 * LLAMA.parameters - GIB // 2 - RUNTIME_BYTES
    assert made.scheduler.pages == left // LLAMA.page_bytes_bf16
    assert "on NVIDIA H200: 139.0 of 140.0 GiB free; chosen automatically" in made.notes[0]
    assert plan(GPU_SERVER, model, device="cuda").notes[0].endswith("by --device cuda")
    small = plan(GPU_SERVER, model, kv_memory=GIB, max_model_len=512)
    assert small.scheduler.pages == GIB // LLAMA.page_bytes_bf16
    refused("free besides the weights", machine=GPU_SERVER, model=model, kv_memory=130 * GIB)


@pytest.mark.parametrize(
    ("flags", "why"),
    [
        ({"prefill": 1}, "--prefill asks for workers of one phase"),
        ({"decode_cores": "0-3"}, "--decode-cores asks for workers of one phase"),
        ({"kernels": "avx512_bf16"}, "--kernels avx512_bf16 are for CPUs"),
        ({"kv_host": GIB}, "--kv-host is for CPU workers"),
    ],
)
def test_a_gpu_is_left_alone_where_that_was_meant(flags: dict[str, object], why: str) -> None:
    made = plan(GPU_SERVER, STORY, **flags)
    assert (made.device, made.split) == ("cpu", True)
    assert made.notes[0] == f"NVIDIA H200 is not used: {why}; to use it add --device cuda"


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"parameters": 80 * 10**9}, "llama-8b needs 149GiB for its weights, 139GiB are free there"),
        ({"multimodal": True}, "takes images or audio"),
    ],
)
def test_a_model_that_does_not_suit_a_gpu_is_served_beside_it(changes: dict[str, object], why: str) -> None:
    made = plan(GPU_SERVER, msgspec.structs.replace(LLAMA, **changes))
    assert made.device == "cpu"
    assert why in made.notes[0]


def test_a_model_with_recurrent_layers_suits_a_gpu() -> None:
    recurrent = msgspec.structs.replace(LLAMA, reaches=(FULL_ATTENTION, KvSpec(window=1, state_interval=512)))
    assert plan(GPU_SERVER, recurrent).device == "cuda"


def test_a_gpu_that_was_asked_for_is_used_or_refused_with_the_reason() -> None:
    refused("--device cuda: --prefill asks for workers of one phase", machine=GPU_SERVER, device="cuda", prefill=1)
    refused("NVIDIA H200 has 139GiB free", machine=GPU_SERVER, model=msgspec.structs.replace(
        LLAMA, parameters=80 * 10**9), device="cuda")  # fmt: skip
    refused("a GPU has triton and, to check them, reference", machine=GPU_SERVER, device="cuda", kernels="avx2")
    assert plan(GPU_SERVER, device="cuda", kernels="reference").family == "reference"
    lacking = msgspec.structs.replace(
        SERVER, gpu=GpuReport(reason="there is a CUDA driver, but no torch", remedy="pip")
    )
    refused("--device cuda: there is a CUDA driver, but no torch; pip", machine=lacking, device="cuda")
    assert plan(lacking).notes[0] == "no GPU is used: there is a CUDA driver, but no torch (pip)"
    with pytest.raises(ConfigError, match="--kv-disk with --device cuda: pages in its memory are not stored"):
        resolve_kv_store(ServeConfig(kv_disk="/d"), "cuda", generates=True)


def test_a_mooncake_store_is_asked_for_by_its_master() -> None:
    key = ServeConfig(kv_mooncake="moon:50051", kv_mooncake_size=64 << 20, kv_key="/k")
    made = resolve_kv_store(key, "cpu", generates=True)
    assert (made.mooncake, made.mooncake_bytes, made.key_file) == ("moon:50051", 64 << 20, "/k")
    assert resolve_kv_store(ServeConfig(), "cpu", generates=True).mooncake is None
    with pytest.raises(ConfigError, match="add --kv-mooncake HOST:PORT"):
        resolve_kv_store(ServeConfig(kv_mooncake_size=1), "cpu", generates=True)
    with pytest.raises(ConfigError, match="--kv-key is for pages on disk or in a remote tier"):
        resolve_kv_store(ServeConfig(kv_key="/k", kv_host=1 << 20), "cpu", generates=True)
    with pytest.raises(ConfigError, match="--kv-mooncake with --device cuda"):
        resolve_kv_store(ServeConfig(kv_mooncake="moon:50051"), "cuda", generates=True)


@pytest.mark.parametrize("machine", [SERVER, GPU_SERVER])
def test_gpu_lanes_were_removed_and_say_so(machine: MachineFacts) -> None:
    assert any("--gpu-lanes is ignored" in note for note in plan(machine, LLAMA, gpu_lanes="auto").notes)
    assert not any("lanes" in note for note in plan(machine, LLAMA).notes)


def test_no_gpu_is_looked_for_where_flags_rule_it_out() -> None:
    """``--device cuda`` is told what is wrong with them."""
    assert not excludes_gpu(ServeConfig())
    assert excludes_gpu(ServeConfig(device="cpu"))
    for flags in ({"prefill": 1}, {"threads": 2}, {"kv_disk": "/d"}, {"kernels": "avx2"}):
        assert excludes_gpu(ServeConfig(**flags))
        assert not excludes_gpu(ServeConfig(device="cuda", **flags))


def test_a_joined_worker_has_the_machine_to_itself_and_speaks_tcp() -> None:
    made = resolve_worker(WorkerServeConfig(role=Role.DECODE), WorkerId("d"), LAPTOP, STORY)
    assert [(w.worker, w.role, w.threads) for w in made.workers] == [("d", Role.DECODE, 2)]
    assert made.connector == "tcp"
    with pytest.raises(ConfigError, match="--role decode serves one phase"):
        resolve_worker(WorkerServeConfig(role=Role.DECODE, device="cuda"), WorkerId("d"), GPU_SERVER, STORY)
    there = resolve_worker(WorkerServeConfig(), WorkerId("b"), GPU_SERVER, STORY)
    assert (there.device, there.workers[0].role) == ("cuda", Role.BOTH)


@pytest.mark.parametrize(
    ("listen", "transfer", "encrypts", "carrier"),
    [
        ("tcp://127.0.0.1:9000", "auto", False, "tcp"),
        ("tcp://127.0.0.1:9000", "curve", True, "curve"),
        ("tcp://localhost:9000", "auto", True, "tcp"),
        ("tcp://[::1]:9000", "auto", True, "tcp"),
        ("tcp://127.example.org:9000", "auto", True, "tcp-sealed"),
        ("tcp://10.0.0.1:9000", "auto", True, "tcp-sealed"),
        ("tcp://10.0.0.1:9000", "auto", False, "curve"),
        ("tcp://10.0.0.1:9000", "tcp", True, "tcp-sealed"),
        ("tcp://10.0.0.1:9000", "tcp-clear", True, "tcp"),
        ("tcp://0.0.0.0:9000", "auto", True, "tcp-sealed"),
        ("tcp://[::1]:9000", "tcp", False, "tcp"),
    ],
)
def test_pages_leave_the_host_encrypted_unless_asked_otherwise(
    listen: str, transfer: str, encrypts: bool, carrier: str
) -> None:
    config = WorkerServeConfig(listen=listen, transfer=transfer, pages_port=9001)
    made = resolve_worker(config, WorkerId("d"), msgspec.structs.replace(LAPTOP, can_encrypt_pages=encrypts), STORY)
    assert (made.connector, made.pages_port) == (carrier, 9001)


def test_what_cannot_be_encrypted_is_refused_with_what_would_work() -> None:
    config = WorkerServeConfig(listen="tcp://10.0.0.1:9000", transfer="tcp")
    with pytest.raises(ConfigError, match=r"penstock\[encryption\].*--transfer curve.*tcp-clear"):
        resolve_worker(config, WorkerId("d"), LAPTOP, STORY)


def test_a_long_context_is_cut_to_the_memory_and_told() -> None:
    made = plan(msgspec.structs.replace(LAPTOP, memory_bytes=20 * GIB), LLAMA)
    assert 256 <= made.scheduler.max_model_len < 131_072
    assert made.scheduler.pages * PAGE_TOKENS >= made.scheduler.max_model_len
    (note,) = made.notes
    assert "context cut from 131072" in note
    assert "--kv-memory 16GiB would hold all" in note


def test_windows_take_less_and_leave_longer_contexts() -> None:
    """A group of layers with a window of 1024 needs 64 pages for it, 128 for a step, and one that is given back."""
    windowed = msgspec.structs.replace(STORY, max_positions=16_384, reaches=(FULL_ATTENTION, KvSpec(window=1024)))
    made = plan(model=windowed, kv_memory=1200 * STORY.page_bytes_bf16)
    assert made.scheduler.reaches == windowed.reaches
    assert made.scheduler.max_model_len == (1200 - 64 - 128 - 1) * PAGE_TOKENS
    small = plan(model=windowed, kv_memory=1200 * STORY.page_bytes_bf16, max_chunk_tokens=64)
    assert small.scheduler.max_model_len == 16_384
    refused("one context of 16384 tokens needs", "--max-model-len 112", model=windowed, max_model_len=16_384,
            kv_memory=15 * STORY.page_bytes_bf16)  # fmt: skip


def test_nothing_is_guessed_for_a_model_that_keeps_states() -> None:
    model = msgspec.structs.replace(STORY, reaches=(FULL_ATTENTION, KvSpec(window=1, state_interval=512)))
    made = plan(model=model, speculate="lookup")
    assert made.scheduler.max_draft_tokens == 0
    assert any("--speculate is off" in note for note in made.notes)
    assert not any("--speculate" in note for note in plan(model=model).notes)


def test_a_context_that_was_asked_for_fits_or_is_refused() -> None:
    size = 100 * STORY.page_bytes_bf16
    assert plan(kv_memory=size, max_model_len=1600).scheduler.max_model_len == 1600
    refused("one context of 1601 tokens needs 3232KiB", "holds 1600", "3232KiB or --max-model-len 1600",
            kv_memory=size, max_model_len=1601)  # fmt: skip
    assert plan(kv_memory=size).scheduler.max_model_len == 1600
    refused("--kv-memory 4MiB", kv_memory=1)


def test_more_than_the_model_or_the_machine_has_is_refused() -> None:
    refused("--max-model-len 4096", "has 2048 positions", max_model_len=4096)
    refused("14GiB for its weights", model=LLAMA, machine=msgspec.structs.replace(
        LAPTOP, memory_bytes=12 * GIB))  # fmt: skip
    refused("--kv-memory 12GiB for each of 2 workers", kv_memory=12 * GIB)


DECODING = msgspec.structs.replace(
    LAPTOP, memory_bytes=64 * GIB, kernel_families=("avx512_bf16",), decoding_families=("avx512_bf16",)
)
"""Compressed weights stay compressed there."""


def test_decoded_copies_take_only_what_nothing_else_was_planned_for() -> None:
    made = plan(DECODING, LLAMA)
    assert made.decoded_weights is not None
    assert made.decoded_weights.all_or_none
    planned = 16_000_000_000 + 2 * (made.scheduler.pages * LLAMA.page_bytes_bf16 + COMPILED_GRAMMARS_BYTES)
    assert made.decoded_weights.nbytes == 64 * GIB - planned - int(6.4 * GIB)  # a reserve of a tenth of all
    stored = plan(DECODING, LLAMA, kv_host=GIB, response_cache=GIB)
    assert stored.decoded_weights is not None
    assert stored.decoded_weights.nbytes == made.decoded_weights.nbytes - 2 * GIB
    full = plan(DECODING, LLAMA, kv_memory=22 * GIB)
    assert full.decoded_weights is not None
    assert full.decoded_weights.nbytes == 0


def test_memory_for_decoded_copies_is_set_aside_before_pages_are() -> None:
    auto, asked = plan(DECODING, LLAMA), plan(DECODING, LLAMA, decoded_weights=10 * GIB)
    assert asked.decoded_weights is not None
    assert (asked.decoded_weights.nbytes, asked.decoded_weights.all_or_none) == (10 * GIB, False)
    assert asked.scheduler.pages < auto.scheduler.pages
    refused("14GiB for its weights and 60GiB for --decoded-weights", machine=DECODING, model=LLAMA,
            decoded_weights=60 * GIB)  # fmt: skip
    refused("free besides the weights", machine=DECODING, model=LLAMA, decoded_weights=20 * GIB, kv_memory=20 * GIB)
    none = plan(DECODING, LLAMA, decoded_weights=0)
    assert none.decoded_weights is None
    assert none.scheduler.pages == auto.scheduler.pages


def test_where_weights_are_unpacked_no_memory_is_kept_for_copies() -> None:
    asked = plan(decoded_weights=GIB)
    assert (asked.decoded_weights, plan().decoded_weights) == (None, None)
    assert asked.scheduler.pages == plan().scheduler.pages
    assert [note for note in asked.notes if note.startswith("--decoded-weights changes nothing here")]
    assert not plan(decoded_weights=0).notes
    assert plan(DECODING, LLAMA, dtype="fp32").decoded_weights is None


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
    assert parse_size(format_size(count)) <= count <= parse_size(format_size(count, up=True))


def test_what_is_loaded_beside_the_model_takes_its_room() -> None:
    head = ExtraWeights(name="draft head", shared_bytes=40 * GIB, worker_bytes=10 * GIB, why="")
    both = msgspec.structs.replace(LLAMA, extra_weights=(head,))
    alone, beside = (plan(SERVER, model, max_model_len=8192).scheduler.pages for model in (LLAMA, both))
    fewer = (alone - beside) * LLAMA.page_bytes_bf16
    assert fewer == pytest.approx(0.1 * (40 + 2 * 10) * GIB / 2, rel=1e-3)
    adapters = msgspec.structs.replace(head, name="LoRA adapters", shared_bytes=200 * GIB)
    wide = msgspec.structs.replace(LLAMA, extra_weights=(head, adapters))
    refused("60GiB for draft head", "220GiB for LoRA adapters", "leave out", machine=SERVER, model=wide)
    assert head.bytes(2, number_bytes=4) == 2 * head.bytes(2)


def test_a_prompt_that_is_read_gently_has_its_first_token_in_time() -> None:
    assert plan(limits=RequestLimits(first_byte_s=30.0)).scheduler.gentle_read_s == 15.0
    worker = resolve_worker(WorkerServeConfig(role=Role.BOTH), WorkerId("b"), LAPTOP, STORY)
    assert worker.scheduler.gentle_read_s == RequestLimits().first_byte_s / 2


def test_compiled_grammars_of_all_workers_have_their_part_of_the_memory() -> None:
    small = msgspec.structs.replace(LAPTOP, memory_bytes=2 * GIB)
    long = msgspec.structs.replace(STORY, max_positions=1 << 19)  # one context of which takes a gigabyte
    pages = plan(small, long).scheduler.pages * long.page_bytes_bf16
    weights = long.parameters * 2
    assert 2 * pages <= (2 * GIB - weights - 2 * COMPILED_GRAMMARS_BYTES) // 2


# --- ranks -----------------------------------------------------------------------------------------------------------


def test_ranks_divide_the_cores_of_their_worker() -> None:
    made = plan(SERVER, LLAMA, prefill_parallel="tp4", decode_parallel="tp2,pp2")
    assert [worker.mesh.name for worker in made.workers] == ["tp4", "tp2,pp2"]
    for worker in made.workers:
        assert [rank.threads for rank in worker.ranks] == [4] * 4
        assert sorted(cpu for rank in worker.ranks for cpu in rank.cpus) == list(worker.cpus)
        assert all(len(rank.cpus) == 8 and {cpu % 32 for cpu in rank.cpus} < set(worker.cpus) for rank in worker.ranks)
        assert not worker.crowded
        assert (worker.lent_cores, worker.loans) == (0, ())
    assert (made.notes, made.warnings) == ((), ())
    assert [rank.threads for rank in plan(SERVER, LLAMA, parallel="tp2", threads=3).workers[0].ranks] == [3, 3]


def test_more_ranks_than_cores_are_carried_out_with_a_warning() -> None:
    made = plan(aggregated=True, parallel="tp2,pp2")
    (worker,) = made.workers
    assert [(rank.threads, rank.cpus) for rank in worker.ranks] == [(1, ())] * 4
    assert worker.crowded
    (warning,) = made.warnings
    assert warning.startswith("both-0 has 4 ranks on 2 cores: each exchange waits")
    assert plan(aggregated=True, parallel="tp2").warnings == ()


def test_one_rank_is_a_worker_as_ever() -> None:
    assert plan(parallel="tp1").workers == plan().workers
    made = plan(parallel="auto")
    assert made.workers == plan().workers
    (note,) = made.notes
    assert note.startswith("--parallel auto: prefill-0, decode-0: one process, ")


SMALL = msgspec.structs.replace(
    LLAMA,
    parameters=100_000_000,
    token_numbers=100_000_000,
    layers=10,
    hidden=512,
    tensor_ways=(2, 4, 8),
)
LARGE = msgspec.structs.replace(
    LLAMA, token_numbers=LLAMA.parameters, layers=32, hidden=4096, tensor_ways=(2, 4, 8), max_positions=4096
)


def machine(cores: int, nodes: int = 1, memory: int = 512 * GIB) -> MachineFacts:
    topology = tuple(PhysicalCore(cpus=(i,), numa_node=i * nodes // cores) for i in range(cores))
    facts = msgspec.structs.replace(SERVER, cpus=tuple(range(cores)), cores=cores, topology=topology)
    return msgspec.structs.replace(facts, memory_bytes=memory)


def auto(machine: MachineFacts, model: ModelFacts, **flags: object) -> tuple[list[str], str]:
    """The mesh of each worker, and the line about it."""
    made = plan(machine, model, parallel="auto", **flags)
    (note,) = [note for note in made.notes if note.startswith("--parallel auto: ")]
    assert "\n" not in note
    assert all(not worker.crowded for worker in made.workers)
    cpus = [cpu for worker in made.workers for rank in worker.ranks for cpu in rank.cpus]
    assert len(set(cpus)) == len(cpus)
    return [worker.mesh.name for worker in made.workers], note


@pytest.mark.parametrize("nodes", [1, 2, 4])
def test_auto_reads_a_large_model_with_one_process_on_any_number_of_nodes(nodes: int) -> None:
    """Ranks read what is interleaved over the nodes as fast as threads do, and exchange besides."""
    meshes, note = auto(machine(64, nodes), LARGE, aggregated=True)
    assert meshes == ["tp1"]
    ms = 1e3 * 16e9 / (nodes * NODE_BYTES_S) + 1e3 * 32 * OPERATIONS * BARRIER_S * 64
    assert f"one process, {ms:.3g} ms a token predicted on 64 cores, tp" in note
    assert f"14GiB of weights in 512GiB free on {nodes} NUMA node" in note


def test_auto_divides_a_small_model_over_more_cores_than_its_threads_fill() -> None:
    """The threads of one process wait for each other longer than they read."""
    few, many = machine(8, 2), machine(128, 2)
    assert auto(few, SMALL, aggregated=True)[0] == ["tp1"]
    meshes, note = auto(many, SMALL, aggregated=True)
    own = WorkerCores(128, 2)
    read = ReadWeights(SMALL.token_numbers, 2, SMALL.layers, SMALL.hidden)
    seconds = {ways: token_s(read, Role.BOTH, own, Mesh(tensor=ways)) for ways in (1, 2, 4, 8)}
    (best,) = [ways for ways in seconds if seconds[ways] == min(seconds.values())]
    assert best > 1
    assert meshes == [f"tp{best}"]
    assert f"tp{best}, {1e3 * seconds[best]:.3g} ms a token predicted on 128 cores, one process" in note


def test_auto_decides_for_each_role_and_has_room_for_a_second_copy_or_not() -> None:
    """Chunks of prompts keep threads busy; decode's ranks cut weights that prefill has whole."""
    assert auto(machine(256, 2), SMALL)[0][0] == "tp1"
    assert auto(machine(256, 2), SMALL)[0][1] != "tp1"
    scarce = machine(256, 2, memory=350 << 20)
    meshes, note = auto(scarce, msgspec.structs.replace(SMALL, max_positions=256, page_bytes_bf16=1 << 10))
    assert meshes == ["tp1", "tp1"]
    assert "ranks need a second copy of 190MiB of weights" in note
    because = "needs 14GiB for its weights, this machine has 8GiB free"
    refused(because, machine=machine(64, 2, 8 * GIB), model=LARGE, parallel="auto")


def test_auto_never_lays_two_ranks_on_one_core_and_divides_nothing_that_cannot_be() -> None:
    meshes, note = auto(machine(1), SMALL, aggregated=True)
    assert meshes == ["tp1"]
    assert "on 1 core: no two ranks would have a core each" in note
    assert auto(machine(128), SMALL, aggregated=True, threads=128)[0] == ["tp1"]
    latent = msgspec.structs.replace(SMALL, tensor_ways=(), why_not_divided="latent attention cannot be divided")
    for model, flags, because in (
        (latent, {}, "latent attention cannot be divided"),
        (SMALL, {"speculate": "lookup"}, "with speculation a model is not divided yet"),
        (SMALL, {"lora": ("a=b",)}, "with LoRA adapters"),
    ):
        meshes, note = auto(machine(128), model, aggregated=True, **flags)
        assert meshes == ["tp1"]
        assert because in note


def test_auto_holds_for_the_role_that_asks_for_it() -> None:
    made = plan(machine(256), SMALL, decode_parallel="auto", prefill_parallel="pp2")
    assert made.workers[0].mesh.name == "pp2"
    assert made.workers[1].mesh.tensor > 1
    assert plan(machine(256), SMALL).workers[1].mesh.ranks == 1  # nobody asked


def test_sizes_say_what_parallel_says() -> None:
    assert plan(tensor_parallel_size=2).workers == plan(parallel="tp2").workers
    both = plan(aggregated=True, tensor_parallel_size=2, pipeline_parallel_size=2)
    assert both.workers == plan(aggregated=True, parallel="tp2,pp2").workers
    refused("--pipeline-parallel-size says what --parallel tp2 says", parallel="tp2", pipeline_parallel_size=2)
    refused("tensor parallelism takes 1, 2, 4 or 8 ranks", tensor_parallel_size=3)


def test_plans_that_nothing_carries_out_are_refused() -> None:
    refused("plan 'two' is not understood", parallel="two")
    refused("expert parallelism is not supported yet", parallel="ep2")
    gpu = GpuReport(gpu=GpuFacts(name="H100", capability=(9, 0), free_bytes=80 * GIB, total_bytes=80 * GIB))
    refused("over GPUs it cannot yet", machine=msgspec.structs.replace(SERVER, gpu=gpu), device="cuda", parallel="tp2")


ENCRYPTING = msgspec.structs.replace(LAPTOP, can_encrypt_pages=True)


def on_nodes(machine: MachineFacts = ENCRYPTING, **flags: object) -> ServePlan:
    asked = {"parallel": "tp2,pp3", "nnodes": 3, "master_addr": "tcp://10.0.0.1:9100"} | flags
    config = msgspec.convert({name: value for name, value in asked.items() if value is not None}, WorkerServeConfig)
    return resolve_worker(config, WorkerId("w"), machine, STORY)


def test_a_machine_of_a_worker_has_cores_for_its_own_ranks() -> None:
    (worker,) = on_nodes(node_rank=1).workers
    assert (worker.nodes.nodes, worker.nodes.node, worker.mesh.ranks) == (3, 1, 6)
    assert len(worker.ranks) == 2
    assert [worker.cores_of(rank) for rank in (2, 3)] == list(worker.ranks)
    (alone,) = on_nodes(parallel="pp3").workers
    assert [rank.threads for rank in alone.ranks] == [2]
    assert on_nodes(parallel="pp3").warnings == ()


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ({"node_rank": 3}, "--node-rank 3 of --nnodes 3: 0 to 2 are possible"),
        ({"master_addr": None}, "--nnodes: add --master-addr tcp://HOST:PORT"),
        ({"nnodes": None}, "--master-addr is for a worker on several machines: add --nnodes"),
        ({"parallel": "tp2"}, "each machine has a stage at least, and tp2 has 1; --parallel tp2,pp3 would work"),
        ({"parallel": None}, "and tp1 has 1; --parallel pp3 would work"),
        ({"role": "decode"}, "--role decode: a worker on several machines transfers no KV pages"),
        ({"kv_host": 1 << 30}, "--kv-host: KV pages of a worker on several machines are not stored yet"),
    ],
)
def test_machines_that_make_no_worker_are_refused_in_one_line(flags: dict[str, object], says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        on_nodes(**flags)
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


PP2 = WorkerPart(mesh=Mesh(pipeline=2), place=NodePlace(nodes=2, node=1))


def on_node(machine: MachineFacts = ENCRYPTING) -> ServePlan:
    """A node with a worker of its own, in two ranks, and a part of another one's."""
    roles = ((WorkerId("b-both-0"), Role.BOTH), (WorkerId("a-both-0.1"), Role.BOTH))
    config = ServeConfig(parallel="tp2")
    return resolve_node(config, roles, "10.0.0.2", machine, STORY, parts={WorkerId("a-both-0.1"): PP2})


def test_a_node_has_workers_of_its_own_beside_a_part_of_another_nodes() -> None:
    own, part = on_node().workers
    assert (own.mesh.name, own.nodes, len(own.ranks)) == ("tp2", NodePlace(), 2)
    assert (part.mesh, part.nodes, len(part.ranks)) == (PP2.mesh, PP2.place, 1)
    assert part.cores_of(0).threads >= 1


def test_machines_that_cannot_encrypt_make_no_worker() -> None:
    with pytest.raises(ConfigError, match=r"pip install 'penstock\[encryption\]'"):
        on_node(LAPTOP)
    with pytest.raises(ConfigError, match=r"pip install 'penstock\[encryption\]'"):
        on_nodes(LAPTOP)
