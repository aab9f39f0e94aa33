"""Recurrent layers on a GPU: any cut, any company, and nobody waits.

``test_kernels_states`` faces the same kernels at length; here two sequences of a cell and some tokens.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from kernel_cases import TRITONS, assert_close, assert_same_bits, make, normal
from nobody_waits import nobody_waits
from numpy.typing import NDArray
from test_kernels_states import CELL, STATES, Delta, Stack, wanted

from penstock.kernels.operands import StateShape, StepBatch
from penstock.kernels.ops import DirectProgram
from penstock.kernels.reference.backend import ReferenceOps
from penstock.kernels.sampling import GumbelRows
from penstock.kernels.triton.program import DeviceProgram

LENGTHS = (34, 3)
SMALL = StateShape(layers=2, key_heads=1, heads=2, key_dim=8, value_dim=16, taps=4, cell=CELL)


class OnDevice(Delta):
    """Short sequences, whose arrays are on the device, as a captured graph has them."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.x = [normal(length, length, self.width) for length in LENGTHS]
        pages = int(self.pages.size)
        self.kv = self.ops.new_kv(self.shape, pages=pages)
        self.kv.states[:] = torch.nan

    def run(self, pieces: list[tuple[int, int, int]]) -> list[NDArray[np.float32]]:
        """Convolved inputs and what is read, of each piece."""
        host = self.batch(pieces)
        names = ("positions_T", "starts_S1", "states_SW")
        arrays: dict[str, Any] = {name: torch.from_numpy(getattr(host, name)).to(self.ops.device) for name in names}
        batch: StepBatch = replace(host, **arrays)
        x_TN = self.ops.hidden(np.concatenate([self.x[s][start:end] for s, start, end in pieces]))
        with nobody_waits():
            made = self.mix(self.ops, x_TN, batch)
        both = np.concatenate([self.ops.to_numpy(part) for part in made], axis=1)
        return [np.ascontiguousarray(both[first:last]) for first, last in pairwise(host.starts_S1)]


def test_states_in_any_cut_and_company() -> None:
    """Over the end of a cell token by token, and as a prompt; beside another sequence, and alone."""
    story = OnDevice(make(*TRITONS[1]), SMALL, 1)
    whole, beside = story.run([(0, 0, 34), (1, 0, 3)])
    assert_close(whole, wanted(story, story.x[0]), 2e-5)
    again = OnDevice(make(*TRITONS[1]), SMALL, 1)
    pieces = [again.run([(0, start, end)])[0] for start, end in pairwise((0, 31, 33, 34))]
    assert_same_bits(np.concatenate(pieces), whole)
    assert_same_bits(again.run([(1, 0, 3)])[0], beside)


def test_the_memory_is_the_oracles() -> None:
    """What is kept stands where the oracle keeps it: a state can be taken over."""
    kept = []
    for ops in (make(*TRITONS[1]), ReferenceOps(compute_dtype="fp32", device=str(make(*TRITONS[1]).device))):
        story = OnDevice(ops, STATES, 0)
        if isinstance(ops, ReferenceOps) and type(ops) is ReferenceOps:
            story.step([(1, 0, 3)])
        else:
            story.run([(1, 0, 3)])
        kept.append(np.array(ops.to_numpy(story.kv.states)))
    written = np.isfinite(kept[1])
    assert (np.isfinite(kept[0]) == written).mean() > 0.99  # what fills up the last row of the inputs is nobody's
    both = written & np.isfinite(kept[0])
    assert_close(kept[0][both], kept[1][both], 2e-5)


@pytest.mark.long
def test_a_program_brings_the_pages_of_states() -> None:
    """As they are, from the device's arrays: no padding, the bits of operation by operation."""
    ops, hidden = make(*TRITONS[0]), []
    for device in (False, True):
        story = Delta(ops, STATES, 1)
        steps = Stack(story)
        program = ops.record(steps, story.kv) if device else DirectProgram(ops, steps, story.kv)
        assert isinstance(program, DeviceProgram) == device
        for start, end in ((0, 30), (30, 34), (34, 35)):
            batch = story.batch([(0, start, end), (1, 0, 1)] if start == 34 else [(0, start, end)])
            rows_R = np.arange(len(batch.positions_T), dtype=np.int32)
            batch = replace(batch, tokens_T=(batch.positions_T * 7 % 40).astype(np.int32), sample_rows_R=rows_R)
            program.run(batch, 0, [], GumbelRows.empty(len(rows_R)))
        hidden.append(np.array(ops.to_numpy(program.hidden())))
    assert_same_bits(*hidden)


def test_a_step_without_pages_of_states_is_refused() -> None:
    story = OnDevice(make(*TRITONS[1]), STATES, 0)
    batch = replace(story.batch([(1, 0, 3)]), states_SW=None)
    with pytest.raises(ValueError, match="brings the pages of its states"):
        story.mix(story.ops, story.ops.hidden(story.x[1]), batch)
