"""Types of the compiled kernels (cpp/python/module.cpp).  Arrays are C-contiguous; bf16 arrays are uint16."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

VERSION: int
EMULATES_AMX: bool

Answer = tuple[int, float, list[tuple[int, float]]]

def families() -> list[str]: ...
def set_threads(count: int) -> None: ...
def thread_count() -> int: ...
def guest_seconds() -> float: ...
def philox(key: int, counter: tuple[int, int, int, int]) -> tuple[int, int, int, int]: ...

class CoreShare:
    def __init__(
        self,
        lines: memoryview,
        me: int,
        own: tuple[int, int, int, list[int]],
        loans: list[tuple[int, int, int, list[int]]],
        /,
    ) -> None: ...
    def lend(self) -> None: ...
    def take(self) -> None: ...
    def close(self) -> None: ...

class Weights:
    def __init__(self, cells: NDArray[np.uint32], n: int, k: int, ends: list[int], per_cell: int, /) -> None: ...
    @staticmethod
    def cells_needed(n: int, k: int, ends: list[int], per_cell: int, /) -> int: ...
    def fill(self, weight: NDArray[Any], source: str, /) -> None: ...
    def fill_turned(self, weight: NDArray[Any], source: str, /) -> None: ...

class KvMemory:
    def __init__(
        self,
        cells: NDArray[np.uint32],
        pages: int,
        layers: int,
        kv_heads: int,
        key_dim: int,
        value_dim: int,
        shared: bool,
        per_cell: int,
        places: list[tuple[int, int]],
        /,
    ) -> None: ...
    def keep_states(self, sizes: tuple[int, int, int, int, int, int, int, int], /) -> None: ...

class AttentionRule:
    def __init__(
        self,
        scale: float,
        window: int,
        chunk: int,
        softcap: float,
        sinks: NDArray[np.float32] | None,
        until: int,
        sparse: tuple[int, int, int, int] | None,
        /,
    ) -> None: ...

class Rope:
    def __init__(self, table: NDArray[np.float32], interleaved: bool, axes: NDArray[np.uint8] | None, /) -> None: ...

class Batch:
    def __init__(
        self,
        positions: NDArray[np.int32],
        starts: NDArray[np.int32],
        table: NDArray[np.int32],
        turns: NDArray[np.int32] | None,
        /,
    ) -> None: ...
    def recur(self, states: NDArray[np.int32], /) -> None: ...

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
    def allow(self, words: NDArray[np.uint32], /) -> None: ...

class Kernels:
    def __init__(self, family: str, compute: str, /) -> None: ...
    def linear(self, x: NDArray[Any], weight: Weights, out: NDArray[np.float32], add: bool, /) -> None: ...
    def embed(self, table: Weights, tokens: NDArray[np.int32], out: NDArray[np.float32], /) -> None: ...
    def rms_norm(
        self, hidden: NDArray[np.float32], weight: NDArray[np.float32], eps: float, out: NDArray[Any], /
    ) -> None: ...
    def to_compute(self, values: NDArray[np.float32], out: NDArray[Any], /) -> None: ...
    def sample(self, logits: NDArray[np.float32], rows: list[DrawRow], /) -> list[Answer]: ...
    def score_tokens(self, logits: NDArray[np.float32], tokens: NDArray[np.int32], top: int, /) -> list[Answer]: ...
    def gumbel(
        self, seed: int, position: int, choice: int, ids: NDArray[np.int32], out: NDArray[np.float32], /
    ) -> None: ...
    def read_cells(self, cells: NDArray[np.uint32], /) -> int: ...
    def multiply(self, repeats: int, /) -> float: ...

GateWords = tuple[int, float, float, float, bool]

class RowKernels:
    def __init__(self, family: str, compute: str, /) -> None: ...
    def gated(self, gate_up: NDArray[np.float32], gate: GateWords, out: NDArray[Any], /) -> None: ...
    def activate(self, x: NDArray[np.float32], activation: int, alpha: float, out: NDArray[Any], /) -> None: ...
    def layer_norm(
        self,
        hidden: NDArray[np.float32],
        weight: NDArray[np.float32],
        bias: NDArray[np.float32] | None,
        eps: float,
        out: NDArray[Any],
        /,
    ) -> None: ...
    def layer_norm_in_place(
        self, hidden: NDArray[np.float32], weight: NDArray[np.float32], bias: NDArray[np.float32] | None, eps: float, /
    ) -> None: ...
    def norm_add(
        self, x: NDArray[np.float32], weight: NDArray[np.float32], eps: float, hidden: NDArray[np.float32], /
    ) -> None: ...
    def add_bias(self, x: NDArray[np.float32], bias: NDArray[np.float32], /) -> None: ...
    def add(self, x: NDArray[np.float32], hidden: NDArray[np.float32], /) -> None: ...
    def form(self, x: NDArray[np.float32], scale: float, cap: float, /) -> None: ...

RoutingWords = tuple[int, int, int, bool, int, int, bool, float]

class Experts:
    def __init__(
        self,
        gate_up: list[Any],
        down: list[Any],
        gate_up_bias: NDArray[np.float32] | None,
        down_bias: NDArray[np.float32] | None,
        per_cell: int,
        weighs_input: bool,
        /,
    ) -> None: ...

class ExpertKernels:
    def __init__(self, family: str, compute: str, /) -> None: ...
    def route(
        self,
        logits: NDArray[np.float32],
        how: RoutingWords,
        bias: NDArray[np.float32] | None,
        routes: NDArray[np.uint32],
        /,
    ) -> None: ...
    def add(
        self,
        x: NDArray[Any],
        routes: NDArray[np.uint32],
        experts: Experts,
        gate: GateWords,
        hidden: NDArray[np.float32],
        /,
    ) -> None: ...

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

class AttentionKernels:
    def __init__(self, family: str, compute: str, /) -> None: ...
    def norm_heads(
        self, x: NDArray[np.float32], weight: NDArray[np.float32], eps: float, first: int, count: int, /
    ) -> None: ...
    def rope_and_write(
        self,
        qkv: NDArray[np.float32],
        rope: Rope | None,
        q_scale: NDArray[np.float32] | None,
        kv: KvMemory,
        layer: int,
        batch: Batch,
        heads: int,
        q: NDArray[Any],
        /,
    ) -> None: ...
    def latent_write(
        self,
        latent: NDArray[np.float32],
        weight: NDArray[np.float32],
        eps: float,
        rope: Rope,
        kv: KvMemory,
        layer: int,
        batch: Batch,
        /,
    ) -> None: ...
    def latent_query(
        self,
        q: NDArray[np.float32],
        absorb: Weights,
        rope: Rope,
        kv: KvMemory,
        batch: Batch,
        heads: int,
        out: NDArray[Any],
        /,
    ) -> None: ...
    def heads_linear(self, x: NDArray[Any], weight: Weights, heads: int, out: NDArray[Any], /) -> None: ...
    def attention(
        self,
        q: NDArray[Any],
        kv: KvMemory,
        layer: int,
        batch: Batch,
        heads: int,
        rule: AttentionRule,
        out: NDArray[Any],
        /,
    ) -> None: ...
    def attention_once(
        self,
        qkv: NDArray[np.float32],
        starts: NDArray[np.int32],
        rope: Rope | None,
        rows: NDArray[np.int32] | None,
        heads: tuple[int, int],
        causal: bool,
        rule: AttentionRule,
        bias: NDArray[np.float32] | None,
        out: NDArray[Any],
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
        counted: NDArray[np.uint32] | None = None,
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

def pack_codes(codes: NDArray[np.uint8], bits: int, to: NDArray[np.uint8], /) -> None: ...

class QuantWeights:
    def __init__(self, n: int, k: int, ends: list[int], /) -> None: ...
    def add_part(
        self,
        codes: NDArray[np.uint8],
        scales: NDArray[np.uint8],
        table: NDArray[np.uint16],
        rows: int,
        bits: int,
        numbers: tuple[int, int, int],
        /,
    ) -> None: ...
    def set_order(self, order: NDArray[np.int32], /) -> None: ...

class QuantKernels:
    def __init__(self, family: str, compute: str, /) -> None: ...
    def linear(self, x: NDArray[Any], weight: QuantWeights, out: NDArray[np.float32], add: bool, /) -> None: ...
    def embed(self, table: QuantWeights, tokens: NDArray[np.int32], out: NDArray[np.float32], /) -> None: ...

class Adapters:
    def __init__(self, sites: list[tuple[int, int]], slots: int, per_cell: int, /) -> None: ...
    def put(self, slot: int, site: int, parts: list[tuple[Weights, Weights, int, float]], /) -> None: ...
    def clear(self, slot: int, /) -> None: ...

class AdapterKernels:
    def __init__(self, family: str, compute: str, /) -> None: ...
    def add(
        self, x: NDArray[Any], slots: NDArray[np.int32], adapters: Adapters, site: int, out: NDArray[np.float32], /
    ) -> None: ...

class StateKernels:
    def __init__(self, family: str, compute: str, /) -> None: ...
    def causal_conv(
        self,
        x: NDArray[np.float32],
        weight: NDArray[np.float32],
        kv: KvMemory,
        layer: int,
        batch: Batch,
        out: NDArray[np.float32],
        /,
    ) -> None: ...
    def delta_rule(
        self,
        qkv: NDArray[np.float32],
        gates: NDArray[np.float32],
        columns: tuple[int, int],
        rates: NDArray[np.float32],
        shifts: NDArray[np.float32],
        kv: KvMemory,
        layer: int,
        batch: Batch,
        out: NDArray[np.float32],
        /,
    ) -> None: ...
    def gated_norm(
        self,
        x: NDArray[np.float32],
        gate: NDArray[np.float32],
        first: int,
        weight: NDArray[np.float32],
        eps: float,
        out: NDArray[Any],
        /,
    ) -> None: ...
    def sigmoid_gated(self, x: NDArray[Any], gate: NDArray[np.float32], out: NDArray[Any], /) -> None: ...
    def gated_add(self, x: NDArray[np.float32], gate: NDArray[np.float32], hidden: NDArray[np.float32], /) -> None: ...

class StepInputs:
    def __init__(
        self,
        tokens: NDArray[np.int32],
        positions: NDArray[np.int32],
        starts: NDArray[np.int32],
        table: NDArray[np.int32],
        wanted: NDArray[np.int32],
        turns: NDArray[np.int32] | None,
        /,
    ) -> None: ...
    def give(self, rows: NDArray[np.int32], values: NDArray[np.float32], /) -> None: ...
    def bring(self, features: NDArray[np.float32], /) -> None: ...
    def hand_out(self, taps: NDArray[np.float32], /) -> None: ...
    def recur(self, states: NDArray[np.int32], /) -> None: ...
    def adapt(self, adapters: NDArray[np.int32], /) -> None: ...
    def pick(
        self,
        seeds: NDArray[np.uint64],
        positions: NDArray[np.uint32],
        choices: NDArray[np.uint32],
        temperatures: NDArray[np.float32],
        drawn: NDArray[np.int32],
        /,
    ) -> None: ...

class RecordedStep:
    hidden_shape: tuple[int, int]
    logits_shape: tuple[int, int]
    picks: bool
    arena_bytes: int
    buffers: int
    nodes: int
    def __init__(self, family: str, compute: str, kv: KvMemory, /) -> None: ...
    def embed(self, table: Weights | CompressedWeights | QuantWeights, /) -> int: ...
    def place_rows(self, hidden: int, /) -> None: ...
    def rms_norm(self, hidden: int, weight: NDArray[np.float32], eps: float, /) -> int: ...
    def linear(self, x: int, weight: Weights | CompressedWeights | QuantWeights, /) -> int: ...
    def linear_add(self, x: int, weight: Weights | CompressedWeights | QuantWeights, hidden: int, /) -> None: ...
    def positions(self, table: Weights | CompressedWeights | QuantWeights, /) -> int: ...
    def layer_norm(
        self, hidden: int, weight: NDArray[np.float32], bias: NDArray[np.float32] | None, eps: float, /
    ) -> int: ...
    def layer_norm_in_place(
        self, hidden: int, weight: NDArray[np.float32], bias: NDArray[np.float32] | None, eps: float, /
    ) -> None: ...
    def norm_add(self, x: int, weight: NDArray[np.float32], eps: float, hidden: int, /) -> None: ...
    def add_bias(self, x: int, bias: NDArray[np.float32], /) -> None: ...
    def add(self, x: int, hidden: int, /) -> None: ...
    def form(self, x: int, scale: float, cap: float, /) -> None: ...
    def gated(self, gate_up: int, gate: GateWords, /) -> int: ...
    def activate(self, x: int, activation: int, alpha: float, /) -> int: ...
    def route(self, logits: int, how: RoutingWords, bias: NDArray[np.float32] | None, /) -> int: ...
    def experts_add(self, x: int, routes: int, experts: Experts, gate: GateWords, hidden: int, /) -> None: ...
    def norm_heads(self, x: int, weight: NDArray[np.float32], eps: float, first: int, count: int, /) -> None: ...
    def rope_and_write(
        self, qkv: int, rope: Rope | None, q_scale: NDArray[np.float32] | None, layer: int, heads: int, /
    ) -> int: ...
    def latent_write(self, latent: int, weight: NDArray[np.float32], eps: float, rope: Rope, layer: int, /) -> None: ...
    def latent_query(self, q: int, absorb: Weights, rope: Rope, heads: int, /) -> int: ...
    def heads_linear(self, x: int, weight: Weights, heads: int, /) -> int: ...
    def attention(self, q: int, layer: int, rule: AttentionRule, /) -> int: ...
    def features(self, width: int, /) -> int: ...
    def tap(self, hidden: int, place: int, /) -> None: ...
    def lora_add(self, x: int, adapters: Adapters, site: int, out: int, /) -> None: ...
    def causal_conv(self, x: int, weight: NDArray[np.float32], layer: int, /) -> int: ...
    def delta_rule(
        self,
        qkv: int,
        gates: int,
        columns: tuple[int, int],
        rates: NDArray[np.float32],
        shifts: NDArray[np.float32],
        layer: int,
        /,
    ) -> int: ...
    def gated_norm(self, x: int, gate: int, first: int, weight: NDArray[np.float32], eps: float, /) -> int: ...
    def sigmoid_gated(self, x: int, gate: int, /) -> int: ...
    def gated_add(self, x: int, gate: int, hidden: int, /) -> None: ...
    def wanted_rows(self, x: int, /) -> int: ...
    def drawn_rows(self, hidden: int, /) -> int: ...
    def finish(self, logits: int, /) -> None: ...
    def run(
        self, inputs: StepInputs, scored: int, rows: list[DrawRow], ready: Callable[[], None] | None, /
    ) -> list[Answer]: ...
    def read_hidden(self, out: NDArray[np.float32], /) -> None: ...
    def read_logits(self, out: NDArray[np.float32], /) -> None: ...

PIECE_BYTES: int

def xxh3_128(data: memoryview, /) -> bytes: ...
def xxh3_64(data: memoryview, seed: int, /) -> int:
    """Of 97 to 128 bytes.  ValueError for another length."""

def seal_page(page: memoryview, suffix: bytes, /) -> bytes:
    """XXH3-128 of a page and the 1 to 1024 bytes behind it.  ValueError for another number of those."""

def copy_page(page: memoryview, into: memoryview, suffix: bytes, /) -> bytes:
    """The same of the copy that it makes in the same pass.  ValueError also for pages of different sizes."""

class Arrivals:
    """Pages that come over a socket one behind the other, into where they are to stand, hashed piece by piece.

    One thread takes them; any may ``stop`` that.
    """

    def __init__(self, pages: list[memoryview], /) -> None: ...
    def receive(self, descriptor: int, patience_s: float, /) -> int:
        """Waits until all pages are here, or one that is due.  Returns bytes; 0: none came for ``patience_s``, or
        it was stopped; -1: the other end has hung up.  OSError."""

    def stop(self) -> None:
        """Nothing more is written once this returns."""

    def checksum(self, page: int, suffix: bytes, /) -> bytes:
        """As ``seal_page``, of a page that is there; once.  ValueError for one that is not."""

    @property
    def done(self) -> int:
        """Pages that are there."""

    @property
    def left(self) -> int:
        """Bytes that are not."""

class Loading:
    def __init__(self) -> None: ...
    def add_tensor(self) -> int: ...
    def add_rows(
        self, tensor: int, file: int, offset: int, weights: Weights, source: str, first: int, rows: int, /
    ) -> None: ...
    def add_panels(
        self,
        tensor: int,
        file: int,
        offset: int,
        blocks: NDArray[np.uint8],
        blocks_a_panel: int,
        escapes: NDArray[np.uint32],
        /,
    ) -> None: ...
    def add_bytes(self, tensor: int, file: int, offset: int, to: NDArray[np.uint8], /) -> None: ...
    def start(self, threads: int, /) -> None: ...
    def wait(self, seconds: float, /) -> bool: ...
    def stop(self) -> None: ...
    def failure(self) -> tuple[int, str] | None: ...
    def done_bytes(self) -> int: ...
    def all_bytes(self) -> int: ...
    def checksum(self, tensor: int, text: str, /) -> bytes: ...

def hash_blocks(parent: bytes, tokens: Sequence[int], first: int, last: int, /) -> list[bytes]: ...
def hash_chain(root: bytes, tokens: NDArray[np.uint32], out: NDArray[np.uint8], /) -> None: ...

class BlockIndex:
    def __init__(self, max_blocks: int, max_owners: int, /) -> None: ...
    def open(self) -> int | None: ...
    def close(self, owner: int, /) -> None: ...
    def sweep(self, places: int, /) -> None: ...
    def add(self, owner: int, keys: bytes, /) -> int: ...
    def remove(self, owner: int, keys: bytes, /) -> None: ...
    def has(self, owner: int, hash: bytes, /) -> bool: ...
    def match(self, hashes: Sequence[bytes], depths: NDArray[np.int32], /) -> None: ...
    def blocks(self) -> int: ...
    def memory_bytes(self) -> int: ...
