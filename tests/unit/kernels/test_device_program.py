"""A device's program against steps run as they are: padding, runs without the host in between, and the rest."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from kernel_cases import TRITONS
from torch import Tensor

from penstock.engine.runner import input_batch
from penstock.kernels.operands import StepBatch
from penstock.kernels.ops import CapturableProgram, DirectProgram, MultiStepProgram
from penstock.kernels.sampling import GumbelRows
from penstock.kernels.select import REFERENCE, TRITON
from penstock.kernels.triton import attention
from penstock.kernels.triton.graphs import MOST_REFUSALS, CapturedGraph, CudaGraphRunner, EagerRunner, Work
from penstock.kernels.triton.program import TRIED_PROMPTS, DeviceProgram
from penstock.kernels.triton.staging import DeviceArrays, DeviceGumbelRows, StepShape, buckets, by_group, fill
from penstock.parallel import sizes as model_sizes
from penstock.types import SamplingParams
from runner_bench import RunnerBench
from tiny_models import llama_config, write_model

CPU = torch.device("cpu")
VOCAB = 67
CONFIG = llama_config(vocab_size=VOCAB, num_hidden_layers=2, hidden_size=32, intermediate_size=48, head_dim=16)
PROMPTS = (5, 16, 33)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"), CONFIG, seed=3)


@dataclass(frozen=True)
class HostPick:
    """Draws on the host what a device would draw by itself."""

    ops: Any

    def __call__(self, logits_RV: Tensor, draws: DeviceGumbelRows) -> Tensor:
        picks = GumbelRows(
            draws.seeds_R.numpy().view(np.uint64),
            draws.positions_R.numpy().view(np.uint32),
            draws.choices_R.numpy().view(np.uint32),
            draws.temperatures_R.numpy(),
            np.zeros(len(draws.seeds_R), np.int32),
        )
        drawn = self.ops.sample(logits_RV, picks.rows())
        return torch.tensor([one.token for one in drawn], dtype=torch.int32)


def bench_of(folder: Path, family: str, dtype: str, *, device: bool, where: str = "cpu") -> RunnerBench:
    bench = RunnerBench(folder, dtype, pages=60, family=family, device=where)
    if device:
        pick = HostPick(bench.ops)
        bench.runner.program = DeviceProgram(
            bench.ops, bench.model, bench.kv, device=torch.device("cpu"), pick=pick, most_rows=4
        )
    assert isinstance(bench.runner.program, DeviceProgram if device else DirectProgram)
    return bench


def told(bench: RunnerBench, answer: int, grant: int) -> list[Any]:
    """Three answers side by side, one greedy, one drawn, one cut and with log-probabilities, prompts in pieces."""
    samplings = (
        SamplingParams(seed=1, max_tokens=answer, temperature=0.0),
        SamplingParams(seed=2, max_tokens=answer, temperature=1.2),
        SamplingParams(seed=3, max_tokens=answer, top_k=9, logprobs=3, prompt_logprobs=1),
    )
    rng = np.random.default_rng(0)
    requests = [
        bench.request(rng.integers(0, VOCAB, length).tolist(), sampling)
        for length, sampling in zip(PROMPTS, samplings, strict=True)
    ]
    drawn = [bench.read(request, 20) for request in requests]
    while len(requests[0].output) < answer:
        grant = min(grant, answer - len(requests[0].output))
        drawn += bench.step([(request, 1) for request in requests[:2]], steps=grant)
    while len(requests[2].output) < answer:
        drawn += bench.step([(requests[2], 1)])
    return [tuple(request.output) for request in requests] + drawn


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_a_device_writes_what_steps_as_they_are_write(folder: Path, dtype: str) -> None:
    """Padded batches, mixed rows, scored prompts, and grants of several steps."""
    plain, device = (bench_of(folder, REFERENCE, dtype, device=way) for way in (False, True))
    wanted = told(plain, 8, 1)
    assert told(device, 8, 1) == wanted
    ahead = bench_of(folder, REFERENCE, dtype, device=True)
    assert told(ahead, 8, 3)[:3] == wanted[:3]


@pytest.mark.long
@pytest.mark.parametrize(("family", "dtype"), TRITONS)
def test_the_kernels_own_program_writes_the_same(folder: Path, family: str, dtype: str) -> None:
    plain = bench_of(folder, family, dtype, device=False)
    own = bench_of(folder, family, dtype, device=False)
    own.runner.program = own.ops.record(own.model, own.kv)
    assert isinstance(own.runner.program, DeviceProgram)
    assert told(own, 4, 2) == told(plain, 4, 2)


@pytest.mark.cuda
def test_captured_steps_write_what_steps_as_they_are_write(folder: Path) -> None:
    """On a GPU: graphs replayed, tokens fed from step to step, nothing refused."""
    plain = bench_of(folder, TRITON, "bf16", device=False, where="cuda")
    own = bench_of(folder, TRITON, "bf16", device=False, where="cuda")
    program = own.runner.program = own.ops.record(own.model, own.kv)
    assert isinstance(program, DeviceProgram)
    assert program.capture(budget_s=60.0) > 0
    for grant in (1, 2):
        assert told(own, 12, grant)[:3] == told(plain, 12, 1)[:3]
    replays = program.replays
    assert isinstance(replays, CudaGraphRunner)
    assert len(replays) > 0
    assert replays.refused is None


@pytest.mark.cuda
def test_a_prompt_of_several_partitions_is_the_same_however_it_is_cut(tmp_path: Path) -> None:
    """On a GPU: 600 tokens at once have their partitions in turn, pieces of them and answers have them apart."""
    long = write_model(tmp_path, CONFIG | {"max_position_embeddings": 1024}, seed=3)
    prompt = np.random.default_rng(1).integers(0, VOCAB, 600).tolist()
    found = []
    for chunk in (600, 300, 37):
        bench = bench_of(long, TRITON, "bf16", device=False, where="cuda")
        bench.runner.program = bench.ops.record(bench.model, bench.kv)
        request = bench.request(prompt, SamplingParams(seed=1, max_tokens=8, logprobs=3))
        drawn = [bench.read(request, chunk)]
        while len(request.output) < 8:
            drawn += bench.step([(request, 1)])
        found.append((tuple(request.output), drawn))
    assert found[0] == found[1] == found[2]


def test_a_run_ahead_ends_where_the_table_is_too_narrow(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Past the spare columns of the table the arrays are made anew, and the answer goes on."""
    monkeypatch.setattr(input_batch, "SPARE_BLOCKS", 1)
    plain, device = (bench_of(folder, REFERENCE, "fp32", device=way) for way in (False, True))
    outputs = []
    for bench, grant in ((plain, 1), (device, 40)):
        request = bench.request([3, 5, 7], SamplingParams(seed=4, max_tokens=40, temperature=1.0))
        bench.read(request, 3)
        while len(request.output) < 40:
            bench.step([(request, 1)], steps=min(grant, 40 - len(request.output)))
        outputs.append(tuple(request.output))
    assert outputs[0] == outputs[1]


def test_what_a_program_offers_is_what_it_can_do(folder: Path) -> None:
    bench = bench_of(folder, REFERENCE, "fp32", device=True)
    program = bench.runner.program
    assert isinstance(program, MultiStepProgram)
    assert isinstance(program, CapturableProgram)
    assert not isinstance(DirectProgram(bench.ops, bench.model, bench.kv), MultiStepProgram)
    assert program.capture(budget_s=60.0) == 3  # of 1, 2 and 4 rows
    one = StepBatch(*(np.zeros(1, np.int32),) * 2, np.array([0, 1], np.int32), np.zeros((1, 1), np.int32), np.zeros(1, np.int32))  # fmt: skip # noqa: E501
    assert program.can_run_ahead(one, GumbelRows.empty(1))
    assert not program.can_run_ahead(one, GumbelRows.empty(0))  # its row draws from logits


def test_prompts_are_tried_in_one_page(folder: Path) -> None:
    """Tiles of all heights, partitions apart and in turn: of one page that every sequence writes to."""
    program = bench_of(folder, REFERENCE, "fp32", device=True).runner.program
    assert isinstance(program, DeviceProgram)
    finite: list[bool] = []
    program.try_prompts(lambda: finite.append(bool(torch.isfinite(program.hidden()).all())))
    assert finite == [True] * len(TRIED_PROMPTS)


def test_the_plan_of_memory_counts_what_attention_keeps() -> None:
    assert (model_sizes.PARTED_ROWS, model_sizes.PARTED_BYTES) == (attention.APART_TOKENS, attention.APART_BYTES)
    assert model_sizes.PARTITION_KEYS == attention.PARTITION_KEYS


class Counting(EagerRunner):
    """Remembers which shapes were asked for."""

    def __init__(self) -> None:
        self.keys: list[Any] = []

    def run(self, key: Any, work: Any) -> Any:
        self.keys.append(key)
        return super().run(key, work)


class Nothing:
    """A graph that computes nothing; ``replays`` are counted."""

    replays = 0

    def replay(self) -> None:
        self.replays += 1


def test_what_cannot_be_captured_is_one_size_before_it_is_all(caplog: pytest.LogCaptureFixture) -> None:
    """The reason is that of the work, not that of a capture which ends because of it."""
    graph, out = Nothing(), (torch.zeros(1),)

    def capture(work: Work) -> CapturedGraph:
        try:
            work()
        finally:
            if broken:
                raise RuntimeError("the capture ended too soon")
        return CapturedGraph(graph, out)

    def fail() -> tuple[Tensor, ...]:
        raise RuntimeError("it looks at numbers")

    graphs = CudaGraphRunner(CPU, capture)
    broken = False
    for _ in range(3):
        graphs.run("good", lambda: out)
    assert (len(graphs), graph.replays, graphs.refused) == (1, 2, None)
    broken = True
    for key in range(MOST_REFUSALS):
        graphs.run(key, lambda: out)
        with pytest.raises(RuntimeError, match="it looks at numbers"):
            graphs.run(key, fail)  # captured in vain, then as it is
        assert graphs.run(key, lambda: out) == out
    assert graphs.refused == "it looks at numbers"
    assert caplog.text.count("they cannot be captured (it looks at numbers)") == MOST_REFUSALS
    assert "no more are tried" in caplog.text
    broken = False
    for _ in range(3):
        graphs.run("other", lambda: out)
        graphs.run("good", fail)
    assert (len(graphs), graph.replays) == (1, 5), "what was captured is replayed all the same"


def test_batches_share_a_few_shapes(folder: Path) -> None:
    bench = bench_of(folder, REFERENCE, "fp32", device=True)
    replays = Counting()
    bench.runner.program = DeviceProgram(bench.ops, bench.model, bench.kv, device=torch.device("cpu"), replays=replays)
    requests = [bench.request([1, 2, index]) for index in range(3)]
    for request in requests:
        bench.read(request, 3)
    assert replays.keys == []  # prompts run as they are
    for count in (1, 2, 3, 3):
        bench.step([(request, 1) for request in requests[:count]])
    assert replays.keys == [StepShape(size, size, size, 32) for size in (1, 2, 4, 4)]


def test_padding_repeats_the_shortest_sequence() -> None:
    own_batch = StepBatch(
        np.array([11, 12, 13], np.int32),
        np.array([40, 3, 70], np.int32),
        np.arange(4, dtype=np.int32),
        np.arange(15, dtype=np.int32).reshape(3, 5),
        np.array([2, 0], np.int32),
    )
    picks = GumbelRows.empty(1)
    picks.seeds_F[:], picks.positions_F[:], picks.choices_F[:], picks.temperatures_F[:] = 2**64 - 3, 41, 2, 0.5
    shape = StepShape(4, 4, 4, 8)
    words = np.full(shape.words, -1, np.int32)
    fill(words, shape, own_batch, picks)
    arrays = DeviceArrays(shape, torch.from_numpy(words))
    own, draws = arrays.batch, arrays.draws
    assert own.tokens_T.tolist() == [11, 12, 13, 12]
    assert own.positions_T.tolist() == [40, 3, 70, 3]
    assert own.starts_S1.tolist() == [0, 1, 2, 3, 4]
    assert own.table_SP[:, :5].tolist() == [*own_batch.table_SP.tolist(), own_batch.table_SP[1].tolist()]
    assert not own.table_SP[:, 5:].any()
    assert own.sample_rows_R.tolist() == [2, 0, 0, 0]
    assert draws.seeds_R.tolist() == [0, -3, 0, 0]
    assert draws.positions_R.tolist() == [0, 41, 0, 0]
    assert draws.choices_R.tolist() == [0, 2, 0, 0]
    assert draws.temperatures_R.tolist() == [0, 0.5, 0, 0]
    arrays.feed(torch.tensor([21, 22, 23, 99], dtype=torch.int32))
    assert own.tokens_T.tolist() == [21, 22, 23, 22]
    longer = StepBatch(*(np.zeros(3, np.int32),) * 2, np.array([0, 3], np.int32), np.zeros((1, 1), np.int32), np.zeros(1, np.int32))  # fmt: skip # noqa: E501
    with pytest.raises(ValueError, match="one token a sequence"):
        fill(words, shape, longer, GumbelRows.empty(1))
    with pytest.raises(ValueError, match="does not fit"):
        fill(words, StepShape(4, 4, 1, 8), own_batch, picks)


def test_tables_of_groups_are_widened_group_by_group() -> None:
    table = np.array([[1, 2, 3, 4]], np.int32)
    assert by_group(table, 2, 4).tolist() == [[1, 2, 0, 0, 3, 4, 0, 0]]
    assert by_group(table, 2, 2) is table


@pytest.mark.parametrize("most", [1, 4, 100, 256])
def test_sizes_lie_close(most: int) -> None:
    sizes = list(buckets(most))
    assert sizes[0] == 1
    assert sizes[-1] == most
    assert sizes == sorted(set(sizes))
    assert all(b <= 2 * a for a, b in pairwise(sizes))
    assert all(b <= 1.5 * a for a, b in pairwise(sizes) if a >= 16)
