"""Steps in which a product waits for what reads it: together they may be one kernel (``fused_products``).

::

    linear, gated                        -> gated_product
    linear, [add_bias], rope_and_write   -> written_product
    linear, anything else                -> as it is, before anything else is done

A product is put off until the next operation is asked for.  If that is the one that reads it, and shapes and weights
suit, one kernel does both; else it is made, and nothing is different.  Bits are the same either way.

Knows no model.  This module imports torch.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, cast

from torch import Tensor

from penstock.kernels.operands import SILU, Array, Gate, PackedLinear, StepBatch
from penstock.kernels.ops import Ops, Steps
from penstock.kernels.reference.attention import ReferenceKv, ReferenceRope
from penstock.kernels.triton.form import TritonForm
from penstock.kernels.triton.fused_products import Heads, Places, gated_product, slots_of, written_product
from penstock.kernels.triton.matmul import Operand
from penstock.kernels.triton.products import WeightForm

WIDEST_HEAD = 256
"""Columns of a head that lie in two tiles at most."""


class FusedSteps:
    """See ``ops.Steps``."""

    def __init__(self, steps: Steps, form: TritonForm) -> None:
        self._steps = steps
        self._form = form

    def forward(self, ops: Ops, batch: StepBatch, kv: Array) -> Array | None:
        """See ``Steps.forward``."""
        own = FusingOps(ops, self._form)
        return own.made(self._steps.forward(cast(Ops, own), batch, kv))

    def logits(self, ops: Ops, hidden_RD: Array) -> Array:
        """See ``Steps.logits``."""
        own = FusingOps(ops, self._form)
        return own.made(self._steps.logits(cast(Ops, own), hidden_RD))


class _Product:
    """x W^T + bias, made when somebody asks for it."""

    def __init__(self, x_TK: Tensor, weight: PackedLinear) -> None:
        self.x_TK = x_TK
        self.weight = weight
        self.bias_N: Tensor | None = None
        self.made_TN: Tensor | None = None


class FusingOps:
    """The operations of one step; what is not said here is the backend's own, over products that are made."""

    def __init__(self, ops: Ops, form: TritonForm) -> None:
        self._ops = ops
        self._form = form
        self._waiting: _Product | None = None
        self._slots: dict[int, tuple[StepBatch, Tensor]] = {}  # of each group of layers

    def __getattr__(self, name: str) -> Any:
        operation = getattr(self._ops, name)
        return partial(self._plainly, operation) if callable(operation) else operation

    def made(self, array: Any) -> Any:
        """What stands for a product, as an array; anything else as it is."""
        if not isinstance(array, _Product):
            return array
        if array.made_TN is None:
            array.made_TN = self._ops.linear(array.x_TK, array.weight)
            if array.bias_N is not None:
                self._ops.add_bias(array.made_TN, array.bias_N)
        return array.made_TN

    def linear(self, x_TK: Any, weight: PackedLinear) -> Any:
        """See ``Ops.linear``."""
        self._make()
        self._waiting = _Product(self.made(x_TK), weight)
        return self._waiting

    def add_bias(self, out_TN: Any, bias_N: Tensor) -> None:
        """See ``Ops.add_bias``."""
        if self._waits(out_TN) and out_TN.bias_N is None:
            out_TN.bias_N = bias_N
        else:
            self._plainly(self._ops.add_bias, out_TN, bias_N)

    def gated(self, gate_up_T2I: Any, kind: Gate = SILU) -> Any:
        """See ``Ops.gated``."""
        if self._waits(gate_up_T2I) and gate_up_T2I.bias_N is None:
            aligned = kind.interleaved or gate_up_T2I.weight.n // 2 % 64 == 0
            operand = _operand(gate_up_T2I, in_tiles=aligned)
            if operand is not None and operand.n % 2 == 0:
                self._waiting = None
                return gated_product(self._form, gate_up_T2I.x_TK, operand, kind)
        return self._plainly(self._ops.gated, gate_up_T2I, kind)

    def rope_and_write(
        self,
        qkv_TN: Any,
        rope: ReferenceRope | None,
        kv: ReferenceKv,
        layer: int,
        batch: StepBatch,
        *,
        heads: int,
        kv_heads: int,
        q_scale: Tensor | None = None,
    ) -> Any:
        """See ``Ops.rope_and_write``."""
        if self._waits(qkv_TN) and kv.key_exponents is None and batch.turns_T3 is None:
            operand = _operand(qkv_TN, in_tiles=_lie_in_tiles(kv, heads, kv_heads))
            if operand is not None and heads:
                self._waiting = None
                own = Heads(heads, kv_heads, rope, q_scale)
                places = self._places(kv, layer, batch)
                return written_product(self._form, qkv_TN.x_TK, operand, qkv_TN.bias_N, own, kv, places)
        return self._plainly(
            self._ops.rope_and_write, qkv_TN, rope, kv, layer, batch, heads=heads, kv_heads=kv_heads, q_scale=q_scale
        )

    def _places(self, kv: ReferenceKv, layer: int, batch: StepBatch) -> Places:
        group, place = kv.shape.places[layer]
        known = self._slots.get(group)
        if known is None or known[0] is not batch:
            known = self._slots[group] = (batch, slots_of(self._form, kv, layer, batch))
        return Places(self._form.integers(batch.positions_T), known[1], place)

    def _waits(self, array: Any) -> bool:
        return array is self._waiting and isinstance(array, _Product)

    def _make(self) -> None:
        waiting, self._waiting = self._waiting, None
        self.made(waiting)

    def _plainly(self, operation: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self._make()
        return operation(*map(self.made, args), **{name: self.made(value) for name, value in kwargs.items()})


def _operand(product: _Product, *, in_tiles: bool) -> Operand | None:
    """What multiplies it in one segment, with outputs in another order."""
    form: WeightForm = product.weight.data
    if len(product.weight.segments) > 1:
        return None
    return form.mixed(len(product.x_TK), in_tiles=in_tiles)


def _lie_in_tiles(kv: ReferenceKv, heads: int, kv_heads: int) -> bool:
    width = kv.shape.key_dim
    whole = heads * width % 128 == 0 and kv_heads * width % 128 == 0
    return whole and width <= WIDEST_HEAD and width & (width - 1) == 0
