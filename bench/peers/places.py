"""What is compared, and where everything lies: systems, shapes of models, and the folders of one work place.

Knows nothing about how any of it is made or measured.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Final

REPOSITORY: Final = Path(__file__).resolve().parents[2]
HERE: Final = Path(__file__).resolve().parent


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """A model of the Llama architecture with tied embeddings."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int = 128_256
    max_positions: int = 8192
    rope_theta: float = 500_000.0
    eps: float = 1e-5
    experts: int = 0  # of each layer, as Mixtral has them; 0: one MLP
    top_k: int = 2  # of which a token passes

    @property
    def layer_parameters(self) -> int:
        """Weights of the matrices of all layers: what a prompt's token is multiplied with."""
        attention = 2 * self.hidden * self.head_dim * (self.heads + self.kv_heads)
        passed = self.top_k if self.experts else 1
        return self.layers * (attention + 3 * self.hidden * self.intermediate * passed)

    @property
    def parameters(self) -> int:
        return self.layer_parameters + self.vocab * self.hidden + self.hidden * (2 * self.layers + 1)

    @property
    def kv_bytes_per_token(self) -> int:
        """Keys and values of 16 bits."""
        return 2 * 2 * self.layers * self.kv_heads * self.head_dim


SHAPES: Final = {
    "1b": Shape(hidden=2048, layers=16, heads=32, kv_heads=8, head_dim=64, intermediate=8192),
    "100m": Shape(hidden=512, layers=10, heads=8, kv_heads=4, head_dim=64, intermediate=1536),
}
"""Llama-3.2-1B's own shape, and one of 97 million parameters with the same vocabulary."""

PLAIN, COMPRESSED = "penstock", "penstock-compressed"
TRANSFORMERS, LLAMA, VLLM, OPENVINO = "transformers", "llama.cpp", "vllm", "openvino"
PEERS: Final = (TRANSFORMERS, LLAMA, VLLM, OPENVINO)
OFFLINE_SYSTEMS: Final = (PLAIN, COMPRESSED, *PEERS)

QUANTS: Final = ("Q8_0", "Q4_K_M")
"""Types of GGUF files, as llama-quantize calls them."""

INT8: Final = "penstock-int8"
"""Penstock with ``--activation-dtype int8``."""

CODED: Final = {
    f"{PLAIN}-{kind.lower()}-int8" if maker == INT8 else f"{maker}-{kind.lower()}": (maker, kind)
    for kind in QUANTS
    for maker in (PLAIN, INT8, LLAMA)
}
"""(who reads it, its type) of systems that are measured with a quantised GGUF file, the same for all."""

SPLIT, SPLIT_PLAIN, AGGREGATED = "penstock-split", "penstock-split-plain", "penstock-aggregated"
OWN_SERVERS: Final = (SPLIT, SPLIT_PLAIN, AGGREGATED)
SERVERS: Final = (*OWN_SERVERS, LLAMA, VLLM)


def default_workdir() -> Path:
    """Outside of the repository: gigabytes of virtual environments and checkpoints."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "penstock-peers"


def cores() -> int:
    """Processors that this process may use."""
    return len(os.sched_getaffinity(0))


@dataclass(frozen=True, slots=True)
class Workplace:
    """The folders of one comparison."""

    root: Path

    def venv(self, peer: str) -> Path:
        return self.root / "venvs" / peer

    def python(self, peer: str) -> Path:
        return self.venv(peer) / "bin" / "python"

    @property
    def llama_build(self) -> Path:
        return self.root / "llama.cpp"

    def llama_tool(self, name: str) -> Path:
        return self.llama_build / "bin" / name

    def checkpoint(self, model: str) -> Path:
        """A Hugging Face folder, bf16."""
        return self.root / "models" / model / "plain"

    def compressed(self, model: str) -> Path:
        """The same, through ``penstock compress``."""
        return self.root / "models" / model / "compressed"

    def gguf(self, model: str, kind: str = "BF16") -> Path:
        """The same as a GGUF file; ``kind`` is BF16 or one of ``QUANTS``."""
        return self.root / "models" / model / f"model-{kind.lower()}.gguf"

    def openvino(self, model: str) -> Path:
        """The same for OpenVINO, stored as fp16."""
        return self.root / "models" / model / "openvino"

    @property
    def logs(self) -> Path:
        return self.root / "logs"

    @property
    def results(self) -> Path:
        """One JSON object a line."""
        return self.root / "results.jsonl"
