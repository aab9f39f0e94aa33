"""Models that only read give transformers' vectors and scores, both in fp32, and keep law 1."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from parity_oracle import Oracle, write_random_model
from reader_cases import CASES, Case
from shrunk_models import CONFIGS
from transformers import AutoModel

from penstock.engine.core.events import AddRequest
from penstock.engine.core.plan import ScheduledTokens, StepPlan
from penstock.engine.core.request import PageTable, Request
from penstock.engine.models.registry import build_pooling_model
from penstock.engine.runner.pooling_runner import PoolingRunner
from penstock.kernels.select import make_ops
from penstock.types import BlockHash, PageId, PoolingParams, RequestId, RequestStage, SamplingParams
from penstock.weights.config_json import ConfigFields
from penstock.weights.families.registry import checkpoint_format
from penstock.weights.inspect import inspect_model
from penstock.weights.load import load_model
from penstock.weights.model_files import model_files
from penstock.weights.pooling_config import with_pooler
from tiny_readers import bert_config, write_modules

LENGTHS = [1, 40, 17, 61]


@dataclass(frozen=True)
class Place:
    """A case on disk, and transformers' model of it."""

    case: Case
    folder: Path
    oracle: Oracle
    texts: list[list[int]]


class Bench:
    """The real runner over one folder, driven by hand."""

    def __init__(self, place: Place, dtype: str = "fp32") -> None:
        spec = inspect_model(place.folder)
        ops = make_ops(family=None, compute_dtype=dtype)
        self.max_model_len = spec.max_positions
        reader = build_pooling_model(load_model(place.folder, spec, ops), ops, self.max_model_len)
        self.runner = PoolingRunner(reader, ops, ops.new_kv(spec.kv, pages=64))
        self.second = place.case.second
        self._serial = 0

    def read(self, texts: Sequence[list[int]], chunk: int = 1000, **wanted: Any) -> list[NDArray[np.float32]]:
        """All of these texts together, so many tokens of each in one step."""
        requests = [self._request(tokens, PoolingParams(second=self.second, **wanted)) for tokens in texts]
        found: dict[RequestId, NDArray[np.float32]] = {}
        while left := [request for request in requests if request.uncomputed]:
            counts = [min(chunk, request.uncomputed) for request in left]
            rows = tuple(
                ScheduledTokens(r, r.computed, n, n == r.uncomputed) for r, n in zip(left, counts, strict=True)
            )
            for row, drawn in zip(rows, self.runner.run(StepPlan(rows=rows)), strict=True):
                row.request.computed += row.count
                assert (drawn.pooled is not None) == row.samples
                if drawn.pooled is not None:
                    found[row.request.id] = np.frombuffer(drawn.pooled, "<f4")
        for request in requests:
            self.runner.remove_request(request.id)
        return [found[request.id] for request in requests]

    def _request(self, tokens: list[int], wanted: PoolingParams) -> Request:
        self._serial += 1
        arrive = AddRequest(
            id=RequestId(f"r{self._serial}"),
            epoch=0,
            stage=RequestStage.WHOLE,
            prompt=tokens,
            sampling=SamplingParams(seed=0, max_tokens=1),
            arrival=0.0,
            root=BlockHash(bytes(32)),
            pooling=wanted,
        )
        request = Request(arrive, serial=self._serial, max_model_len=self.max_model_len)
        first = self._serial % 8 * 8
        request.set_page_tables([PageTable(0, [PageId(page) for page in range(first, first + 8)])])
        return request


@pytest.fixture(scope="module", params=CASES)
def place(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Place:
    case, folder = CASES[request.param], tmp_path_factory.mktemp("reader")
    oracle = case.write(folder)
    rng = np.random.default_rng(3)
    texts = [rng.integers(2, case.config["vocab_size"], length).tolist() for length in LENGTHS]
    return Place(case, folder, oracle, texts)


def test_transformers_vectors_and_law_1(place: Place) -> None:
    bench = Bench(place)
    together = bench.read(place.texts)
    for got, tokens in zip(together, place.texts, strict=True):
        want = place.case.wanted(place.oracle, tokens)
        np.testing.assert_allclose(got, want, rtol=1e-3, atol=1e-3)
        if not place.case.labels:
            assert 1 - float(got @ want / np.linalg.norm(got) / np.linalg.norm(want)) < 1e-6
    for dtype in ("fp32", "bf16"):
        bench = bench if dtype == "fp32" else Bench(place, dtype)
        whole = [vector.tobytes() for vector in bench.read(place.texts)]
        assert [bench.read([tokens])[0].tobytes() for tokens in place.texts] == whole
        if place.case.chunked:
            assert [vector.tobytes() for vector in bench.read(place.texts, chunk=7)] == whole


def test_vectors_can_be_cut_and_normed(tmp_path: Path) -> None:
    write_modules(tmp_path, normalise=False)
    oracle = write_random_model(tmp_path, bert_config(), kind=AutoModel)
    bench = Bench(Place(CASES["MiniLM"], tmp_path, oracle, []))
    texts = [list(range(2, 40))]
    (whole,), (cut,) = bench.read(texts), bench.read(texts, dimensions=10)
    (normed,) = bench.read(texts, dimensions=10, normalised=True)
    assert cut.tobytes() == whole[:10].tobytes()
    np.testing.assert_allclose(normed, whole[:10] / np.linalg.norm(whole[:10].astype(np.float64)), rtol=1e-6)


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("bge_large", 334_092_288),
        ("e5_mistral_7b", 7_110_660_096),
        ("gte_qwen2_7b", 7_069_121_024),
        ("qwen3_embedding_8b", 7_567_295_488),
    ],
)
def test_the_real_model_has_its_size(name: str, parameters: int, tmp_path: Path) -> None:
    """Without pooler and head, which vectors do not need."""
    config = json.loads((CONFIGS / f"{name}.json").read_text())
    write_modules(tmp_path, "lasttoken" if "Bert" not in config["architectures"][0] else "cls_token")
    family, fields = checkpoint_format(config["architectures"][0], ""), ConfigFields(config, "config.json")
    spec = with_pooler(family.parse(fields), config["architectures"][0], fields, model_files(tmp_path))
    assert family.layout(spec).parameters == parameters
