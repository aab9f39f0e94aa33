"""Compiles the products' kernels for a GPU that is not there: see ``triton_compiled``."""

from __future__ import annotations

from dataclasses import replace

import ml_dtypes
import numpy as np
import torch
from quant_cases import FORMATS, matrix_of
from triton_compiled import Compiled, compile_only

from penstock.kernels.compressed import compress_for_gpu
from penstock.kernels.operands import SILU, KvShape, Routing, Score, StepBatch, segment_ends
from penstock.kernels.triton.backend import TritonOps
from penstock.kernels.triton.fusion import FusingOps
from penstock.kernels.triton.peers import PeerMemory

N, K = 512, 2048


def products(ops: TritonOps, compiled: Compiled) -> None:
    """All forms of weights, few rows and many."""
    weight = (np.random.default_rng(1).standard_normal((N, K)) * 0.02).astype(ml_dtypes.bfloat16)
    forms = {}
    for name, ends in (("plain", (K,)), ("tree", segment_ends(K, 32))):
        forms[name] = ops.pack_linear(weight, segments=ends)
        if ops.compute_dtype == "bf16":
            matrix = compress_for_gpu(weight.view(np.uint16))
            assert matrix is not None
            forms[f"compressed {name}"] = ops.pack_compressed([matrix], segments=ends)
    for name in ("8 bits, fp16", "4 bits, zero point", "5 bits of super-blocks", "6 bits of super-blocks"):
        if ops.compute_dtype == "bf16":
            forms[name] = ops.pack_quantized([matrix_of(FORMATS[name], N, K)[0]])
    for name, packed in forms.items():
        for rows in (1, 100, 257):
            compiled.about = f"{ops.compute_dtype}, {name}, {rows} rows"
            ops.linear(ops.compute(np.zeros((rows, K), np.float32)), packed)
    if ops.compute_dtype == "bf16":
        forms["compressed plain"].data.rows(torch.zeros(3, dtype=torch.int64))
    compiled.about = f"{ops.compute_dtype}, heads"
    ops.heads_linear(ops.compute(np.zeros((3, 4, 512))), ops.pack_linear(weight[:, :512]), heads=4)


def over_ranks(ops: TritonOps, compiled: Compiled) -> None:
    """Joins of few rows out of the memory of two and eight ranks, begun and waited for in one launch."""
    for ranks in (2, 8):
        ends = tuple(K // 8 * (i + 1) for i in range(8 // ranks))
        weight = replace(ops.pack_linear(np.zeros((N, ends[-1]), np.float32), segments=ends), partial=True)
        memory = PeerMemory.allocate(ops.form, ranks, half=64 * N)
        peers = memory.table(0, [memory.address] * ranks)
        for rows in (1, 33):
            compiled.about = f"{ops.compute_dtype}, {ranks} ranks, {rows} rows"
            x, operand = ops.compute(np.zeros((rows, ends[-1]), np.float32)), peers.operand(weight, rows)
            assert operand is not None
            peers.multiply(ops.form, x, operand, ops.hidden(np.zeros((rows, N), np.float32)), add=True)


def fused(ops: TritonOps, compiled: Compiled) -> None:
    """Gates, queries, keys and values of a model's size, few rows and many."""
    kv = ops.new_kv(KvShape.plain(layers=2, kv_heads=8, head_dim=128), pages=4)
    rope, wide, width = ops.rope_table(np.ones(64), 16), np.zeros((28672, 256), np.float32), (32 + 2 * 8) * 128
    weights = {"plain": (ops.pack_linear(wide), ops.pack_linear(wide[:width]))}
    if ops.compute_dtype == "bf16":
        small = [compress_for_gpu((wide[:n] + 0.1).astype(ml_dtypes.bfloat16).view(np.uint16)) for n in (1024, width)]
        gates, heads = (ops.pack_compressed([matrix]) for matrix in small if matrix is not None)
        assert gates is not None
        assert heads is not None
        weights["compressed"] = (gates, heads)
    for name, (gate_up, qkv) in weights.items():
        for rows in (1, 100, 257) if name == "plain" else (1, 100):
            compiled.about = f"{ops.compute_dtype}, {name}, {rows} rows"
            zeros = np.zeros(rows, np.int32)
            step = StepBatch(zeros, zeros, np.array([0, rows], np.int32), np.zeros((1, 32), np.int32), zeros)
            x, own = ops.compute(np.zeros((rows, 256), np.float32)), FusingOps(ops, ops.form)
            own.gated(own.linear(x, gate_up), SILU)
            own.rope_and_write(own.linear(x, qkv), rope, kv, 1, step, heads=32, kv_heads=8)


def experts(ops: TritonOps, compiled: Compiled) -> None:
    """Routing and two products."""
    compiled.about = f"{ops.compute_dtype}, experts"
    for score in Score:
        how = Routing(experts=16, top_k=3, score=score, normalised=True, groups=4, groups_kept=2, pairs=True)
        ops.route(ops.hidden(np.zeros((3, 16))), how, ops.vector(np.zeros(16)))
    wide, narrow = (np.zeros(shape, np.float32) for shape in ((N, K), (K, N // 2)))
    for segments in (1, 8):
        ends = segment_ends(N // 2, 32) if segments > 1 else None
        packed = ops.pack_experts([ops.pack_linear(wide)] * 2, [ops.pack_linear(narrow, segments=ends)] * 2)
        for rows in (3, 257):
            compiled.about = f"{ops.compute_dtype}, experts, {segments} segments, {rows} rows"
            routes = ops.route(ops.hidden(np.zeros((rows, 2))), Routing(experts=2, top_k=2))
            ops.experts_add(ops.compute(np.zeros((rows, K))), routes, packed, SILU, ops.hidden(np.zeros((rows, K))))


def adapters(ops: TritonOps, compiled: Compiled) -> None:
    """A product beside which there may be adapters."""
    compiled.about = f"{ops.compute_dtype}, adapters"
    table = ops.adapter_table([ops.pack_linear(np.zeros((N, K), np.float32), segments=segment_ends(K, 32))], 4)
    zeros = np.zeros(3, np.int32)
    step = StepBatch(zeros, zeros, np.arange(4, dtype=np.int32), np.zeros((3, 1), np.int32), zeros, adapters_S=zeros)
    x, out = ops.compute(np.zeros((3, K), np.float32)), ops.hidden(np.zeros((3, N)))
    ops.lora_add(x, step, table, 0, out, wanted=False)


if __name__ == "__main__":
    made = compile_only()
    for compute in ("bf16", "fp32"):
        backend = TritonOps(compute_dtype=compute, device="cpu")
        products(backend, made)
        over_ranks(backend, made)
        fused(backend, made)
        experts(backend, made)
        adapters(backend, made)
