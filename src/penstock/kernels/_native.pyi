"""Types of the compiled kernels (cpp/module.cpp).  Arrays are C-contiguous; bf16 arrays are uint16."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

VERSION: int

Answer = tuple[int, float, list[tuple[int, float]]]

def families() -> list[str]: ...
def set_threads(count: int) -> None: ...
def thread_count() -> int: ...
def philox(key: int, counter: tuple[int, int, int, int]) -> tuple[int, int, int, int]: ...

class Weights:
    def __init__(self, cells: NDArray[np.uint32], n: int, k: int, ends: list[int], per_cell: int, /) -> None: ...
    @staticmethod
    def cells_needed(n: int, k: int, ends: list[int], per_cell: int, /) -> int: ...
    def fill(self, weight: NDArray[Any], source: str, /) -> None: ...

class KvMemory:
    def __init__(
        self, cells: NDArray[np.uint32], pages: int, layers: int, kv_heads: int, head_dim: int, per_cell: int, /
    ) -> None: ...

class Batch:
    def __init__(
        self, positions: NDArray[np.int32], starts: NDArray[np.int32], table: NDArray[np.int32], /
    ) -> None: ...

class DrawRow:
    def __init__(
        self,
        seed: int,
        position: int,
        choice: int,
        temperature: float,
        top_k: int | None,
        top_p: float,
        min_p: float,
        logprobs: int | None,
        /,
    ) -> None: ...
    def penalise(
        self,
        presence: float,
        frequency: float,
        repetition: float,
        output_ids: NDArray[np.int32],
        output_counts: NDArray[np.int32],
        prompt_ids: NDArray[np.int32],
        /,
    ) -> None: ...
    def set_bias(self, ids: NDArray[np.int32], values: NDArray[np.float32], /) -> None: ...
    def ban(self, ids: NDArray[np.int32], /) -> None: ...

class Kernels:
    def __init__(self, family: str, compute: str, /) -> None: ...
    def linear(self, x: NDArray[Any], weight: Weights, out: NDArray[np.float32], add: bool, /) -> None: ...
    def embed(self, table: Weights, tokens: NDArray[np.int32], out: NDArray[np.float32], /) -> None: ...
    def rms_norm(
        self, hidden: NDArray[np.float32], weight: NDArray[np.float32], eps: float, out: NDArray[Any], /
    ) -> None: ...
    def silu_mul(self, gate_up: NDArray[np.float32], out: NDArray[Any], /) -> None: ...
    def rope_and_write(
        self,
        qkv: NDArray[np.float32],
        rope: NDArray[np.float32],
        kv: KvMemory,
        layer: int,
        batch: Batch,
        heads: int,
        q: NDArray[Any],
        /,
    ) -> None: ...
    def attention(
        self, q: NDArray[Any], kv: KvMemory, layer: int, batch: Batch, heads: int, scale: float, out: NDArray[Any], /
    ) -> None: ...
    def to_compute(self, values: NDArray[np.float32], out: NDArray[Any], /) -> None: ...
    def sample(self, logits: NDArray[np.float32], rows: list[DrawRow], /) -> list[Answer]: ...
    def score_tokens(self, logits: NDArray[np.float32], tokens: NDArray[np.int32], top: int, /) -> list[Answer]: ...
    def gumbel(
        self, seed: int, position: int, choice: int, ids: NDArray[np.int32], out: NDArray[np.float32], /
    ) -> None: ...
    def read_cells(self, cells: NDArray[np.uint32], /) -> int: ...
    def multiply(self, repeats: int, /) -> float: ...

def count_exponents(weight: NDArray[np.uint16], /) -> list[int]: ...
def encode(
    weight: NDArray[np.uint16],
    base: int,
    step: int,
    blocks: NDArray[np.uint8],
    escapes: NDArray[np.uint8],
    counts: NDArray[np.uint32],
    /,
) -> None: ...

class CompressedWeights:
    whole_blocks: bool
    def __init__(
        self,
        blocks: NDArray[np.uint8],
        escapes: NDArray[np.uint8],
        codes: NDArray[np.uint8],
        n: int,
        k: int,
        ends: list[int],
        /,
    ) -> None: ...
    def counts_are(self, counts: NDArray[np.uint32], /) -> bool: ...

class CompressedKernels:
    def __init__(self, family: str, /) -> None: ...
    def in_registers(self) -> bool: ...
    def linear(
        self, x: NDArray[np.uint16], weight: CompressedWeights, out: NDArray[np.float32], add: bool, /
    ) -> None: ...
    def embed(self, table: CompressedWeights, tokens: NDArray[np.int32], out: NDArray[np.float32], /) -> None: ...
    def decode(self, weight: CompressedWeights, panel: int, out: NDArray[np.uint16], /) -> None: ...
