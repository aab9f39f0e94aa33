"""Sampling as plainly as it can be written: NumPy, float64, a full sort.  The oracle of every fast sampler.

Order and meaning are vLLM's: logit_bias, repetition, frequency and presence penalties, bans, mask, temperature, then
top_k, top_p, min_p, then Gumbel-max.  Ties are decided for the lower token id everywhere.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from penstock.kernels.sampling import Sampled, SampleRow, gumbel

GREEDY_BELOW = 1e-5
"""Below this temperature the most likely token is taken."""


def adjusted(logits_V: NDArray[np.float32], row: SampleRow) -> NDArray[np.float64]:
    """Logits after bias, penalties, bans and mask."""
    x_V = logits_V.astype(np.float64)
    np.add.at(x_V, row.bias_ids, row.bias_values.astype(np.float64))
    if row.repetition_penalty != 1.0:
        seen = np.union1d(row.output_ids, row.prompt_ids)
        x_V[seen] = np.where(x_V[seen] > 0, x_V[seen] / row.repetition_penalty, x_V[seen] * row.repetition_penalty)
    x_V[row.output_ids] -= row.frequency_penalty * row.output_counts
    x_V[row.output_ids] -= row.presence_penalty * (row.output_counts > 0)
    x_V[row.banned_ids] = -np.inf
    if row.allowed is not None:
        x_V[~allowed_tokens(row.allowed, len(x_V))] = -np.inf
    return x_V


def allowed_tokens(words: NDArray[np.uint32], vocabulary: int) -> NDArray[np.bool_]:
    """[V]: which tokens the bits of a mask allow.  Raises ValueError for a mask of another vocabulary."""
    if len(words) != -(-vocabulary // 32):
        raise ValueError("a bit for every token, 32 a word")
    bits = np.unpackbits(words.view(np.uint8), bitorder="little")
    return bits[:vocabulary].astype(np.bool_)


def candidate_ids(scaled_V: NDArray[np.float64], row: SampleRow) -> NDArray[np.int64]:
    """Ids that top_k, top_p and min_p leave, likeliest first, of logits already divided by the temperature."""
    ids = np.lexsort((np.arange(len(scaled_V)), -scaled_V))
    if row.top_k:
        ids = ids[: row.top_k]
    weights = np.exp(scaled_V[ids] - scaled_V[ids[0]])
    if row.top_p < 1.0:
        before = np.cumsum(weights) - weights
        keep = before < row.top_p * weights.sum()
        keep[0] = True
        ids, weights = ids[keep], weights[keep]
    return np.asarray(ids[(weights >= row.min_p) & (weights > 0)])


def log_softmax(logits_V: NDArray[np.float32]) -> NDArray[np.float64]:
    """Log-probabilities by the unmodified logits, in nats."""
    x_V = logits_V.astype(np.float64) - np.max(logits_V)
    return np.asarray(x_V - np.log(np.exp(x_V).sum()))


def draw_token(logits_V: NDArray[np.float32], row: SampleRow) -> int:
    """The token sampled for this row."""
    x_V = adjusted(logits_V, row)
    if row.temperature < GREEDY_BELOW:
        return int(np.argmax(x_V))
    scaled_V = x_V / row.temperature
    ids = candidate_ids(scaled_V, row)
    noisy = scaled_V[ids] + gumbel(row.seed, row.position, row.choice, ids.astype(np.int32))
    return int(ids[np.lexsort((ids, -noisy))[0]])


def with_logprobs(logits_V: NDArray[np.float32], token: int, top: int) -> Sampled:
    """A token with its log-probability and the ``top`` likeliest."""
    logprobs_V = log_softmax(logits_V)
    likeliest = np.lexsort((np.arange(len(logits_V)), -logits_V))[:top]
    return Sampled(token, float(logprobs_V[token]), tuple((int(i), float(logprobs_V[i])) for i in likeliest))


def sample_row(logits_V: NDArray[np.float32], row: SampleRow) -> Sampled:
    """``Ops.sample`` for one row."""
    token = draw_token(logits_V, row)
    return Sampled(token) if row.logprobs is None else with_logprobs(logits_V, token, row.logprobs)
