"""Products and attention by themselves, beside cuBLAS and SDPA on the same numbers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from bench.gpu.checks import normal
from bench.gpu.place import Place

from penstock.kernels.operands import COLUMN_UNIT, AttentionSpec, KvShape, StepBatch, segment_ends
from penstock.kernels.ops import Ops
from penstock.types import PAGE_TOKENS

PROMPT_ROWS = 2048
DECODE_ROWS = (1, 16, 64)


def against_cublas(
    ops: Ops, place: Place, shapes: Mapping[str, tuple[int, int, bool]], matmul_rate: float
) -> list[dict[str, Any]]:
    """One line a matrix and number of rows: rates of both, and ours in parts of theirs."""
    lines = []
    rows = (3,) if place.dry else (*DECODE_ROWS, PROMPT_ROWS)
    for name, (n, k, tree) in shapes.items():
        if name in ("embed", "router"):
            continue
        weight_NK = normal(2, n, k) * np.float32(0.02)
        weight = ops.pack_linear(weight_NK, segments=segment_ends(k, COLUMN_UNIT) if tree else None)
        theirs_NK = torch.from_numpy(weight_NK).to(place.device, torch.bfloat16)
        for count in rows:
            x_TK = ops.compute(normal(3, count, k))
            their_x = torch.from_numpy(normal(3, count, k)).to(place.device, torch.bfloat16)
            ours_s = place.seconds(lambda x=x_TK, w=weight: ops.linear(x, w), repeats=20, warm=3)
            theirs_s = place.seconds(lambda x=their_x, w=theirs_NK: x @ w.T, repeats=20, warm=3)
            flops = 2.0 * count * n * k
            lines.append(
                {
                    "matrix": name,
                    "n": n,
                    "k": k,
                    "tree": tree,
                    "rows": count,
                    "ours_us": ours_s * 1e6,
                    "cublas_us": theirs_s * 1e6,
                    "of_cublas": theirs_s / ours_s,
                    "of_matmul_rate": flops / ours_s / matmul_rate,
                    "bytes_per_s": 2.0 * n * k / ours_s,
                }
            )
    return lines


def least(lines: list[dict[str, Any]], *, tree: bool) -> float | None:
    """Of cuBLAS's rate, the smallest part among prompts' products of this kind."""
    most = max((line["rows"] for line in lines), default=0)
    parts = [line["of_cublas"] for line in lines if line["tree"] == tree and line["rows"] == most]
    return min(parts, default=None)


def attention(ops: Ops, place: Place, heads: tuple[int, int, int]) -> list[dict[str, Any]]:
    """A prompt's chunk, and answers of a batch, beside torch's SDPA over the same keys lying together."""
    query, kv_heads, dim = heads
    cases = ((1, 16, 16), (2, 1, 20)) if place.dry else ((1, 2048, 2048), (1, 2048, 8192), (16, 1, 2048), (64, 1, 2048))
    lines = []
    for sequences, tokens, keys in cases:
        blocks = -(-keys // PAGE_TOKENS)
        shape = KvShape.plain(layers=1, kv_heads=kv_heads, head_dim=dim)
        kv = ops.new_kv(shape, pages=sequences * blocks)
        batch = StepBatch(
            np.zeros(sequences * tokens, np.int32),
            np.tile(np.arange(keys - tokens, keys, dtype=np.int32), sequences),
            (np.arange(sequences + 1) * tokens).astype(np.int32),
            np.arange(sequences * blocks, dtype=np.int32).reshape(sequences, blocks),
            np.empty(0, np.int32),
        )
        q_THC = ops.compute(normal(4, sequences * tokens, query * dim))
        scale = dim**-0.5
        ours_s = place.seconds(
            lambda q=q_THC, k=kv, b=batch, s=scale: ops.paged_attention(q, k, 0, b, AttentionSpec(s)),
            repeats=20,
            warm=3,
        )
        theirs_s = _sdpa(place, (sequences, tokens, keys), heads)
        lines.append(
            {
                "sequences": sequences,
                "tokens": tokens,
                "keys": keys,
                "ours_us": ours_s * 1e6,
                "sdpa_us": theirs_s * 1e6,
                "of_sdpa": theirs_s / ours_s,
            }
        )
    return lines


def _sdpa(place: Place, sizes: tuple[int, int, int], heads: tuple[int, int, int]) -> float:
    sequences, tokens, keys = sizes
    query, kv_heads, dim = heads
    make = {"device": place.device, "dtype": torch.bfloat16}
    q = torch.randn(sequences, query, tokens, dim, **make)
    k = torch.randn(sequences, kv_heads, keys, dim, **make)
    v = torch.randn(sequences, kv_heads, keys, dim, **make)
    mask = None
    if 1 < tokens < keys:
        mask = torch.ones(tokens, keys, dtype=torch.bool, device=place.device).tril(keys - tokens)

    def work() -> object:
        causal = tokens == keys > 1
        return torch.nn.functional.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=causal, enable_gqa=True
        )

    return place.seconds(work, repeats=20, warm=3)
