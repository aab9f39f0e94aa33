"""What a run found: figures with their bars, checks with their verdicts, and what is owed.  Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Bar:
    """One line of the table: what is to be shown, and how much of it is enough."""

    key: str
    what: str
    wanted: str
    least: float | None = None
    most: float | None = None
    unit: str = ""

    def met(self, value: float) -> bool:
        """Does this figure do?"""
        return (self.least is None or value >= self.least) and (self.most is None or value <= self.most)


BARS: Sequence[Bar] = (
    Bar("decode_1", "decode, batch 1, plain: of the read bandwidth, over weights and KV", ">= 0.85", least=0.85),
    Bar("compressed_1", "decode, batch 1: compressed against plain", ">= 1.2", least=1.2, unit="x"),
    Bar("compressed_16", "decode, batch 16: compressed against plain", ">= 1.1", least=1.1, unit="x"),
    Bar("compressed_64", "decode, batch 64: compressed against plain", ">= 0.98", least=0.98, unit="x"),
    Bar("kv_fp8_64", "decode, batch 64 of 1,024 tokens each: KV in fp8_e4m3 against bf16", "shown", unit="x"),
    Bar("prefill_8k", "prefill of 8,192 tokens: of the matmul rate", ">= 0.70", least=0.70),
    Bar("gemm_plain", "fixed-order products against cuBLAS, the least of the model's shapes", ">= 0.95", least=0.95),
    Bar("gemm_tree", "the same where the tree of 8 segments applies", ">= 0.85", least=0.85),
    Bar("attention", "paged attention of a prompt against SDPA", "shown"),
    Bar("law1_decode", "cost of law 1: a decode step of batch 16 against free orders", "<= 1.03", most=1.03, unit="x"),
    Bar("law1_prefill", "cost of law 1: 2,048 tokens of a prompt against free orders", "<= 1.03", most=1.03, unit="x"),
    Bar("mixed_out", "mixed fleets: pages of 2,048 tokens gathered, turned, copied to the host", "shown", unit="GB/s"),
    Bar("mixed_beside", "the same beside the next 2,048 tokens, against reading those alone", "shown", unit="x"),
    Bar("host_cpu", "host CPU at 10,000 output tokens/s, of one core", "< 0.25", most=0.25),
    Bar("start", "8 B model: from page cache to first token", "< 4 s", most=4.0, unit="s"),
    Bar("memory", "GPU memory beside weights and KV", "< 1.5 GiB", most=1.5, unit="GiB"),
    Bar("plan", "what `penstock plan` says is free, against torch.cuda", "within 3 %", most=0.03),
    Bar("moe_decode_1", "decode, batch 1, MoE shape: of the read bandwidth, over what is read", "shown"),
    Bar("transformers", "decode, batch 1: against transformers with SDPA", "shown", unit="x"),
)


@dataclass(frozen=True, slots=True)
class Check:
    """One kernel, or one law, tried."""

    name: str
    passed: bool
    found: str


@dataclass(slots=True)
class Findings:
    """Everything that a run brings."""

    machine: dict[str, Any] = field(default_factory=dict)
    roofline: dict[str, float] = field(default_factory=dict)
    checks: list[Check] = field(default_factory=list)
    figures: dict[str, float] = field(default_factory=dict)
    notes: dict[str, str] = field(default_factory=dict)  # by the key of a bar: how it came about, or why it is owed
    tables: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    dry: bool = False
    seconds: float = 0.0

    def record(self, key: str, value: float, note: str = "") -> None:
        """A bar's figure.  Raises KeyError for a bar that is not there."""
        if key not in {bar.key for bar in BARS}:
            raise KeyError(key)
        self.figures[key] = value
        if note:
            self.notes[key] = note

    def owe(self, key: str, why: str) -> None:
        """This bar has no figure."""
        if key not in {bar.key for bar in BARS}:
            raise KeyError(key)
        self.notes[key] = why

    @property
    def failed(self) -> list[Check]:
        return [check for check in self.checks if not check.passed]

    def as_json(self) -> dict[str, Any]:
        """All of it."""
        return asdict(self)
