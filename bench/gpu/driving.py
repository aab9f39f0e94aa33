"""A model's step, driven by hand: batches of any shape over a KV memory of their own."""

from __future__ import annotations

import numpy as np
from bench.gpu.models import Made
from numpy.typing import NDArray

from penstock.kernels.operands import StepBatch
from penstock.kernels.ops import Ops, StepProgram
from penstock.kernels.sampling import GumbelRows
from penstock.types import PAGE_TOKENS

SPARE_BLOCKS = 4


class Driver:
    """So many sequences with room for so many tokens each, their pages scattered."""

    def __init__(self, made: Made, ops: Ops, sequences: int, tokens: int) -> None:
        self.made, self.ops = made, ops
        self.blocks = -(-tokens // PAGE_TOKENS) + SPARE_BLOCKS
        pages = sequences * self.blocks
        self.kv = ops.new_kv(made.spec.kv, pages=pages)
        page_bytes = ops.page_bytes(made.spec.kv)
        self.kv_bytes, self.kv_bytes_per_token = pages * page_bytes, page_bytes // PAGE_TOKENS
        order = np.random.default_rng(1).permutation(pages).astype(np.int32)
        self.table_SP = order.reshape(sequences, self.blocks)
        self.program: StepProgram = ops.record(made.model, self.kv)
        self.vocab = made.spec.vocab

    def texts(self, sequences: int, tokens: int) -> NDArray[np.int32]:
        """[sequences, tokens]"""
        rng = np.random.default_rng(7)
        return rng.integers(0, self.vocab, (sequences, tokens)).astype(np.int32)

    def prompt(
        self, text_N: NDArray[np.int32], start: int, sequence: int, *, draws: bool
    ) -> tuple[StepBatch, GumbelRows]:
        """Tokens from ``start`` on of one sequence."""
        count = len(text_N)
        batch = StepBatch(
            text_N,
            np.arange(start, start + count, dtype=np.int32),
            np.array([0, count], np.int32),
            self.table_SP[sequence : sequence + 1],
            np.array([count - 1] if draws else [], np.int32),
        )
        return batch, self.picks(int(draws), start + count)

    def answers(self, sequences: int, position: int) -> tuple[StepBatch, GumbelRows]:
        """One token of each sequence, all at this position."""
        batch = StepBatch(
            self.texts(sequences, 1)[:, 0].copy(),
            np.full(sequences, position, np.int32),
            np.arange(sequences + 1, dtype=np.int32),
            np.ascontiguousarray(self.table_SP[:sequences]),
            np.arange(sequences, dtype=np.int32),
        )
        return batch, self.picks(sequences, position + 1)

    def picks(self, count: int, position: int) -> GumbelRows:
        """Half greedy, half at temperature 1."""
        picks = GumbelRows.empty(count)
        picks.seeds_F[:] = np.arange(count)
        picks.positions_F[:] = position
        picks.temperatures_F[:] = np.arange(count) % 2
        return picks

    def as_one(self, tokens: int) -> None:
        """Pages of several become one sequence's, for a longer prompt; what stood there is overwritten."""
        self.table_SP = self.table_SP.reshape(1, -1)[:, : -(-tokens // PAGE_TOKENS) + SPARE_BLOCKS]

    def read(self, text_N: NDArray[np.int32], sequence: int, chunk: int) -> int:
        """A prompt in pieces; the token drawn after it."""
        for start in range(0, len(text_N), chunk):
            piece_N = text_N[start : start + chunk]
            last = start + len(piece_N) == len(text_N)
            batch, picks = self.prompt(piece_N, start, sequence, draws=last)
            self.program.run(batch, 0, [], picks)
        return int(picks.tokens_F[0])
