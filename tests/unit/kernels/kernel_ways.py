"""What holds for every kind of attention: any cut in any company, and recorded as run, has the same bits.

Knows no kind: a test gives what makes a story (``kernel_cases.Story``) of it anew.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from kernel_cases import Story, assert_same_bits
from numpy.typing import NDArray

from penstock.kernels import _native
from penstock.kernels.native.program import RecordedProgram
from penstock.kernels.operands import StepBatch
from penstock.kernels.ops import DirectProgram
from penstock.kernels.sampling import GumbelRows

Parts = list[tuple[int, int, int]]
"""Tokens [start, end) of each named sequence."""


def assert_any_cut_is_the_same(story: Callable[[list[int]], Story], lengths: list[int], *, last: int) -> None:
    """Token by token, in pieces, beside others; the ``last`` tokens of a third sequence with more threads, apart."""
    together, apart = story(lengths).whole(), story(lengths)
    apart.step([(1, 0, 77), (0, 0, 29)])
    for position in range(77, lengths[1]):
        apart.step([(1, position, position + 1)])
    apart.step([(0, 29, lengths[0])])
    if len(lengths) > 2:
        middle = lengths[2] - last
        apart.step([(2, 0, middle)])
        _native.set_threads(4)
        for start in range(middle, lengths[2], last // 5):
            apart.step([(2, start, start + last // 5)])
        _native.set_threads(1)
    for a, b in zip(together, apart.out, strict=True):
        assert_same_bits(a, b, f"{len(a)} tokens")


def assert_recorded_as_run(
    ops: Any, story: Callable[[], Any], layer: Callable[[Any], Any], steps: Sequence[Parts]
) -> tuple[RecordedProgram, Any]:
    """What was recorded, and the story that it was recorded for."""
    recorded_of, direct_of = story(), story()
    recorded = ops.record(layer(recorded_of), recorded_of.kv)
    direct = DirectProgram(ops, layer(direct_of), direct_of.kv)
    assert isinstance(recorded, RecordedProgram)
    for parts in steps:
        got = _hidden(ops, recorded, recorded_of.batch(parts))
        assert_same_bits(got, _hidden(ops, direct, direct_of.batch(parts)))
    return recorded, recorded_of


def _hidden(ops: Any, program: Any, batch: StepBatch) -> NDArray[np.float32]:
    """Of all tokens of a step."""
    tokens_T = (batch.positions_T * 7 % 40).astype(np.int32)
    wanted_R = np.arange(len(tokens_T), dtype=np.int32)
    program.run(replace(batch, tokens_T=tokens_T, sample_rows_R=wanted_R), len(wanted_R), [], GumbelRows.empty(0))
    return np.array(ops.to_numpy(program.hidden()))
