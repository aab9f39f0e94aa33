"""Whole models with inputs of 8 bits: near the same with inputs that are floats, and the same bits in any company."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGMLQuantizationType as Type
from whole_rows import read_rows

from penstock.kernels.native.program import RecordedProgram
from penstock.kernels.operands import INT8
from penstock.kernels.select import REFERENCE
from penstock.kv.checksum import PageChecksum
from penstock.kv.page_memory import KvLayout
from penstock.types import ModelIdentity, SamplingParams
from runner_bench import RunnerBench
from tiny_gguf import write_gguf
from tiny_models import llama_config, random_tensors

LENGTH = 60
KINDS: dict[str, dict[str, Type] | Type] = {
    "Q8_0": Type.Q8_0,
    "Q4_K_M": {"v_proj": Type.Q6_K, "down_proj": Type.Q6_K, "embed": Type.Q6_K, "": Type.Q4_K},
}
CONFIG = llama_config(hidden_size=256, intermediate_size=512, num_hidden_layers=2)


@pytest.fixture(scope="module", params=KINDS)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("int8") / "model.gguf"
    write_gguf(path, CONFIG, random_tensors(CONFIG), KINDS[request.param])
    return path


def tokens() -> list[int]:
    drawn: list[int] = np.random.default_rng(1).integers(0, CONFIG["vocab_size"], LENGTH).tolist()
    return drawn


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_log_probabilities_are_near_those_of_floats_and_the_oracles(model: Path, dtype: str) -> None:
    bench = RunnerBench(model, dtype, activation_dtype=INT8)
    if bench.ops.numerics.startswith("cpp"):
        assert isinstance(bench.runner.program, RecordedProgram)
    found_TV = read_rows(bench, tokens(), LENGTH)
    oracle_TV = read_rows(RunnerBench(model, dtype, family=REFERENCE, activation_dtype=INT8), tokens(), LENGTH)
    floats_TV = read_rows(RunnerBench(model, dtype), tokens(), LENGTH)
    near = np.abs(found_TV - floats_TV).mean()
    assert 1e-4 < near < 0.2
    # With bf16 a last bit decides now and then which integer an input becomes, in all that follows.
    assert np.abs(found_TV - oracle_TV).mean() < (near / 2 if dtype == "fp32" else near)
    assert (found_TV.argmax(1) == floats_TV.argmax(1)).mean() > 0.8


def test_no_bit_depends_on_the_company(model: Path) -> None:
    bench = RunnerBench(model, "bf16", threads=2, activation_dtype=INT8)
    sampling = SamplingParams(seed=3, max_tokens=4, temperature=0.8, logprobs=5)
    told = []
    for chunk, company in ((LENGTH, 0), (7, 0), (23, 30)):
        request, others = bench.request(tokens(), sampling), bench.request(tokens()[::-1])
        logprobs: list[Any] = []
        while len(request.output) < 4:
            work = [(request, min(chunk, request.uncomputed))]
            if company:
                work.insert(0, (others, min(company, others.uncomputed) or 1))
            logprobs += bench.step(work)[-1].logprobs
        told.append((tuple(request.output), tuple(logprobs)))
    assert told[0] == told[1] == told[2]


def test_its_pages_are_not_those_of_floats(model: Path) -> None:
    """One model and one layout, two identities: a page of one has no valid checksum as a page of the other."""
    benches = [RunnerBench(model, "bf16", activation_dtype=kind) for kind in (None, INT8)]
    assert benches[0].fingerprint == benches[1].fingerprint
    layouts = [KvLayout.for_shape(bench.spec.kv, bench.ops.kv_dtype) for bench in benches]
    assert layouts[0] == layouts[1]
    identities = [ModelIdentity(fingerprint=one.fingerprint, numerics=one.ops.numerics) for one in benches]
    page = memoryview(bytearray(layouts[0].page_bytes))
    first, second = (PageChecksum(one, layouts[0]).checksum(page, 1) for one in identities)
    assert first != second
    assert identities[0].unversioned != identities[1].unversioned
