"""Law 1 with adapters at the runner, and which adapters stay in memory."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.engine.core.request import Request
from penstock.engine.runner.lora import LoraLimits, LoraManager
from penstock.errors import AdapterRefused, ModelError
from penstock.kernels.lora import NO_ADAPTER, PackedAdapter
from penstock.kernels.native.backend import families
from penstock.kernels.native.program import RecordedProgram
from penstock.types import AdapterRef, SamplingParams
from penstock.weights.compression_convert import compress_folder
from penstock.weights.lora import LoraAdapter
from runner_bench import RunnerBench
from tiny_adapters import write_adapter
from tiny_models import llama_config, write_model

VOCAB = 113
CONFIG = llama_config(vocab_size=VOCAB, max_position_embeddings=640, intermediate_size=100)
ANSWER = 5


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Path]]:
    base = tmp_path_factory.mktemp("adapted")
    model = write_model(base / "model", CONFIG, seed=3)
    return model, [
        write_adapter(base / "all", model, rank=8, seed=1),
        write_adapter(
            base / "some", model, ("q_proj", "v_proj", "up_proj"), rank=3, seed=2, dtype="bf16", lora_alpha=5
        ),
    ]


def sampling(way: int) -> SamplingParams:
    return SamplingParams(
        seed=way, max_tokens=ANSWER, temperature=0.8, logprobs=VOCAB, prompt_logprobs=0 if way % 2 else None
    )


def told(bench: RunnerBench, requests: list[Request], chunk: int) -> list[Any]:
    """What every request brings when all are computed together, their prompts in chunks."""
    brought: list[tuple[list[Any], list[Any]]] = [([], []) for _ in requests]
    while any(len(request.output) < ANSWER for request in requests):
        work = [(index, min(chunk, own.uncomputed)) for index, own in enumerate(requests) if len(own.output) < ANSWER]
        for (index, _), drawn in zip(work, bench.step([(requests[i], n) for i, n in work]), strict=True):
            brought[index][0].extend(zip(drawn.tokens, drawn.logprobs, strict=True))
            brought[index][1].extend(drawn.prompt_logprobs)
    for request in requests:
        bench.runner.remove_request(request.id)
        bench.release(request)
    return brought


PROMPTS = [np.random.default_rng(n).integers(0, VOCAB, n).tolist() for n in (1, 17, 65, 130, 33)]


@pytest.mark.parametrize(("family", "dtype"), [(families()[0], "bf16"), (families()[0], "fp32"), ("portable", "bf16")])
def test_alone_or_mixed_whole_or_in_chunks(places: tuple[Path, list[Path]], family: str, dtype: str) -> None:
    folder, adapters = places
    bench = RunnerBench(folder, dtype, pages=400, family=family, threads=2)
    refs = [None, *(bench.load_adapter(path) for path in adapters)]
    asked = [(prompt, way, refs[way % 3]) for way, prompt in enumerate(PROMPTS)]

    def made(adapted: bool = True) -> list[Request]:
        return [bench.request(prompt, sampling(way), adapter=ref if adapted else None) for prompt, way, ref in asked]

    alone = [told(bench, [request], 512)[0] for request in made()]
    assert isinstance(bench.runner.adapted, RecordedProgram)
    assert told(bench, made(), 512) == alone
    assert told(bench, made(), 16) == alone
    plain = [told(bench, [request], 512)[0] for request in made(adapted=False)]
    assert [a == b for a, b in zip(alone, plain, strict=True)] == [ref is None for _, _, ref in asked]
    direct = RunnerBench(folder, dtype, pages=400, family=family, direct=True)
    for path in adapters:
        direct.load_adapter(path)
    assert told(direct, [direct.request(prompt, sampling(way), adapter=ref) for prompt, way, ref in asked], 48) == alone


def test_over_compressed_weights_the_bits_are_those_over_plain_ones(
    places: tuple[Path, list[Path]], tmp_path: Path
) -> None:
    folder, adapters = places
    compress_folder(folder, tmp_path / "compressed", threads=1, report=lambda _: None)
    brought = []
    for model in (folder, tmp_path / "compressed"):
        bench = RunnerBench(model, "bf16", pages=400, threads=2)
        refs = [None, *(bench.load_adapter(path) for path in adapters)]
        requests = [bench.request(prompt, sampling(way), adapter=refs[way % 3]) for way, prompt in enumerate(PROMPTS)]
        brought.append(told(bench, requests, 48))
    assert bench.fingerprint == RunnerBench(folder, "bf16").fingerprint
    assert brought[0] == brought[1]


# --- which adapters are in memory -------------------------------------------------------------------------------------


class Table:
    """Remembers what stands where."""

    data = None

    def __init__(self) -> None:
        self.slots: dict[int, int] = {}

    def pack(self, parts: Any) -> PackedAdapter:
        return PackedAdapter({}, next(iter(parts.values())))

    def put(self, slot: int, adapter: PackedAdapter) -> None:
        self.slots[slot] = adapter.nbytes

    def clear(self, slot: int) -> None:
        del self.slots[slot]


class Shelf:
    """Adapters a, b, c ... of 10 bytes each, which can be read when told so."""

    def __init__(self, slots: int, nbytes: int) -> None:
        self.table, self.may_read = Table(), threading.Event()
        self.may_read.set()
        ops: Any = type("Ops", (), {"adapter_table": lambda _, sites, slots: self.table})()
        weight: Any = object()
        self.adapters = LoraManager(ops, {"w": weight}, LoraLimits(slots=slots, nbytes=nbytes, max_rank=1), self.read)
        self.used: set[str] = set()

    def read(self, folder: Path) -> LoraAdapter:
        assert self.may_read.wait(10)
        if folder.name == "broken":
            raise ModelError(f"{folder}: broken")
        parts: Any = {"w": 10}
        return LoraAdapter(folder.name, 1, 10, parts)

    def ready(self, name: str, *, soon: bool = True) -> bool:
        """Is it there now, or, ``soon``, when its thread has done its work?"""
        ref = AdapterRef(fingerprint=name, folder=f"/x/{name}")
        if self.adapters.is_ready(ref, lambda: self.used):
            return True
        if soon:
            self.adapters._coming[name].exception(10)
            return self.adapters.is_ready(ref, lambda: self.used)
        return False


def test_nobody_waits_while_an_adapter_is_read() -> None:
    shelf = Shelf(2, 100)
    shelf.may_read.clear()
    assert not shelf.ready("a", soon=False)
    shelf.may_read.set()
    assert shelf.ready("a")
    assert shelf.adapters.slot_of("a") == 0
    assert shelf.adapters.slot_of("") == NO_ADAPTER


@pytest.mark.parametrize(("slots", "nbytes"), [(2, 1000), (16, 25)], ids=["slots", "bytes"])
def test_the_longest_unused_makes_room_and_what_is_used_stays(slots: int, nbytes: int) -> None:
    shelf = Shelf(slots, nbytes)
    for name in "aba":
        assert shelf.ready(name)
    shelf.adapters.on_scheduled()
    assert shelf.ready("c")  # b was used before a
    assert shelf.adapters.fingerprints() == ("a", "c")
    shelf.used = {"a"}
    assert not shelf.ready("b"), "c was promised to a request that the scheduler does not know yet"
    shelf.adapters.on_scheduled()
    assert shelf.ready("b")
    assert shelf.adapters.fingerprints() == ("a", "b")
    shelf.adapters.on_scheduled()
    shelf.used = {"a", "b"}
    assert not shelf.ready("c")
    shelf.used = {"b"}
    assert shelf.ready("c")
    assert len(shelf.table.slots) == 2


def test_what_cannot_be_had_is_refused_and_may_be_tried_again() -> None:
    shelf = Shelf(2, 100)
    for _ in range(2):
        with pytest.raises(AdapterRefused, match="broken"):
            shelf.ready("broken")
    with pytest.raises(AdapterRefused, match="was changed since"):
        shelf.adapters.load(AdapterRef(fingerprint="other", folder="/x/a"))
    assert shelf.ready("a")
