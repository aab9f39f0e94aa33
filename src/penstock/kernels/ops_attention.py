"""Operations that read or write KV memory, and attention without one.

Part of ``ops.Ops``, which says what the letters in the names mean.  Here goes whatever sees more of a sequence than one
token.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from penstock.kernels.operands import Array, PackedLinear, StepBatch
from penstock.kernels.sparse import Sparse


class AttentionOps(Protocol):
    """Across the tokens of a sequence."""

    def rope_and_write(
        self,
        qkv_TN: Array,
        rope: Array | None,
        kv: Array,
        layer: int,
        batch: StepBatch,
        *,
        heads: int,
        kv_heads: int,
        q_scale: Array | None = None,
    ) -> Array:
        """Split qkv [T, (H + G) C + G value_dim]; rotate q and k by their positions (``rope`` None: leave them); write
        k and v to their pages, rounded to the type that these keep; return q as compute [T, H, C].  ``heads`` may be 0.

        ``q_scale``: fp32 by absolute position, which the rotated q is multiplied by.
        """
        ...

    def latent_write(
        self,
        latent_TC: Array,
        rope: Array,
        kv: Array,
        layer: int,
        batch: StepBatch,
        *,
        norm: Array,
        eps: float,
    ) -> None:
        """Write fp32 latent vectors (MLA, arXiv:2405.04434) to the pages of shared KV memory, rounded to the
        type that these keep: the first value_dim columns normed as by ``rms_norm``, the others rotated."""
        ...

    def latent_query(
        self, q_TN: Array, absorb: PackedLinear, rope: Array, kv: Array, batch: StepBatch, *, heads: int
    ) -> Array:
        """Queries of latent attention: compute [T, H, C] of hidden [T, H (K + rotated)].

        The first K columns of head h, in the compute type, are multiplied by rows [h value_dim, (h + 1) value_dim) of
        ``absorb`` [H value_dim, K] (plain, one segment) and become its first value_dim columns; the others are rotated
        and follow them.  One form for reading prompts and writing answers.
        """
        ...

    def paged_attention(
        self,
        q_THC: Array,
        kv: Array,
        layer: int,
        batch: StepBatch,
        *,
        scale: float,
        window: int | None = None,
        chunk: int | None = None,
        softcap: float | None = None,
        sinks_H: Array | None = None,
        until: int | None = None,
        sparse: Sparse | None = None,
    ) -> Array:
        """Causal attention of every token to its sequence's pages; compute [T, H value_dim] of q [T, H, C] or [T, H C].

        A token at position p sees keys up to p: of these the last ``window`` (p itself is one of them), and those with
        its floor(p / chunk).  Scores are q . k * scale, then softcap * tanh(score / softcap), then what ``vector``
        made of ``sinks_H`` joins the softmax as one more score of each head, whose weight takes no value (StreamingLLM,
        arXiv:2309.17453, as gpt-oss has it).

        ``until``: instead, every token sees the keys of positions below it and no others, wherever it stands itself
        (cross-attention to what a sequence begins with); every sequence reaches that far.

        ``sparse``: of all keys up to p, those of the blocks that it says (see ``kernels.sparse``); with neither window,
        chunk nor ``until``.

        Keys are reduced 64 at a time by absolute position, partitions of 512 keys are joined from low to high, the
        sink last.  Codes (``kv_types``) become numbers of the compute type on the way, exactly.  What a token does not
        see is not multiplied: its pages may hold anything, but the table must name pages of the memory.
        """
        ...

    def attention(
        self,
        qkv_TN: Array,
        starts_S1: NDArray[np.int32],
        *,
        heads: int,
        kv_heads: int,
        scale: float,
        causal: bool = False,
        window: int | None = None,
        softcap: float | None = None,
        rope: Array | None = None,
        rows_T: NDArray[np.int32] | None = None,
        bias_HR: Array | None = None,
    ) -> Array:
        """Attention of whole sequences, without a cache; compute [T, H C] of hidden [T, (H + 2 G) C]: queries, keys,
        values.  Sequence s owns tokens ``starts[s]:starts[s + 1]``.

        A token reads all of its sequence, or, ``causal``, what stands up to itself; with a ``window`` only what is less
        than so many positions away.  Queries and keys are rotated by row ``rows_T`` of ``rope``, the token's place in
        its sequence unless given.  Scores are q . k * scale, then soft-capped as in ``paged_attention``; then entry
        ``clip(key - position, -R, R) + R`` of the head's row of ``bias_HR``, which ``vector`` made of [H, 2 R + 1], is
        added (relative positions of T5, arXiv:1910.10683, by distance).

        Keys are reduced as in ``paged_attention``, by place in their sequence.
        """
        ...
