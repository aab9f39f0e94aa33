"""The oracle's sparse attention: which keys the 16 positions of one aligned tile read.  See ``kernels.sparse``.

Knows nothing about pages: it is given all keys up to the tile's end.
"""

from __future__ import annotations

import torch
from torch import Tensor

from penstock.kernels.sparse import BLOCK_KEYS, Sparse
from penstock.types import PAGE_TOKENS

BLOCK_PAGES = BLOCK_KEYS // PAGE_TOKENS


def likings(q_GMC: Tensor, k_GNC: Tensor, dtype: torch.dtype) -> Tensor:
    """How much each position of a tile likes each whole block before its end, [G, 16, blocks]; mean keys are rounded
    to ``dtype`` as keys are.  A group's rows are its heads, one after another."""
    groups, keys, dims = k_GNC.shape
    pages = keys // BLOCK_KEYS * BLOCK_PAGES
    means_GPC = k_GNC[:, : pages * PAGE_TOKENS].view(groups, pages, PAGE_TOKENS, dims).mean(2).to(dtype).float()
    products_GMP = q_GMC.contiguous() @ means_GPC.transpose(1, 2)
    by_head = products_GMP.view(groups, -1, PAGE_TOKENS, pages // BLOCK_PAGES, BLOCK_PAGES)
    return by_head.amax(dim=(1, 4))


def chosen_blocks(liked_GB: Tensor, position: int, sparse: Sparse) -> Tensor:
    """bool [G, blocks up to the position's own]: what it reads, by its likings of whole blocks."""
    own = position // BLOCK_KEYS
    if not sparse.thins(position):
        return torch.ones((len(liked_GB), own + 1), dtype=torch.bool, device=liked_GB.device)
    read_GB = torch.zeros((len(liked_GB), own + 1), dtype=torch.bool, device=liked_GB.device)
    read_GB[:, : sparse.sinks] = True
    read_GB[:, own - sparse.window + 1 :] = True
    candidates = sparse.candidates(position)
    order_GB = torch.sort(liked_GB[:, candidates.start : candidates.stop], dim=-1, descending=True, stable=True).indices
    read_GB.scatter_(1, order_GB[:, : sparse.chosen] + candidates.start, True)
    return read_GB


def read_keys(q_GMC: Tensor, k_GNC: Tensor, first: int, sparse: Sparse, dtype: torch.dtype) -> Tensor:
    """bool [G, M, N]: which keys the rows of the tile that begins at position ``first`` read."""
    groups, keys = k_GNC.shape[:2]
    read_GSN = torch.ones((groups, PAGE_TOKENS, keys), dtype=torch.bool, device=k_GNC.device)
    if sparse.thins(first + PAGE_TOKENS - 1):
        liked_GSB = likings(q_GMC, k_GNC, dtype)
        for own in range(PAGE_TOKENS):
            read_GB = chosen_blocks(liked_GSB[:, own], first + own, sparse)
            read_GSN[:, own] = read_GB.repeat_interleave(BLOCK_KEYS, dim=1)[:, :keys]
    return read_GSN.repeat(1, q_GMC.shape[1] // PAGE_TOKENS, 1)
