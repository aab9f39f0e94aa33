"""The loop over virtual time: it ends, and shows what even pace is for."""

from __future__ import annotations

import statistics

import pytest
from bench.closed_loop import Loop, build_parser


def run(*flags: str, split: bool = True) -> Loop:
    loop = Loop(build_parser().parse_args(["--requests", "24", *flags]), split)
    loop.run()
    return loop


@pytest.mark.parametrize("split", [True, False])
def test_every_request_has_all_its_tokens(split: bool) -> None:
    loop = run(split=split)
    assert (len(loop.ttft), len(loop.itl)) == (24, 24 * 63)
    assert all(worker.scheduler.check_leaks().total == 0 for worker in loop.workers.values())


def test_even_pace_is_more_for_everybody() -> None:
    even, greedy = run(), run("--no-even-pace")
    assert even.tokens / even.now > 1.05 * greedy.tokens / greedy.now
    assert statistics.median(even.ttft) < 0.85 * statistics.median(greedy.ttft)
    assert max(even.itl) < 0.15
