"""What sparse attention saves, and what it costs in agreement with full attention (docs/sparse-attention.md).

    python bench/sparse.py speed                    # one layer of a 1 B model reads prompts of 8 and 32 k tokens
    python bench/sparse.py needles                  # is one key that matters found among many that do not?
    python bench/sparse.py stories                  # the bundled model over long texts: does it go on alike?
    python bench/sparse.py all --plot sparse.png

Times are those of this process's processors, not of the clock; run ``perf stat`` around ``speed --only`` for cycles.
Needles are made: keys and queries at random, and for some queries a key (or a few in a row) that fits them so well
that it has a given score.  Nobody's model is like that, and none is as hard.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from tokenizers import Tokenizer

from penstock.bundled import storyteller
from penstock.config.schema import EngineSettings
from penstock.engine.models.registry import build_model
from penstock.kernels.native.backend import NativeOps, families
from penstock.kernels.operands import BLOCK_KEYS, AttentionSpec, KvShape, Sparse, StepBatch
from penstock.kernels.reference.attention import block_scores, chosen_blocks
from penstock.launch.sparse_attention import sparse_settings
from penstock.types import PAGE_TOKENS
from penstock.weights.inspect import inspect_model
from penstock.weights.load import load_model

HEADS, KV_HEADS, DIM = 32, 8, 64
SCALE = DIM**-0.5
CHUNK = 2048
OPENINGS = ("Once upon a time there was a fox", "A king had three daughters", "There was once a poor miller", "One day")


# --- one layer --------------------------------------------------------------------------------------------------------


class Layer:
    """Keys and values of one prompt in pages, and its queries."""

    def __init__(self, ops: NativeOps, keys_NGC: NDArray[np.float32], q_NHC: NDArray[np.float32]) -> None:
        self.ops, self.tokens = ops, len(keys_NGC)
        self.kv = ops.new_kv(KvShape.plain(layers=1, kv_heads=KV_HEADS, head_dim=DIM), pages=self.tokens // PAGE_TOKENS)
        self.table_SP = np.arange(self.tokens // PAGE_TOKENS, dtype=np.int32)[None]
        self.q = []
        values = np.random.default_rng(7).standard_normal(keys_NGC.shape, dtype=np.float32)
        for start in range(0, self.tokens, CHUNK):
            own = slice(start, start + CHUNK)
            parts = (q_NHC[own], keys_NGC[own], values[own])
            qkv_TN = ops.hidden(np.concatenate([part.reshape(len(part), -1) for part in parts], axis=1))
            batch = self.batch(start)
            self.q.append(ops.rope_and_write(qkv_TN, None, self.kv, 0, batch, heads=HEADS, kv_heads=KV_HEADS).copy())

    def batch(self, start: int) -> StepBatch:
        """A chunk of the prompt."""
        positions = np.arange(start, min(start + CHUNK, self.tokens), dtype=np.int32)
        starts = np.array([0, len(positions)], np.int32)
        return StepBatch(positions * 0, positions, starts, self.table_SP, np.zeros(0, np.int32))

    def attend(self, start: int, sparse: Sparse | None) -> NDArray[np.float32]:
        """[chunk, H C]"""
        spec = AttentionSpec(SCALE, sparse=sparse)
        out = self.ops.paged_attention(self.q[start // CHUNK], self.kv, 0, self.batch(start), spec)
        return self.ops.to_numpy(out)

    def cpu_seconds(self, sparse: Sparse | None) -> float:
        """To read the whole prompt."""
        begin, spec = time.process_time(), AttentionSpec(SCALE, sparse=sparse)
        for start in range(0, self.tokens, CHUNK):
            self.ops.paged_attention(self.q[start // CHUNK], self.kv, 0, self.batch(start), spec)
        return time.process_time() - begin


def drawn(tokens: int, alike: float) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Keys [N, G, C] and queries [N, H, C]; of neighbours' queries ``alike`` is the correlation."""
    rng = np.random.default_rng(tokens)
    keys_NGC = rng.standard_normal((tokens, KV_HEADS, DIM), dtype=np.float32)
    q_NHC = rng.standard_normal((tokens, HEADS, DIM), dtype=np.float32)
    for token in range(1, tokens):
        q_NHC[token] = alike * q_NHC[token - 1] + (1 - alike**2) ** 0.5 * q_NHC[token]
    return keys_NGC, q_NHC


def speed(options: argparse.Namespace, sparse: Sparse) -> None:
    ops = NativeOps(options.family, "bf16", threads=options.threads)
    print(f"one layer, {HEADS} heads over {KV_HEADS}, size {DIM}, bf16, {options.family}; {shown(sparse)}")
    print(f"{'tokens':>8}{'alike':>7}{'full':>10}{'sparse':>10}{'times':>8}   CPU seconds")
    for tokens in options.tokens:
        for alike in (0.0, 0.95):
            layer = Layer(ops, *drawn(tokens, alike))
            layer.cpu_seconds(sparse)
            took: dict[str, list[float]] = {"full": [], "sparse": []}
            for _ in range(options.rounds):
                for name, rule in (("full", None), ("sparse", sparse)):
                    if options.only in (None, name):
                        took[name].append(layer.cpu_seconds(rule))
            full, some = (min(own, default=float("nan")) for own in took.values())
            print(f"{tokens:>8}{alike:>7.2f}{full:>10.2f}{some:>10.2f}{full / some:>8.2f}")


# --- needles ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Found:
    """Of the queries that have a needle, on average."""

    weight: float  # that full attention gives to it
    read: float  # is its block read?
    recall: float  # of all weights, on keys that are read
    error: float  # of what is read, relative


def needles(tokens: int, score: float, run: int, sparse: Sparse, ops: NativeOps) -> Found:
    """64 queries at the prompt's end; for each, ``run`` keys in a row somewhere have the score ``score``."""
    keys_NGC, q_NHC = drawn(tokens, 0.0)
    rng = np.random.default_rng(int(score) + run)
    queries = np.arange(tokens - 64, tokens)
    pages = np.arange(sparse.sinks * BLOCK_KEYS, tokens - (sparse.window + 2) * BLOCK_KEYS, PAGE_TOKENS)
    places = rng.choice(pages, 64, replace=False) + rng.integers(0, 9, 64)
    heads = rng.integers(0, HEADS, 64)
    for query, place, head in zip(queries, places, heads, strict=True):
        q_C = q_NHC[query, head]
        group = head // (HEADS // KV_HEADS)
        for key in range(place, place + run):
            own = keys_NGC[key, group]
            keys_NGC[key, group] = own + (score / SCALE - own @ q_C) * q_C / (q_C @ q_C)
    layer = Layer(ops, keys_NGC, q_NHC)
    last = tokens - CHUNK
    full, some = (layer.attend(last, rule).reshape(-1, HEADS, DIM) for rule in (None, sparse))
    told = []
    k_NGC = torch.from_numpy(keys_NGC).bfloat16().float()
    for query, place, head in zip(queries, places, heads, strict=True):
        told.append(_told(k_NGC, torch.from_numpy(q_NHC[query]), int(query), (int(place), run), int(head), sparse))
    rows = queries - last
    error = np.linalg.norm(some[rows, heads] - full[rows, heads], axis=1) / np.linalg.norm(full[rows, heads], axis=1)
    weight, read, recall = np.mean(told, axis=0)
    return Found(weight, read, recall, float(np.mean(error)))


def _told(
    k_NGC: torch.Tensor, q_HC: torch.Tensor, position: int, needle: tuple[int, int], head: int, sparse: Sparse
) -> tuple[float, float, float]:
    """(weight of the needle, is it read, weight of all that is read)"""
    group, (place, run) = head // (HEADS // KV_HEADS), needle
    keys_1NC = k_NGC[: position + 1, group][None]
    tile_1MC = torch.zeros((1, HEADS // KV_HEADS * PAGE_TOKENS, DIM))
    q_HC = q_HC.bfloat16().float()
    tile_1MC[0, ::PAGE_TOKENS] = q_HC[group * (HEADS // KV_HEADS) : (group + 1) * (HEADS // KV_HEADS)]
    read_B = chosen_blocks(block_scores(tile_1MC, keys_1NC, torch.bfloat16)[:, 0], position, sparse)[0]
    read_N = read_B.repeat_interleave(BLOCK_KEYS)[: position + 1]
    weights_N = torch.softmax(keys_1NC[0] @ q_HC[head] * SCALE, dim=0)
    own = slice(place, place + run)
    return float(weights_N[own].sum()), float(read_N[own].float().mean()), float(weights_N[read_N].sum())


def needle_table(options: argparse.Namespace, sparse: Sparse) -> list[tuple[int, int, float, Found]]:
    ops = NativeOps(options.family, "bf16", threads=options.threads)
    print(f"\nneedles: {shown(sparse)}")
    print(f"{'tokens':>8}{'in a row':>9}{'score':>7}{'weight':>8}{'read':>7}{'recall':>8}{'error':>8}")
    rows = []
    for tokens in options.tokens:
        for run in (1, 4):
            for score in (8.0, 10.0, 12.0, 16.0, 20.0):
                own = needles(tokens, score, run, sparse, ops)
                rows.append((tokens, run, score, own))
                print(
                    f"{tokens:>8}{run:>9}{score:>7.0f}{own.weight:>8.2f}{own.read:>7.0%}{own.recall:>8.2f}"
                    f"{own.error:>8.2f}"
                )
    return rows


# --- stories ----------------------------------------------------------------------------------------------------------


class Reader:
    """The bundled model over one sequence."""

    def __init__(self, sparse: Sparse | None, threads: int, family: str) -> None:
        self.spec = msgspec.structs.replace(inspect_model(storyteller()), sparse=sparse)
        self.ops = NativeOps(family, "bf16", threads=threads)
        self.model = build_model(load_model(storyteller(), self.spec, self.ops), self.ops, self.spec.max_positions)
        pages = self.spec.max_positions // PAGE_TOKENS
        self.kv = self.ops.new_kv(self.spec.kv, pages=pages)
        self.table_SP = np.arange(pages, dtype=np.int32)[None]

    def logits(self, tokens: Sequence[int], start: int = 0) -> NDArray[np.float32]:
        """[T, V] of these tokens, which stand at ``start``."""
        count = len(tokens)
        positions, starts = np.arange(start, start + count, dtype=np.int32), np.array([0, count], np.int32)
        rows = np.arange(count, dtype=np.int32)
        batch = StepBatch(np.array(tokens, np.int32), positions, starts, self.table_SP, rows)
        hidden: Any = self.model.forward(self.ops, batch, self.kv)
        return self.ops.to_numpy(self.model.logits(self.ops, hidden))

    def write(self, opening: Sequence[int], tokens: int, rng: np.random.Generator) -> list[int]:
        """A story that begins so, drawn at temperature 0.7; ends where the model ends it."""
        story, start = list(opening), 0
        while len(story) < tokens:
            row_V = self.logits(story[start:], start)[-1].astype(np.float64) / 0.7
            start = len(story)
            odds_V = np.exp(row_V - row_V.max())
            token = int(rng.choice(len(odds_V), p=odds_V / odds_V.sum()))
            if token in self.spec.eos_ids:
                break
            story.append(token)
        return story


def log_softmax(logits_TV: NDArray[np.float32]) -> NDArray[np.float64]:
    wide = logits_TV.astype(np.float64) - logits_TV.max(1, keepdims=True)
    return np.asarray(wide - np.log(np.exp(wide).sum(1, keepdims=True)))


def stories(options: argparse.Namespace) -> None:
    """Long texts of the model's own stories, one after another."""
    full = Reader(None, options.threads, options.family)
    rules = (
        Sparse(sinks=1, window=4, chosen=4, start=0),
        Sparse(sinks=1, window=4, chosen=8, start=0),
        Sparse(sinks=1, window=8, chosen=12, start=0),
        Sparse(sinks=1, window=13, chosen=8, start=0),
    )
    readers = {rule: Reader(rule, options.threads, options.family) for rule in rules}
    tokenizer = Tokenizer.from_file(str(storyteller() / "tokenizer.json"))
    rng = np.random.default_rng(3)
    told: dict[Sparse, list[NDArray[np.float64]]] = {rule: [] for rule in rules}
    for _ in range(options.texts):
        ids = long_text(full, tokenizer, rng)
        wanted = log_softmax(full.logits(ids))
        for rule, reader in readers.items():
            got = log_softmax(reader.logits(ids))
            thinned = np.array([rule.thins(position) for position in range(len(ids) - 1)])
            agree = got.argmax(1) == wanted.argmax(1)
            kl = (np.exp(wanted) * (wanted - got)).sum(1)
            rows = np.arange(len(ids) - 1)
            worse = wanted[rows, ids[1:]] - got[rows, ids[1:]]
            told[rule].append(np.stack([agree[:-1][thinned], kl[:-1][thinned], worse[thinned]]))
    print(f"\nstories: {options.texts} texts of {full.spec.max_positions} tokens; tokens that leave something out")
    print(f"{'at most':>8}{'chosen':>8}{'window':>8}{'same next token':>17}{'KL, nats':>10}{'text less likely':>18}")
    for rule in rules:
        agree, kl, worse = np.concatenate(told[rule], axis=1)
        print(
            f"{rule.keys:>8}{rule.chosen * BLOCK_KEYS:>8}{rule.window * BLOCK_KEYS:>8}{agree.mean():>17.1%}"
            f"{kl.mean():>10.4f}{worse.mean():>18.4f}"
        )


def long_text(reader: Reader, tokenizer: Tokenizer, rng: np.random.Generator) -> list[int]:
    """As long as the model's context."""
    longest = reader.spec.max_positions
    ids: list[int] = []
    while len(ids) < longest:
        opening = tokenizer.encode(OPENINGS[int(rng.integers(len(OPENINGS)))]).ids
        ids += reader.write(opening, 400, rng)
    return ids[:longest]


# --- all of it --------------------------------------------------------------------------------------------------------


def shown(sparse: Sparse) -> str:
    return (
        f"{sparse.sinks} + {sparse.chosen} + {sparse.window} blocks of {BLOCK_KEYS} keys at most "
        f"({sparse.keys}), from position {sparse.start} on"
    )


def plot(rows: list[tuple[int, int, float, Found]], path: str) -> None:
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6, 3.4))
    for tokens in sorted({row[0] for row in rows}):
        for run, line in ((1, "-o"), (4, "--s")):
            own = [(score, found.read) for t, r, score, found in rows if (t, r) == (tokens, run)]
            axes.plot(*zip(*own, strict=True), line, label=f"{tokens:,} tokens, {run} key{'s' * (run > 1)}")
    axes.set(xlabel="score of the needle (others: 0 ± 1)", ylabel="needles that are read", ylim=(0, 1.03))
    axes.legend(frameon=False, fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def main() -> None:
    defaults = sparse_settings(EngineSettings())
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("speed", "needles", "stories", "all"))
    parser.add_argument("--family", default=families()[0], choices=families())
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--tokens", type=int, nargs="+", default=(8192, 32768))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", choices=("full", "sparse"), help="speed: one of them, for perf stat")
    parser.add_argument("--texts", type=int, default=8)
    parser.add_argument("--plot", metavar="FILE", help="needles: a picture")
    for name in ("sinks", "window", "chosen", "start"):
        parser.add_argument(f"--{name}", type=int, default=getattr(defaults, name))
    options = parser.parse_args()
    sparse = Sparse(sinks=options.sinks, window=options.window, chosen=options.chosen, start=options.start)
    if options.what in ("speed", "all"):
        speed(options, sparse)
    if options.what in ("needles", "all"):
        rows = needle_table(options, sparse)
        if options.plot:
            plot(rows, options.plot)
    if options.what in ("stories", "all"):
        stories(options)


if __name__ == "__main__":
    main()
