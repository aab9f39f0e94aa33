"""What a step is given, on its way to the device: one buffer of 4-byte words, filled by the host and copied at once.

::

    pinned  | tokens | positions | starts | wanted | table | seeds | places | choices | temperatures | sources | ... |
               |  one copy on the step's stream
    device  | the same places                                                                                  |

Every part begins at a multiple of ``ALIGNED`` words, so kernels see aligned pointers whatever the sizes.  A step with
fewer rows than its shape is filled up with copies of its shortest sequence: they compute the same bits and write them
to the same place, so padding needs no mask, no page of its own, and changes nothing.

Knows where numbers lie, not what is computed from them.  This module imports torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from types import MappingProxyType
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from penstock.kernels.operands import StepBatch
from penstock.kernels.sampling import GumbelRows

ALIGNED = 64
"""Words: 256 bytes, as the device's allocator aligns."""

BUFFERS = 2
"""Pinned buffers that take turns: the host fills one while the other may still be on its way."""

SHAPES = 512
"""Whose places are remembered: those of captured steps and of prompts that came lately."""


@dataclass(frozen=True, slots=True)
class StepShape:
    """Sizes of a step's arrays, padding included."""

    tokens: int
    sequences: int
    wanted: int
    columns: int  # of the page table, all groups of layers together
    adapted: bool = False  # some sequence may have an adapter
    states: int = 0  # columns of the pages of recurrent layers' states; such steps are not padded

    @classmethod
    def of(cls, batch: StepBatch) -> StepShape:
        """The shape of a batch without padding."""
        return cls(
            len(batch.tokens_T),
            len(batch.starts_S1) - 1,
            len(batch.sample_rows_R),
            int(batch.table_SP.shape[1]),
            adapted=batch.adapters_S is not None,
            states=0 if batch.states_SW is None else int(batch.states_SW.shape[1]),
        )

    @property
    def words(self) -> int:
        """Words of the whole buffer."""
        return _places(self)[1]


Places = Mapping[str, slice]


@lru_cache(maxsize=SHAPES)
def _places(shape: StepShape) -> tuple[Places, int]:
    sizes = {
        "tokens": shape.tokens,
        "positions": shape.tokens,
        "starts": shape.sequences + 1,
        "wanted": shape.wanted,
        "table": shape.sequences * shape.columns,
        "seeds": 2 * shape.wanted,
        "places": shape.wanted,
        "choices": shape.wanted,
        "temperatures": shape.wanted,
        "sources": shape.tokens,
        "slots": shape.sequences if shape.adapted else 0,
        "states": shape.sequences * shape.states,
    }
    found, begin = {}, 0
    for name, size in sizes.items():
        found[name] = slice(begin, begin + size)
        begin += -(-size // ALIGNED) * ALIGNED
    return MappingProxyType(found), begin


@dataclass(frozen=True, slots=True)
class DeviceGumbelRows:
    """Sampling by temperature alone of each output row, on the device; zeros for other rows."""

    seeds_R: Tensor  # int64: the 64 bits of the seed
    positions_R: Tensor
    choices_R: Tensor
    temperatures_R: Tensor  # fp32


class DeviceArrays:
    """The arrays of one shape, over memory of the device that stays where it is."""

    def __init__(self, shape: StepShape, words: Tensor) -> None:
        """``words``: int32, ``shape.words`` of them at least."""
        places, size = _places(shape)
        self.shape = shape
        self.words = words[:size]
        own = {name: self.words[place] for name, place in places.items()}
        self.sources_T = own["sources"]
        self._tokens_T = own["tokens"]
        self.batch = StepBatch(
            tokens_T=cast(Any, own["tokens"]),
            positions_T=cast(Any, own["positions"]),
            starts_S1=cast(Any, own["starts"]),
            table_SP=cast(Any, own["table"].view(shape.sequences, shape.columns)),
            sample_rows_R=cast(Any, own["wanted"]),
            states_SW=cast(Any, own["states"].view(shape.sequences, -1)) if shape.states else None,
            adapters_S=cast(Any, own["slots"]) if shape.adapted else None,
        )
        self.draws = DeviceGumbelRows(
            own["seeds"].view(torch.int64),
            own["places"],
            own["choices"],
            own["temperatures"].view(torch.float32),
        )

    def feed(self, drawn_R: Tensor) -> None:
        """Tokens of the step before become this one's inputs, each for its row and the copies of it."""
        torch.index_select(drawn_R, 0, self.sources_T, out=self._tokens_T)


def fill(words: NDArray[np.int32], shape: StepShape, batch: StepBatch, picks: GumbelRows) -> None:
    """Write a batch to a host's buffer, padded to ``shape``; its last wanted rows are the picks.

    Raises ValueError where padding is wanted and a sequence has more than one token, or ``shape`` is too small.
    """
    places, _ = _places(shape)
    count, sequences, wanted = len(batch.tokens_T), len(batch.starts_S1) - 1, len(batch.sample_rows_R)
    columns = int(batch.table_SP.shape[1])
    padded = (count, sequences) != (shape.tokens, shape.sequences)
    if padded and count != sequences:
        raise ValueError("only steps with one token a sequence are padded")
    if min(shape.tokens - count, shape.sequences - sequences, shape.wanted - wanted, shape.columns - columns) < 0:
        raise ValueError(f"a step of {StepShape.of(batch)} does not fit into {shape}")
    source = int(np.argmin(batch.positions_T)) if padded else 0
    for name, values_T in (("tokens", batch.tokens_T), ("positions", batch.positions_T)):
        own = words[places[name]]
        own[:count] = values_T
        own[count:] = values_T[source] if padded else 0
    starts = words[places["starts"]]
    starts[: sequences + 1] = batch.starts_S1
    starts[sequences + 1 :] = np.arange(sequences + 1, shape.sequences + 1)
    table = words[places["table"]].reshape(shape.sequences, shape.columns)
    table[:sequences, :columns] = batch.table_SP
    table[sequences:, :columns] = batch.table_SP[source]
    table[:, columns:] = 0
    rows = words[places["wanted"]]
    rows[:wanted] = batch.sample_rows_R
    rows[wanted:] = 0
    sources = words[places["sources"]]
    sources[:count] = np.arange(count)
    sources[count:] = source
    if batch.states_SW is not None:
        words[places["states"]] = batch.states_SW.ravel()
    if batch.adapters_S is not None:
        slots = words[places["slots"]]
        slots[:sequences] = batch.adapters_S
        slots[sequences:] = batch.adapters_S[source]
    _fill_draws(words, places, wanted, picks)


def _fill_draws(words: NDArray[np.int32], places: Places, wanted: int, picks: GumbelRows) -> None:
    first = wanted - len(picks.tokens_F)
    columns: tuple[tuple[str, NDArray[Any], int], ...] = (
        ("seeds", picks.seeds_F, 2),
        ("places", picks.positions_F, 1),
        ("choices", picks.choices_F, 1),
        ("temperatures", picks.temperatures_F, 1),
    )
    for name, values_F, width in columns:
        own = words[places[name]]
        own[: first * width] = 0
        own[first * width : wanted * width] = values_F.view(np.int32)
        own[wanted * width :] = 0


def by_group(table_SP: NDArray[np.int32], groups: int, blocks: int) -> NDArray[np.int32]:
    """A table of ``groups`` groups of columns, each widened to ``blocks`` with zeros."""
    sequences, columns = table_SP.shape
    if columns == groups * blocks:
        return table_SP
    wide = np.zeros((sequences, groups, blocks), np.int32)
    wide[:, :, : columns // groups] = table_SP.reshape(sequences, groups, -1)
    return wide.reshape(sequences, groups * blocks)


class PinnedArrays:
    """Buffers of the host for copies that the host does not wait for; on the CPU plain memory, copied at once."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._cuda = device.type == "cuda"
        self._buffers = [torch.empty(0, dtype=torch.int32) for _ in range(BUFFERS)]
        self._copied: list[Any] = [torch.cuda.Event() for _ in range(BUFFERS)] if self._cuda else []
        self._turn = 0

    def fill(self, shape: StepShape, batch: StepBatch, picks: GumbelRows, into: DeviceArrays) -> None:
        """The batch is on its way to the device when this returns; its arrays may be overwritten."""
        self._turn = turn = (self._turn + 1) % BUFFERS
        if self._cuda:
            self._copied[turn].synchronize()  # what was copied from here two steps ago
        if len(self._buffers[turn]) < shape.words:
            self._buffers[turn] = torch.empty(
                1 << (shape.words - 1).bit_length(), dtype=torch.int32, pin_memory=self._cuda
            )
        words = self._buffers[turn][: shape.words]
        fill(words.numpy(), shape, batch, picks)
        into.words.copy_(words, non_blocking=True)
        if self._cuda:
            self._copied[turn].record()


class TokenReadback:
    """Drawn tokens on their way back: a row of pinned memory a step, and an event behind the last."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._tokens = torch.empty((0, 0), dtype=torch.int32)
        self._event: Any = torch.cuda.Event(blocking=True) if self._cuda else None  # waiting costs no core

    def expect(self, steps: int, rows: int) -> None:
        """Room for ``count`` tokens."""
        if steps > self._tokens.shape[0] or rows > self._tokens.shape[1]:
            self._tokens = torch.empty((steps, rows), dtype=torch.int32, pin_memory=self._cuda)

    def start_copy(self, step: int, tokens_R: Tensor) -> None:
        """Begin to copy what a step drew."""
        self._tokens[step, : len(tokens_R)].copy_(tokens_R, non_blocking=True)
        if self._cuda:
            self._event.record()

    def mark(self) -> None:
        """Nothing comes back of this step: the event stands behind it all the same."""
        if self._cuda:
            self._event.record()

    def rest(self) -> None:
        """Wait for the event."""
        if self._cuda:
            self._event.synchronize()

    def wait(self, steps: int, rows: int) -> NDArray[np.int32]:
        """[steps, rows], once the last of them is there; valid until the next ``take``."""
        if self._cuda:
            self._event.synchronize()
        return np.asarray(self._tokens.numpy()[:steps, :rows])


def buckets(most: int) -> Iterator[int]:
    """Sizes that steps are padded to, ascending: no step is padded by more than a half, large ones by a third."""
    size = 1
    while size < most:
        yield size
        if size >= 16 and size + size // 2 < most:
            yield size + size // 2
        size *= 2
    yield most
