"""The whole run, part by part; a part that fails or finds no time leaves its bars owed, and the others go on."""

from __future__ import annotations

import gc
import platform
import sys
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from bench.gpu import engine, law1, mixed, peers, products, roofline, start
from bench.gpu.checks import Kernels
from bench.gpu.checks_of_some import KernelsOfSome
from bench.gpu.driving import Driver
from bench.gpu.engine import Sizes
from bench.gpu.figures import Check, Findings
from bench.gpu.models import LLAMA_8B, MOE_30B, TINY, TINY_MOE, Made, make
from bench.gpu.place import Clock, Place

from penstock.kernels.ops import Ops
from penstock.kernels.select import TRITON, TRITON_INTERPRETER, make_ops
from penstock.types import FP8_E4M3

OUTPUT_RATE = 10_000  # tokens a second at which host CPU is judged


@dataclass(slots=True)
class Run:
    """One run, and what it holds while it goes on."""

    place: Place
    clock: Clock
    ops: Ops
    coded: Ops  # the same, with KV pages of 8 bits
    findings: Findings
    sizes: Sizes = field(init=False)
    made: Made | None = None
    driver: Driver | None = None

    def __post_init__(self) -> None:
        self.sizes = Sizes.of(self.place)

    def part(self, name: str, seconds: float, keys: tuple[str, ...], work: Callable[[], None]) -> None:
        """Do a part that may take so long, and say so; the bars it would have filled are owed with the reason."""
        if not self.place.dry and not self.clock.allows(seconds):
            self._owe(keys, f"no time was left for it ({self.clock.spent_s:.0f} s were spent)")
            return
        print(f"[{self.clock.spent_s:5.0f} s] {name}", file=sys.stderr, flush=True)
        try:
            work()
        except Exception as error:  # one part must not take the others with it
            first = (str(error).splitlines() or [""])[0]
            self._owe(keys, f"failed: {type(error).__name__}: {first}"[:160])
            self.findings.checks.append(Check(f"part: {name}", passed=False, found=f"{type(error).__name__}: {first}"))
            if self.place.dry:
                raise
        gc.collect()

    def _owe(self, keys: tuple[str, ...], why: str) -> None:
        for key in keys:
            if key not in self.findings.figures:
                self.findings.owe(key, why)

    # --- parts --------------------------------------------------------------------------------------------------------

    def look(self) -> None:
        """The machine, and what it can do."""
        found = self.findings
        found.machine = {"Python": platform.python_version(), "torch": torch.__version__, "kernels": self.ops.numerics}
        if self.place.cuda:
            found.machine = {"GPU": torch.cuda.get_device_name(), **found.machine}
        error = start.plan_error(self.place)
        if error is not None:
            found.record("plan", error)
        found.roofline = roofline.measured(self.place)

    def check(self) -> None:
        """Kernels one by one, and law 1 over whole steps of small models."""
        self.findings.checks += Kernels(self.ops, wide=not self.place.dry).all()
        self.findings.checks += KernelsOfSome(self.ops, wide=not self.place.dry).all()
        self.findings.checks += Kernels(self.coded, wide=not self.place.dry).attention()
        models = (("dense", TINY, self.ops), ("experts", TINY_MOE, self.ops), ("KV in fp8", TINY, self.coded))
        for name, config, ops in models:
            sizes = law1.Sizes.of(dry=self.place.dry)
            made = make(name, config, ops, max(256, sizes.length + sizes.answer))
            self.findings.checks += law1.matrix(made, ops, sizes)

    def products(self) -> None:
        """Beside cuBLAS and SDPA."""
        config, found = (TINY if self.place.dry else LLAMA_8B), self.findings
        one_layer = make("one layer", {**config, "num_hidden_layers": 1}, self.ops, 256)
        lines = products.against_cublas(self.ops, self.place, one_layer.shapes, found.roofline["matmul_flops"])
        found.tables["products"] = lines
        for key, tree in (("gemm_plain", False), ("gemm_tree", True)):
            value = products.least(lines, tree=tree)
            if value is not None:
                found.record(key, value)
        heads = (4, 2, 16) if self.place.dry else (32, 8, 128)
        found.tables["attention"] = products.attention(self.ops, self.place, heads)
        found.record("attention", found.tables["attention"][0]["of_sdpa"])

    def load(self) -> None:
        """Start-up from files."""
        taken = start.measured(self.ops, self.place)
        self.findings.tables["start"] = [taken]
        self.findings.record("start", taken["all_s"], "in a process that has torch and CUDA already")

    def build(self) -> None:
        """The 8 B model, its KV memory, and a prompt in every sequence."""
        name, config = ("tiny", TINY) if self.place.dry else ("8 B", LLAMA_8B)
        self.made = make(name, config, self.ops, max(self.sizes.prompt, self.sizes.context) + 64)
        self.driver = Driver(self.made, self.ops, max(self.sizes.decode), self.sizes.context + 16)
        engine.filled(self.driver, max(self.sizes.decode), self.sizes)

    def decode(self) -> None:
        """Answers of all batch sizes."""
        driver, found = self._driver(), self.findings
        lines = engine.decode(driver, self.place, self.sizes, found.roofline["read_bytes_per_s"])
        found.tables["decode"] = lines
        found.record("decode_1", lines[0]["of_read_rate"])
        cpu = lines[-1]["host_cpu_s_per_token"] * OUTPUT_RATE
        found.record(
            "host_cpu", cpu, f"of the step itself, at batch {lines[-1]['batch']}; scheduler and HTTP come on top"
        )
        beside = start.memory_beside(driver.kv_bytes + 2 * driver.made.spec.parameters, self.place)
        if beside is not None:
            found.record("memory", beside)

    def compressed(self) -> None:
        """The same model with compressed products, step against step."""
        name, config = ("tiny", TINY) if self.place.dry else ("8 B, compressed", LLAMA_8B)
        plain = self._driver()
        made = make(name, config, self.ops, self.sizes.context + 64, compressed=True)
        driver = Driver(made, self.ops, max(self.sizes.decode), self.sizes.context + 16)
        found = self.findings
        lines = found.tables["compressed"] = engine.steps_beside(driver, plain, self.place, self.sizes)
        told = f"weights of {made.weight_bytes / 1e9:.1f} GB instead of {plain.made.weight_bytes / 1e9:.1f}"
        for key, line in zip(("compressed_1", "compressed_16", "compressed_64"), lines, strict=False):
            found.record(key, line["times"], told)

    def kv_codes(self) -> None:
        """The same model with KV pages of 8 bits, step against step."""
        plain = self._driver()
        coded = Driver(plain.made, self.coded, max(self.sizes.decode), self.sizes.context + 16)
        engine.filled(coded, max(self.sizes.decode), self.sizes)
        found = self.findings
        lines = found.tables["decode, KV in fp8_e4m3"] = engine.steps_beside(coded, plain, self.place, self.sizes)
        told = f"{coded.kv_bytes_per_token / 1e3:.1f} kB a token instead of {plain.kv_bytes_per_token / 1e3:.1f}"
        found.record("kv_fp8_64", lines[-1]["times"], told)

    def prefill(self) -> None:
        """A long prompt."""
        line = engine.prefill(self._driver(), self.place, self.sizes, self.findings.roofline["matmul_flops"])
        self.findings.tables["prefill"] = [line]
        self.findings.record("prefill_8k", line["of_matmul_rate"])

    def mixed(self) -> None:
        """What prompts for processors cost beside reading them."""
        line, check = mixed.measured(self._driver(), self.ops, self.place, self.sizes.chunk)
        self.findings.tables["mixed fleets"] = [line]
        self.findings.checks.append(check)
        told = f"{line['out_us_a_token']:.1f} us a token; reading takes {line['read_us_a_token']:.1f}"
        self.findings.record("mixed_out", line["GB_per_s"], told)
        self.findings.record("mixed_beside", line["beside"])

    def law1_cost(self) -> None:
        """Against free orders."""
        driver = self._driver()
        costs = engine.law1_cost(driver.made, self.ops, self.place, self.sizes, driver)
        self.findings.record("law1_decode", costs["decode"], "products by cuBLAS")
        self.findings.record("law1_prefill", costs["prefill"], "products by cuBLAS")

    def transformers(self) -> None:
        """The same shape in transformers."""
        step = peers.transformers_step(self.place, self.sizes.context)
        if step is None:
            self.findings.owe("transformers", "transformers is not installed here")
            return
        ours = self.findings.tables["decode"][0]["step_ms"] / 1e3
        self.findings.record("transformers", step / ours, f"theirs takes {step * 1e3:.1f} ms a token")

    def experts(self) -> None:
        """Decode of the MoE shape."""
        self.made = self.driver = None
        gc.collect()
        if self.place.cuda:
            torch.cuda.empty_cache()
        made = make("MoE", TINY_MOE if self.place.dry else MOE_30B, self.ops, self.sizes.context + 64)
        driver = Driver(made, self.ops, max(self.sizes.decode), self.sizes.context + 16)
        engine.filled(driver, 1, self.sizes)
        one = Sizes(self.sizes.context, self.sizes.chunk, self.sizes.prompt, self.sizes.steps, (1,))
        lines = engine.decode(driver, self.place, one, self.findings.roofline["read_bytes_per_s"])
        self.findings.tables["decode, experts"] = lines
        self.findings.record("moe_decode_1", lines[0]["of_read_rate"])

    def _driver(self) -> Driver:
        if self.driver is None:
            raise RuntimeError("the model could not be made")
        return self.driver


def run(*, dry: bool, limit_s: float) -> Findings:
    """Everything.  In a dry run a part that fails raises."""
    torch.manual_seed(0)
    place, clock = Place.found(dry=dry), Clock(limit_s)
    family, device = (TRITON_INTERPRETER, "cpu") if dry else (TRITON, "cuda")
    ops, coded = (
        make_ops(family=family, compute_dtype="bf16", device=device, kv_dtype=kept) for kept in (None, FP8_E4M3)
    )
    own = Run(place, clock, ops, coded, Findings(dry=dry))
    own.part("the machine", 20, ("plan",), own.look)
    own.part("kernels against float64, law 1", 120, (), own.check)
    own.part("products and attention by themselves", 60, ("gemm_plain", "gemm_tree", "attention"), own.products)
    own.part("start from files", 90, ("start",), own.load)
    own.part("the model", 60, (), own.build)
    own.part("decode", 40, ("decode_1", "host_cpu", "memory"), own.decode)
    own.part("decode, KV of 8 bits", 30, ("kv_fp8_64",), own.kv_codes)
    own.part("prefill", 30, ("prefill_8k",), own.prefill)
    own.part("pages out, for processors", 20, ("mixed_out", "mixed_beside"), own.mixed)
    own.part("compressed", 60, ("compressed_1", "compressed_16", "compressed_64"), own.compressed)
    own.part("free orders", 30, ("law1_decode", "law1_prefill"), own.law1_cost)
    own.part("transformers", 40, ("transformers",), own.transformers)
    own.part("experts", 60, ("moe_decode_1",), own.experts)
    own.findings.seconds = clock.spent_s
    return own.findings
