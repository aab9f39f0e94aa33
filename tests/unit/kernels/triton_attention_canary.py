"""Compiles the kernels of rows, attention and sampling, with shapes of models as they are: see ``triton_compiled``."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from triton_compiled import compile_only

from penstock.kernels.operands import SILU, SWIGLU_OAI, Activation, AttentionSpec, KvShape, StateShape, StepBatch
from penstock.kernels.sampling import SampleRow
from penstock.kernels.triton.attention import TritonAttention
from penstock.kernels.triton.backend import TritonOps
from penstock.types import FP8_E4M3


def batch(tokens: int, sequences: int) -> StepBatch:
    starts = np.linspace(0, tokens, sequences + 1).astype(np.int32)
    table = np.zeros((sequences, 128), np.int32)
    zeros = np.zeros(tokens, np.int32)
    return StepBatch(zeros, zeros, starts, table, zeros)


def attend(ops: TritonOps, heads: int, kv_heads: int, dim: int, **how: Any) -> None:
    kv = ops.new_kv(KvShape.plain(layers=2, kv_heads=kv_heads, head_dim=dim), pages=4)
    rope = ops.rope_table(np.ones(dim // 2), 16)
    for tokens, sequences in ((4, 4), (512, 2)):
        step = batch(tokens, sequences)
        qkv = ops.hidden(np.zeros((tokens, (heads + 2 * kv_heads) * dim), np.float32))
        q = ops.rope_and_write(qkv, rope, kv, 1, step, heads=heads, kv_heads=kv_heads)
        ops.paged_attention(q, kv, 1, step, AttentionSpec(0.1, **how))


def latent(ops: TritonOps) -> None:
    shape = KvShape(layers=2, kv_heads=1, key_dim=576, value_dim=512, shared=True)
    kv, step = ops.new_kv(shape, pages=4), batch(4, 4)
    rope = ops.rope_table(np.ones(32), 16, interleaved=True)
    ops.latent_write(ops.hidden(np.zeros((4, 576))), rope, kv, 1, step, norm=ops.vector(np.ones(512)), eps=1e-6)
    absorb = ops.pack_linear(np.zeros((16 * 512, 128), np.float32))
    q = ops.latent_query(ops.hidden(np.zeros((4, 16 * 192))), absorb, rope, kv, step, heads=16)
    ops.paged_attention(q, kv, 1, step, AttentionSpec(0.1))


def recurrent(ops: TritonOps) -> None:
    """The delta net of Qwen3-Next."""
    own = StateShape(layers=2, key_heads=16, heads=32, key_dim=128, value_dim=128, taps=4)
    shape = replace(KvShape.plain(layers=1, kv_heads=2, head_dim=256), states=own)
    kv, step = ops.new_kv(shape, pages=4), batch(4, 4)
    step = replace(step, states_SW=np.zeros((4, 2 * shape.state_parts), np.int32))
    wide, gates = ops.hidden(np.zeros((4, own.channels + 4096 + 64))), ops.vector(np.ones(own.heads))
    qkv = ops.causal_conv(wide, ops.vector(np.ones((4, own.channels))), kv, 1, step)
    ops.delta_rule(qkv, wide, kv, 1, step, rates_H=gates, shifts_H=gates, beta=12288, decay=12320)


def every_row(ops: TritonOps, width: int) -> None:
    x, other, weight = ops.hidden(np.zeros((3, width))), ops.hidden(np.zeros((3, width))), ops.vector(np.ones(width))
    ops.rms_norm(x, weight, 1e-5)
    ops.norm_add(x, other, weight, 1e-5)
    ops.layer_norm(x, weight, weight, 1e-5)
    ops.layer_norm_in_place(x, weight, None, 1e-5)
    ops.norm_heads(x, ops.vector(np.ones(128)), 1e-5, first=128, count=2)
    ops.gated_norm(x, other, ops.vector(np.ones(64)), 1e-5, first=0)
    ops.gated(x, SILU)
    ops.gated(x, SWIGLU_OAI)
    ops.softcap(x, 30.0)
    for kind in Activation:
        ops.activate(x, kind)
    ops.sigmoid_gated(ops.compute(np.zeros((3, width))), x)
    ops.gated_add(x, other, ops.hidden(np.zeros((3, 1))))


def draw(ops: TritonOps, vocabulary: int) -> None:
    logits = ops.hidden(np.zeros((2, vocabulary)))
    mask = np.zeros(-(-vocabulary // 32), np.uint32)
    rows = [SampleRow(1, 2, 0, 1.0, 40, 0.9, 0.1, allowed=mask), SampleRow(1, 2, 0, 0.0, logprobs=0)]
    ops.sample(logits, rows)
    ops.token_logprobs(logits, np.zeros(2, np.int32), 2)
    ops.gumbel(1, 2, 3, np.arange(7, dtype=np.int32))


if __name__ == "__main__":
    made = compile_only()
    for compute in ("bf16", "fp32"):
        ops = TritonOps(compute_dtype=compute, device="cpu")
        for apart in (False, True):
            made.about = f"{compute}, partitions {'apart' if apart else 'in turn'}"
            ops.paged = TritonAttention(ops.form, apart=apart)
            attend(ops, 32, 8, 128)
            attend(ops, 8, 8, 64, window=128, softcap=30.0, sinks_H=ops.vector(np.ones(8)))
            attend(ops, 10, 2, 80, chunk=8192)
            latent(ops)
            made.about += ", codes"
            coded = TritonOps(compute_dtype=compute, device="cpu", kv_dtype=FP8_E4M3)
            coded.paged = TritonAttention(coded.form, apart=apart)
            attend(coded, 32, 8, 128)
            attend(coded, 10, 2, 80)
            latent(coded)
        every_row(ops, 4096)
        recurrent(ops)
        draw(ops, 128_256)
