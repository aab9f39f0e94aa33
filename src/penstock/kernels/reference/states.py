"""The oracle's recurrent layers: token after token, all heads of a token at once, so always in one shape.

This module imports torch.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from penstock.kernels.operands import Activation, StateShape, StepBatch
from penstock.kernels.reference.attention import ReferenceKv
from penstock.kernels.reference.tiles import activated


@dataclass(frozen=True, slots=True)
class _Cell:
    """Tokens ``[first, first + count)`` of a step that stand in one cell, and the rows of the state before and behind
    them; None before the first token."""

    first: int
    count: int
    before: Tensor | None
    pages: NDArray[np.int32]  # that the state behind goes to


def causal_conv(x_TN: Tensor, weight_KC: Tensor, kv: ReferenceKv, layer: int, batch: StepBatch) -> Tensor:
    """``Ops.causal_conv``, cell by cell."""
    own, (taps, channels) = kv.shape.kept_states, weight_KC.shape
    rows = slice(layer * own.layer_rows + own.matrix_rows, (layer + 1) * own.layer_rows)
    out_TC = torch.empty((len(x_TN), channels), device=x_TN.device)
    for cell in _cells(kv, rows, batch):
        inputs_KC = torch.zeros((taps, channels), device=x_TN.device)
        if cell.before is not None:
            inputs_KC[1:] = cell.before.flatten()[: (taps - 1) * channels].view(taps - 1, channels)
        for token in range(cell.first, cell.first + cell.count):
            inputs_KC = torch.cat([inputs_KC[1:], x_TN[token : token + 1, :channels]])
            out_TC[token] = activated((inputs_KC * weight_KC).sum(dim=0), Activation.SILU)
        kept = torch.zeros((rows.stop - rows.start) * own.value_dim, device=x_TN.device)
        kept[: (taps - 1) * channels] = inputs_KC[1:].flatten()
        _put(kv, rows, cell.pages, kept.view(-1, own.value_dim))
    return out_TC


def delta_rule(
    qkv_TC: Tensor,
    gates_TN: Tensor,
    kv: ReferenceKv,
    layer: int,
    batch: StepBatch,
    *,
    rates_H: Tensor,
    shifts_H: Tensor,
    beta: int,
    decay: int,
) -> Tensor:
    """``Ops.delta_rule``, token by token."""
    own = kv.shape.kept_states
    rows = slice(layer * own.layer_rows, layer * own.layer_rows + own.matrix_rows)
    shape = (own.heads, own.key_dim, own.value_dim)
    out_THV = torch.empty((len(qkv_TC), own.heads, own.value_dim), device=qkv_TC.device)
    for cell in _cells(kv, rows, batch):
        state_HKV = torch.zeros(shape, device=qkv_TC.device) if cell.before is None else cell.before.view(shape)
        for token in range(cell.first, cell.first + cell.count):
            q_HK, k_HK, v_HV = _split(qkv_TC[token], own)
            beta_H = torch.sigmoid(gates_TN[token, beta : beta + own.heads])
            speed_H = torch.nn.functional.softplus(gates_TN[token, decay : decay + own.heads] + shifts_H)
            state_HKV = state_HKV * torch.exp(-rates_H * speed_H)[:, None, None]
            known_HV = (state_HKV * k_HK[:, :, None]).sum(dim=1)
            change_HV = (v_HV - known_HV) * beta_H[:, None]
            state_HKV = state_HKV + k_HK[:, :, None] * change_HV[:, None, :]
            out_THV[token] = (state_HKV * q_HK[:, :, None]).sum(dim=1)
        _put(kv, rows, cell.pages, state_HKV.reshape(-1, own.value_dim))
    return out_THV.flatten(1)


def _cells(kv: ReferenceKv, rows: slice, batch: StepBatch) -> Iterator[_Cell]:
    """All cells that the step enters, in order; what one leaves behind is read by the next."""
    own, parts = kv.shape.kept_states, kv.shape.state_parts
    assert batch.states_SW is not None, "a step of recurrent layers brings the pages of its states"
    for s in range(len(batch.starts_S1) - 1):
        token, end = int(batch.starts_S1[s]), int(batch.starts_S1[s + 1])
        base = own.first_cell(int(batch.positions_T[token])) if token < end else 0
        while token < end:
            position = int(batch.positions_T[token])
            count = min(end - token, (position // own.cell + 1) * own.cell - position)
            before = None
            if position > 0:
                at = (own.first_cell(position) - base) * parts
                before = _taken(kv, rows, batch.states_SW[s, at : at + parts])
            at = (position // own.cell - base) * parts
            yield _Cell(token, count, before, batch.states_SW[s, at : at + parts])
            token += count


def _split(qkv_C: Tensor, own: StateShape) -> tuple[Tensor, Tensor, Tensor]:
    """Queries and keys of every head, normed, and values."""
    keys = own.key_heads * own.key_dim
    q_C, k_C, v_C = qkv_C.split_with_sizes([keys, keys, own.heads * own.value_dim])

    def normed(x_C: Tensor) -> Tensor:
        x_GK = x_C.view(own.key_heads, own.key_dim)
        unit_GK = x_GK * torch.rsqrt(x_GK.square().sum(dim=1, keepdim=True) + 1e-6)
        return unit_GK.repeat_interleave(own.heads // own.key_heads, dim=0)

    return normed(q_C) / own.key_dim**0.5, normed(k_C), v_C.view(own.heads, own.value_dim)


def _places(kv: ReferenceKv, rows: slice, pages: NDArray[np.int32]) -> tuple[Tensor, Tensor]:
    """Page and place in it of each of these rows of a state."""
    parts, places = np.divmod(np.arange(rows.start, rows.stop), kv.shape.state_rows_a_page)
    device = kv.states.device
    return torch.from_numpy(pages[parts].astype(np.int64)).to(device), torch.from_numpy(places).to(device)


def _taken(kv: ReferenceKv, rows: slice, pages: NDArray[np.int32]) -> Tensor:
    return kv.states[_places(kv, rows, pages)]


def _put(kv: ReferenceKv, rows: slice, pages: NDArray[np.int32], values: Tensor) -> None:
    kv.states[_places(kv, rows, pages)] = values
