"""What Penstock wants to reach beside its peers, and whether it does: one line a bar.  Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from bench.peers.places import AGGREGATED, CODED, COMPRESSED, INT8, LLAMA, PLAIN, SHAPES, SPLIT
from bench.peers.series import Path, Series, Spread
from bench.peers.work import prefill_flops, weight_bytes

WORKERS = ("decode-0", "prefill-0")
ALONE_WITH_BF16 = {f"{PLAIN}-q8_0": 0.91, f"{PLAIN}-q4_k_m": 0.83}
"""One stream of inputs in bf16: as fast as it was before inputs of 8 bits."""


@dataclass(frozen=True, slots=True)
class Bar:
    """One line.  ``figure`` is what stands beside ``limit``; it holds when it is not below (or above) it."""

    name: str
    figure: Spread
    limit: float
    at_most: bool = False
    unit: str = "x"
    against: str = ""

    @property
    def holds(self) -> bool:
        return self.figure.median <= self.limit if self.at_most else self.figure.median >= self.limit


def bars(series: Series, model: str) -> Iterator[Bar]:
    """Those of this model that its records can answer."""
    if model == "1b":
        yield from _decode(series, model)
        yield from _prefill(series, model)
        yield from _coded(series)
        yield from _clients(series)
        yield from _long_prompts(series)
        yield from _start(series)
        yield from _kill(series)
    itl = series.spread(SPLIT, ("http8", "itl_s", "p99"))
    if model == "100m" and itl is not None:
        yield Bar("8 clients, p99 ITL", _scaled(itl, 1e3), 50, at_most=True, unit=" ms")
    yield from _memory(series, model)


def _against_best(
    series: Series, name: str, system: str, path: Path, limit: float, *, least: bool = False
) -> Iterator[Bar]:
    found = series.against_best(system, path, least=least)
    if found is not None:
        peer, ratio = found
        yield Bar(f"{name}, {system}", ratio, limit, at_most=least, against=peer)


def _decode(series: Series, model: str) -> Iterator[Bar]:
    one = ("decode", "1")
    yield from _against_best(series, "decode, 1 stream", COMPRESSED, one, 1.3)
    ratio = series.ratio(series.values(COMPRESSED, one), series.values(PLAIN, one))
    if ratio is not None:
        yield Bar("decode, 1 stream, compressed", ratio, 1.15, against=PLAIN)
    yield from _against_best(series, "decode, 1 stream", PLAIN, one, 1.0)
    read = series.values("machine", ("roofline", "read_gbs")) | series.values(PLAIN, ("decode", "read_gbs"))
    gbs = {n: rate * weight_bytes(SHAPES[model]) * 1e-9 for n, rate in series.values(PLAIN, one).items()}
    share = series.ratio(gbs, read)
    if share is not None:
        yield Bar("decode, 1 stream, plain, of the read bandwidth", _scaled(share, 100), 85, unit=" %")
    for system in (COMPRESSED, PLAIN):
        yield from _against_best(series, "decode, 16 streams", system, ("decode", "16"), 1.2)


def _prefill(series: Series, model: str) -> Iterator[Bar]:
    for tokens in ("128", "512", "2048"):
        for system in (COMPRESSED, PLAIN):
            yield from _against_best(series, f"prefill, {tokens} tokens", system, ("prefill", tokens), 1.0)
    peak = series.values("machine", ("roofline", "peak_gflops"))
    for system in (COMPRESSED, PLAIN):
        flops = prefill_flops(SHAPES[model], 512) / 512 * 1e-9
        used = {n: rate * flops for n, rate in series.values(system, ("prefill", "512")).items()}
        share = series.ratio(used, peak)
        if share is not None:
            yield Bar(f"prefill, 512 tokens, {system}, of the peak", _scaled(share, 100), 80, unit=" %")


def _coded(series: Series) -> Iterator[Bar]:
    """The same bits a weight, of the same file.  llama.cpp quantises inputs, as ``INT8`` does."""
    for system, (maker, kind) in CODED.items():
        other = f"{LLAMA}-{kind.lower()}"
        for streams in ("1", "4", "16") if maker in (PLAIN, INT8) else ():
            path = ("decode", streams)
            ratio = series.ratio(series.values(system, path), series.values(other, path))
            if ratio is not None:
                limit = ALONE_WITH_BF16.get(system, 1.0) if streams == "1" else 1.0
                yield Bar(f"decode, {streams} stream{'s' * (streams != '1')}, {system}", ratio, limit, against=other)


def _clients(series: Series) -> Iterator[Bar]:
    yield from _against_best(series, "8 clients, output tokens/s", SPLIT, ("http8", "output_tokens_per_s"), 1.0)
    for latency, name in (("ttft_s", "TTFT"), ("itl_s", "ITL")):
        for quantile in ("p50", "p99"):
            path = ("http8", latency, quantile)
            yield from _against_best(series, f"8 clients, {quantile} {name}", SPLIT, path, 1.0, least=True)


def _long_prompts(series: Series) -> Iterator[Bar]:
    yield from _against_best(series, "long prompts, p99 ITL", SPLIT, ("stutter", "itl_s", "p99"), 0.5, least=True)
    path = ("stutter", "all_tokens_per_s")
    ratio = series.ratio(series.values(SPLIT, path), series.values(AGGREGATED, path))
    if ratio is not None:
        yield Bar("long prompts, tokens/s", ratio, 0.9, against=AGGREGATED)


def _start(series: Series) -> Iterator[Bar]:
    path = ("start", "first_token_s")
    ratio = series.ratio(series.values(SPLIT, path), series.values(LLAMA, path))
    if ratio is not None:
        yield Bar("start to first token", ratio, 1.0, at_most=True, against=LLAMA)


def _kill(series: Series) -> Iterator[Bar]:
    for worker in WORKERS:
        found = series.spread(SPLIT, ("kill", worker, "after_s"))
        if found is not None:
            yield Bar(f"SIGKILL of {worker} to the next answer", _scaled(found, 1e3), 300, at_most=True, unit=" ms")


def _memory(series: Series, model: str) -> Iterator[Bar]:
    """Keys and values are the shared memory of a server's processes; weights are their bytes in the file."""
    pss = series.values(SPLIT, ("memory", "pss"))
    kv = series.values(SPLIT, ("memory", "pss_shared_memory"))
    weights = series.values(SPLIT, ("memory", "weight_bytes"))
    share = series.ratio(pss, {n: 1.1 * (weights[n] + kv[n]) + 200e6 for n in weights.keys() & kv.keys()})
    if share is not None:
        yield Bar(f"PSS of all processes, {model}, by 1.1 x (weights + KV) + 200 MB", share, 1.0, at_most=True)


def _scaled(spread: Spread, by: float) -> Spread:
    return Spread(spread.median * by, spread.least * by, spread.most * by, spread.rounds)
