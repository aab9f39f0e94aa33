"""What is to be asked, how long it is, and when: pure, from a seed or from a trace file.

Knows nothing about servers, tokens' text or clocks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from penstock.errors import ConfigError
from penstock.sim.trace import read_trace

TRACES = ("mooncake", "azure")
"""Kinds of trace files that are read."""


@dataclass(frozen=True, slots=True)
class RequestSpec:
    """One request before it has words.  ``at`` is seconds from the start; None leaves it to the arrival process."""

    input_len: int
    output_len: int
    at: float | None = None
    blocks: tuple[int, ...] = ()  # the prompt's beginning: equal ids promise equal tokens, which a cache may find
    block_tokens: int = 0  # in each of those; what the prompt has beyond them is its own


@dataclass(frozen=True, slots=True)
class RandomLengths:
    """Lengths drawn evenly from [(1 - ratio) L, (1 + ratio) L], as ``vllm bench serve`` draws them."""

    input_len: int
    output_len: int
    range_ratio: float = 0.0
    prefix_len: int = 0  # tokens shared by all prompts, on top of ``input_len``

    def draw(self, count: int, seed: int) -> list[RequestSpec]:
        rng = np.random.default_rng([seed, 1])
        inputs = self._lengths(rng, self.input_len, count)
        outputs = self._lengths(rng, self.output_len, count)
        return [
            RequestSpec(
                input_len=self.prefix_len + int(i),
                output_len=int(o),
                blocks=(0,) if self.prefix_len else (),
                block_tokens=self.prefix_len,
            )
            for i, o in zip(inputs, outputs, strict=True)
        ]

    def _lengths(self, rng: np.random.Generator, length: int, count: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        low = max(1, math.floor(length * (1 - self.range_ratio)))
        high = max(low, math.ceil(length * (1 + self.range_ratio)))
        return rng.integers(low, high, count, endpoint=True)


def of_trace(path: Path, kind: str, count: int) -> list[RequestSpec]:
    """The first ``count`` requests of a trace file, in order of arrival.  ``kind``: of ``TRACES``.

    Raises ConfigError that names file, line and reason, also where the file is of the other kind.
    """
    trace = read_trace(path, count)
    found = "mooncake" if trace.block_tokens else "azure"
    if found != kind:
        raise ConfigError(f"{path}: this is a trace of the kind {found!r}, not {kind!r}")
    return [
        RequestSpec(
            input_len=job.prompt,
            output_len=job.output,
            at=job.at,
            blocks=job.blocks,
            block_tokens=trace.block_tokens,
        )
        for job in trace.requests
    ]


def scale_request(wanted: RequestSpec, *, length: float = 1.0, time: float = 1.0) -> RequestSpec:
    """The same request with lengths and arrival multiplied; shared prefixes stay shared."""
    return replace(
        wanted,
        input_len=max(1, round(wanted.input_len * length)),
        output_len=max(1, round(wanted.output_len * length)),
        at=None if wanted.at is None else wanted.at * time,
        block_tokens=max(1, round(wanted.block_tokens * length)) if wanted.block_tokens else 0,
    )


def fitting(wanted: Sequence[RequestSpec], max_model_len: int | None) -> list[RequestSpec]:
    """Those that fit the context; the caller says how many did not."""
    return [w for w in wanted if max_model_len is None or w.input_len + w.output_len <= max_model_len]


def arrivals(count: int, *, rate: float, burstiness: float, seed: int) -> list[float]:
    """Seconds from the start at which requests are due, the first at 0.

    Gaps are gamma distributed with shape ``burstiness`` (1 is a Poisson process, less comes in bursts, more is more
    regular) and stretched together so that the mean gap is 1 / rate exactly: a short run, too, has the rate that was
    asked for.  An infinite rate has all of them due at once.
    """
    if math.isinf(rate):
        return [0.0] * count
    waits = np.random.default_rng([seed, 2]).gamma(burstiness, size=max(0, count - 1))
    due = np.concatenate([[0.0], np.cumsum(waits)])[:count]
    return [float(at) for at in due * ((count - 1) / rate / due[-1] if count > 1 else 0.0)]
