"""Every family computes what transformers computes, both in fp32, and keeps law 1; its real models have their sizes.

The entries are in ``family_cases.py``; docs/models.md has them as a table.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
from family_cases import CASES, HEARD
from family_table import PAGE, page
from parity_oracle import Oracle, rename_tensors, write_random_model
from shrunk_models import CONFIGS, Case
from ways import Told, Ways
from whole_rows import check_rows, read_rows, rows_of

from penstock.engine.core.request import Request
from penstock.kernels.native.program import RecordedProgram
from penstock.types import PAGE_TOKENS, SamplingParams
from penstock.weights.checkpoint_reader import Checkpoint
from penstock.weights.compression_convert import compress_folder
from penstock.weights.config_json import ConfigFields
from penstock.weights.families.registry import BUILT_IN, checkpoint_format
from penstock.weights.inspect import CONFIG, inspect_model
from runner_bench import RunnerBench
from tiny_models import DTYPES, Tensors, write_weights

LENGTH = 190
ANSWER = 4


@dataclass(frozen=True)
class Place:
    """A shrunk model on disk, behind the runner and behind transformers."""

    case: Case
    folder: Path
    bench: RunnerBench
    oracle: Oracle
    tokens: list[int]

    @property
    def vocab(self) -> int:
        return self.bench.spec.vocab

    def request(self, *, prompt_logprobs: int | None = None) -> Request:
        sampling = SamplingParams(
            seed=3, max_tokens=ANSWER, temperature=0.8, logprobs=self.vocab, prompt_logprobs=prompt_logprobs
        )
        return self.bench.request(self.tokens, sampling)

    @property
    def ways(self) -> Ways:
        return Ways(self.bench, self.request)


@pytest.fixture(scope="module", params=CASES, ids=lambda case: case.name)
def place(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Place:
    case: Case = request.param
    folder = tmp_path_factory.mktemp(case.config)
    oracle = write_random_model(folder, case.shrunk())
    if case.misnamed is not None:
        rename_tensors(folder, *case.misnamed)
    bench = RunnerBench(folder)
    if bench.ops.numerics.startswith("cpp"):
        assert isinstance(bench.runner.program, RecordedProgram)  # what is not recorded is slow, and says nothing
    tokens = np.random.default_rng(1).integers(0, bench.spec.vocab, LENGTH).tolist()
    return Place(case, folder, bench, oracle, tokens)


@pytest.mark.parametrize("case", [*CASES, *HEARD], ids=lambda case: case.name)
def test_the_real_model_has_its_size(case: Case) -> None:
    config = case.real()
    family = checkpoint_format(case.architecture, "")
    assert family.layout(family.parse(ConfigFields(config, CONFIG))).parameters == case.parameters


def test_the_table_in_the_docs_is_that_of_the_tests() -> None:
    assert PAGE.read_text() == page(PAGE.read_text()), "run tests/golden/family_table.py"


def test_every_family_has_an_entry() -> None:
    assert {case.architecture for case in (*CASES, *HEARD)} == set(BUILT_IN)


def test_both_dialects_of_the_configuration_say_the_same(place: Place) -> None:
    (place.folder / "config.json").rename(place.folder / "config.old.json")
    try:
        (place.folder / "config.newest.json").rename(place.folder / "config.json")
        assert inspect_model(place.folder).details == place.bench.spec.details
        assert inspect_model(place.folder).max_positions == place.bench.spec.max_positions
    finally:
        (place.folder / "config.old.json").replace(place.folder / "config.json")


def test_log_probabilities_are_those_of_transformers(place: Place) -> None:
    request = place.request(prompt_logprobs=place.vocab)
    drawn = place.bench.read(request, LENGTH)
    got_TV = rows_of(drawn, place.vocab)
    want_TV = place.oracle.logprobs_TV(place.tokens)
    check_rows(got_TV, want_TV)
    assert len(np.unique(want_TV.argmax(1))) > 10  # a model that ignores what it reads would prove nothing
    place.bench.release(request)


def test_no_bit_depends_on_the_way(place: Place) -> None:
    ways = place.ways
    want = ways.alone(LENGTH)
    assert ways.alone(37) == want
    assert in_company(place) == want
    assert ways.on_cached_pages(place.request(), (LENGTH // PAGE_TOKENS - 2) * PAGE_TOKENS) == want


def test_bf16_weights_give_the_same_bits_compressed_and_however_they_are_read(place: Place, tmp_path: Path) -> None:
    narrow = rewritten(place.folder, tmp_path / "bf16", {})
    compress_folder(narrow, tmp_path / "compressed", threads=1, report=lambda _: None)
    plain = replace(place, bench=RunnerBench(narrow, "bf16")).ways
    want = plain.alone(LENGTH)
    assert plain.alone(37) == want
    assert replace(place, bench=RunnerBench(tmp_path / "compressed", "bf16")).ways.alone(LENGTH) == want


def test_gpt2_by_the_names_of_its_first_release(tmp_path: Path) -> None:
    case = next(case for case in CASES if case.config == "gpt2")
    write_random_model(tmp_path / "new", case.shrunk())
    mask = {f"h.{index}.attn.bias": np.ones((1, 1, 8, 8), np.float32) for index in range(3)}
    rewritten(tmp_path / "new", tmp_path / "old", mask, lambda name: name.removeprefix("transformer."), "fp32")
    answers = []
    for folder in ("old", "new"):
        bench = RunnerBench(tmp_path / folder)
        answers.append(bench.read(bench.request(range(40)), 40))
    assert answers[0] == answers[1]


def test_gpt_oss_has_the_tensors_of_its_published_index() -> None:
    """Experts are stored there as MXFP4: blocks and their scales instead of one tensor."""
    family = BUILT_IN["GptOssForCausalLM"]
    config = json.loads((CONFIGS / "gpt_oss_20b_bf16.json").read_text())
    published = (CONFIGS / "gpt_oss_20b_tensors.txt").read_text().split()
    names = {name.removesuffix("_blocks").removesuffix("_scales") for name in published}
    assert set(family.layout(family.parse(ConfigFields(config, CONFIG))).shapes) == names


def test_llama4_by_its_published_names(tmp_path: Path) -> None:
    case = next(case for case in CASES if case.config == "llama_4_scout")
    write_random_model(tmp_path / "text", case.shrunk())
    images = {"vision_model.patch_embedding.linear.weight": np.ones((4, 4), np.float32)}
    rewritten(tmp_path / "text", tmp_path / "images", images, lambda name: f"language_model.{name}", "fp32")
    answers = []
    for folder in ("text", "images"):
        bench = RunnerBench(tmp_path / folder)
        answers.append(bench.read(bench.request(range(40)), 40))
    assert answers[0] == answers[1]


def rewritten(
    source: Path,
    target: Path,
    more: Tensors,
    rename: Callable[[str], str] = lambda name: name,
    dtype: str = "bf16",
) -> Path:
    """The same model with tensors renamed, narrowed or added."""
    with Checkpoint(source) as checkpoint:
        tensors = {rename(name): checkpoint.array(name).astype(DTYPES[dtype]) for name in checkpoint.names}
    target.mkdir()
    write_weights(target, tensors | more)
    for name in ("config.json", "tokenizer.json"):
        shutil.copy(source / name, target / name)
    return target


def test_rotary_positions_are_chosen_by_the_longest_context_not_by_the_prompt(tmp_path: Path) -> None:
    """Phi-3's short divisors where 64 tokens are served at most, its long ones for any prompt where more are."""
    case = next(case for case in CASES if case.config.startswith("phi_3"))
    oracle = write_random_model(tmp_path, case.shrunk())
    tokens = np.random.default_rng(1).integers(0, 113, 63).tolist()
    rows = [read_rows(RunnerBench(tmp_path, max_model_len=length), tokens, 40) for length in (64, 65)]
    check_rows(rows[0], oracle.logprobs_TV(tokens))
    assert np.abs(rows[1] - rows[0]).max() > 0.1


def in_company(place: Place) -> Told:
    """Behind one that writes and in front of one that reads, with other beginnings."""
    writer = place.bench.request(place.tokens[:70], SamplingParams(seed=9, max_tokens=50, logprobs=0))
    reader = place.bench.request(place.tokens[::-1], SamplingParams(seed=9, max_tokens=1))
    return place.ways.in_company(writer, reader, chunk=50, others=15)
