"""Law 1 for kernels: a row's bits know nothing of its company, of the cut of a prompt, or of threads."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from kernel_cases import EVERY, NATIVE, ON_GPU, Heads, Story, assert_same_bits, make, normal

from penstock.kernels import _native
from penstock.kernels.operands import segment_ends
from penstock.kernels.sampling import SampleRow

BATCHES = (1, 2, 3, 7, 16, 17, 64, 300)


@pytest.fixture(params=[*EVERY, *ON_GPU], ids="-".join)
def ops(request: pytest.FixtureRequest) -> Any:
    return make(*request.param)


@pytest.fixture(params=[1, 2], ids=["one thread", "two threads"])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    _native.set_threads(request.param)
    yield request.param
    _native.set_threads(1)


def assert_rows_alone(fn: Any, x: Any) -> None:
    """``fn`` of any number of rows equals ``fn`` of each alone (the rows of a batch are taken from its end)."""
    alone = np.concatenate([fn(x[i : i + 1]) for i in range(max(BATCHES))])
    for rows in BATCHES:
        start = max(BATCHES) - rows
        assert_same_bits(fn(x[start:]), alone[start:], f"{rows} rows")


@pytest.mark.parametrize(
    ("n", "k", "segments"),
    [
        (80, 320, None),
        (50, 320, segment_ends(320, 64)),
        (200, 896, segment_ends(896, 32)),
        (40, 95, None),
        (48, 4200, None),
    ],
)
def test_linear(ops: Any, threads: int, n: int, k: int, segments: tuple[int, ...] | None) -> None:
    packed = ops.pack_linear(normal(1, n, k), segments=segments)
    x = ops.compute(normal(2, max(BATCHES), k))
    assert_rows_alone(lambda rows: ops.to_numpy(ops.linear(rows, packed)), x)


@pytest.mark.parametrize(("family", "compute"), NATIVE)
def test_linear_large_enough_for_threads(family: str, compute: str) -> None:
    ops = make(family, compute)
    packed = ops.pack_linear(normal(1, 700, 1024), segments=segment_ends(1024, 32))
    x = ops.compute(normal(2, 200, 1024))
    answers = []
    for threads in (1, 2, 3):
        _native.set_threads(threads)
        answers.append(ops.to_numpy(ops.linear(x, packed)))
        answers.append(np.concatenate([ops.to_numpy(ops.linear(x[i : i + 1], packed)) for i in range(200)]))
    _native.set_threads(1)
    for answer in answers[1:]:
        assert_same_bits(answer, answers[0])


def test_norm_and_activation(ops: Any, threads: int) -> None:
    weight = ops.vector(normal(3, 322))
    assert_rows_alone(lambda x: ops.to_numpy(ops.rms_norm(x, weight, 1e-6)), ops.hidden(normal(4, 300, 322)))
    assert_rows_alone(lambda x: ops.to_numpy(ops.gated(x)), ops.hidden(normal(5, 300, 2 * 37)))


def test_sampling(ops: Any, threads: int) -> None:
    logits = normal(6, 16, 1003) * 4
    rows = [SampleRow(seed=i, position=i, choice=0, temperature=0.3 * i, logprobs=3) for i in range(16)]
    alone = [ops.sample(ops.hidden(logits[i : i + 1]), [rows[i]])[0] for i in range(16)]
    assert ops.sample(ops.hidden(logits), rows) == alone
    tokens = np.array([drawn.token for drawn in alone], np.int32)
    assert ops.token_logprobs(ops.hidden(logits), tokens, 3) == alone


LENGTHS = [15, 16, 17, 63, 65, 130, 511, 512, 513, 700, 1100, 1500]


@pytest.mark.parametrize(("family", "compute"), NATIVE)
@pytest.mark.parametrize("heads", [Heads(5, 1, 64), Heads(4, 2, 20)], ids=str)
def test_attention_in_any_chunks(family: str, compute: str, heads: Heads) -> None:
    ops = make(family, compute)
    together = Story(ops, heads, LENGTHS, poison=True).whole()
    for threads, chunk in ((1, 64), (2, 16), (2, 300)):
        _native.set_threads(threads)
        apart = Story(ops, heads, LENGTHS, poison=True).chunked(chunk)
        for a, b in zip(together, apart, strict=True):
            assert_same_bits(a, b, f"{len(a)} tokens in chunks of {chunk}")
    _native.set_threads(1)


@pytest.mark.parametrize(("family", "compute"), [*EVERY, *ON_GPU])
def test_attention_token_by_token_and_in_company(family: str, compute: str) -> None:
    ops, heads, lengths = make(family, compute), Heads(4, 2, 24), [30, 70, 140]
    together = Story(ops, heads, lengths, poison=True).whole()
    for a, b in zip(together, Story(ops, heads, lengths).chunked(1), strict=True):
        assert_same_bits(a, b)
    mixed = Story(ops, heads, lengths, poison=True)
    mixed.step([(0, 0, 29), (2, 0, 77)])
    mixed.step([(2, 77, 139), (0, 29, 30), (1, 0, 69)])
    mixed.step([(1, 69, 70), (2, 139, 140)])
    for a, b in zip(together, mixed.out, strict=True):
        assert_same_bits(a, b)


@pytest.mark.parametrize(("family", "compute"), NATIVE)
def test_partitions_apart_equal_partitions_in_turn(family: str, compute: str) -> None:
    """One long sequence on more threads than it has heads is cut by partitions; alone it is not."""
    ops, answers = make(family, compute), []
    for threads in (1, 4):
        _native.set_threads(threads)
        story = Story(ops, Heads(5, 1, 64), [1500])
        story.step([(0, 0, 1490)])
        for position in range(1490, 1500):
            story.step([(0, position, position + 1)])
        answers.append(story.out[0])
    _native.set_threads(1)
    assert_same_bits(answers[0], answers[1])


@pytest.mark.parametrize(("n", "k", "unit"), [(48, 320, 64), (48, 896, 32), (20, 360, 24)])
@pytest.mark.parametrize("devices", [2, 4, 8])
def test_devices_that_share_k_get_the_same_bits(ops: Any, n: int, k: int, unit: int, devices: int) -> None:
    """Each device sums its segments; recursive doubling then adds the devices: the tree of one device."""
    ends = segment_ends(k, unit)
    weight, x = normal(1, n, k), normal(2, 5, k)
    whole = ops.to_numpy(ops.linear(ops.compute(x), ops.pack_linear(weight, segments=ends)))
    each, sums = 8 // devices, []
    for device in range(devices):
        begin = ends[device * each - 1] if device else 0
        own = ends[device * each : (device + 1) * each]
        if own[-1] == begin:
            sums.append(np.zeros((5, n), np.float32))
            continue
        part = ops.pack_linear(weight[:, begin : own[-1]], segments=tuple(end - begin for end in own))
        sums.append(ops.to_numpy(ops.linear(ops.compute(x[:, begin : own[-1]]), part)))
    while len(sums) > 1:
        sums = [sums[i] + sums[i + 1] for i in range(0, len(sums), 2)]
    assert_same_bits(sums[0], whole)
