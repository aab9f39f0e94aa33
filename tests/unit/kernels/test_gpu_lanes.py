"""How a GPU is divided for two lanes: the driver's functions, the cut, and the bell that wakes the host."""

from __future__ import annotations

import ctypes
import select
from collections.abc import Callable
from threading import Event
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from penstock.config.gpu import CAPTURED_ROWS
from penstock.kernels.triton import lanes as cutting
from penstock.kernels.triton.bell import Bell
from penstock.kernels.triton.compressed import UNPACK_ROWS
from penstock.kernels.triton.green import GreenContextError, GreenDriver, Resource, cuda_driver
from penstock.kernels.triton.lanes import MEASURE_S, Cutting, fewest, lanes
from penstock.kernels.triton.program import MOST_ROWS

TOTAL, STEP = 132, 8


class Driver:
    """Stands for libcuda: divides in eights, and knows what was made of it.  ``fails``: this function."""

    def __init__(self, fails: str = "") -> None:
        self.fails = fails
        self.contexts: dict[int, int] = {}
        self.streams: dict[int, tuple[int, int]] = {}
        self._described: dict[int, int] = {}
        self._next = 100

    def __getattr__(self, name: str) -> Callable[..., int]:
        own = getattr(type(self), f"do_{name}", None)
        if own is None or self.fails == f"no {name}":
            raise AttributeError(name)
        return lambda *arguments: 801 if self.fails == name else own(self, *map(seen, arguments)) or 0

    def number(self) -> int:
        self._next += 1
        return self._next

    def do_cuDeviceGetDevResource(self, device: int, into: Resource, kind: int) -> None:
        assert (device, kind) == (0, 1)
        into.kind, into.multiprocessors = 1, TOTAL

    def do_cuDevSmResourceSplitByCount(self, *given: Any) -> None:
        own, groups, whole, rest, flags, least = given
        assert (groups.value, whole.multiprocessors, flags) == (1, TOTAL, 0)
        own.kind, own.multiprocessors = 1, min(-(-least // STEP) * STEP, TOTAL)
        left = TOTAL - own.multiprocessors
        rest.kind, rest.multiprocessors = int(left > 0), left

    def do_cuDevResourceGenerateDesc(self, into: Any, resource: Resource, count: int) -> None:
        assert count == 1
        into.value = self.number()
        self._described[into.value] = resource.multiprocessors

    def do_cuGreenCtxCreate(self, into: Any, described: int, device: int, flags: int) -> None:
        assert (device, flags) == (0, 1)
        into.value = self.number()
        self.contexts[into.value] = self._described[described]

    def do_cuGreenCtxStreamCreate(self, into: Any, context: int, flags: int, priority: int) -> int:
        assert flags == 1
        if self.fails == "second stream" and self.streams:
            return 2
        into.value = self.number()
        self.streams[into.value] = (self.contexts[context], priority)
        return 0

    def do_cuStreamDestroy_v2(self, stream: int) -> None:
        del self.streams[stream]

    def do_cuGreenCtxDestroy(self, context: int) -> None:
        del self.contexts[context]


def seen(argument: Any) -> Any:
    """What the driver sees of an argument: the object behind a pointer, or a value."""
    behind = getattr(argument, "_obj", None)
    return argument.value if behind is None else behind


def test_a_resource_is_laid_out_as_the_driver_has_it() -> None:
    assert Resource.multiprocessors.offset == 96
    assert ctypes.sizeof(Resource) >= 144


def test_a_device_is_cut_in_two_and_given_back() -> None:
    driver = Driver()
    green = GreenDriver(driver)
    assert green.multiprocessors() == TOTAL
    first, second = green.cut(49, first=-5, second=0)
    assert (first.multiprocessors, second.multiprocessors) == (56, 76)
    assert [driver.streams[group.stream] for group in (first, second)] == [(56, -5), (76, 0)]
    for group in (first, second):
        green.give_back(group)
    assert (driver.streams, driver.contexts) == ({}, {})


@pytest.mark.parametrize(
    ("fails", "least", "why"),
    [
        ("cuDeviceGetDevResource", 49, "cuDeviceGetDevResource gave error 801"),
        ("no cuGreenCtxStreamCreate", 49, "no cuGreenCtxStreamCreate: 12.5 or newer"),
        ("cuGreenCtxCreate", 49, "gave error 801"),
        ("second stream", 49, "cuGreenCtxStreamCreate gave error 2"),
        ("", 132, "132 of 132 multiprocessors cannot be set apart"),
    ],
)
def test_what_cannot_be_cut_says_why_and_leaves_nothing(fails: str, least: int, why: str) -> None:
    driver = Driver(fails)
    with pytest.raises(GreenContextError, match=why):
        GreenDriver(driver).cut(least, first=-1, second=0)
    assert (driver.streams, driver.contexts) == ({}, {})


def test_without_a_driver_there_are_none() -> None:
    with pytest.raises(GreenContextError, match="no CUDA driver"):
        cuda_driver("libnone.so.1")


@pytest.mark.parametrize("least", [10, 20, 35, 50, 99])
def test_the_fewest_that_are_enough(least: int) -> None:
    sizes, asked = [10, 20, 30, 40, 50], list[int]()

    def enough(size: int) -> bool:
        asked.append(size)
        return size >= least

    found = fewest(sizes, enough, lambda: True)
    assert found == next((size for size in sizes if size >= least), None)
    assert len(asked) <= 3
    assert fewest(sizes, enough, lambda: len(asked) % 2 == 0) in (None, 30)


class SlowAtFirst:
    """A program whose first step of all compiles kernels; then it takes as long as it must on what its stream has."""

    def __init__(self, clock: list[float], multiprocessors: int) -> None:
        self.groups = 1
        self._clock = clock
        self._step_s = 0.01 if multiprocessors >= 60 else 0.02

    def run(self, *_: Any) -> None:
        self._clock[0] += self._step_s if self._clock[0] else 10 * MEASURE_S


def test_compiling_takes_none_of_the_time_for_measuring(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, driver, signs = [0.0], Driver(), list[float]()
    made = Cutting(
        torch.device("cpu"),
        GreenDriver(driver),
        lambda count: SlowAtFirst(clock, count),  # type: ignore[arg-type,return-value]
        lambda: signs.append(clock[0]),
    )
    monkeypatch.setattr(cutting, "time", SimpleNamespace(monotonic=lambda: clock[0], perf_counter=lambda: clock[0]))
    monkeypatch.setattr(cutting, "_priorities", lambda: (0, -5))
    monkeypatch.setattr(Cutting, "stream", lambda _, group: group.multiprocessors)
    monkeypatch.setattr(torch.cuda, "Stream", lambda *_, **__: TOTAL)
    for name in ("synchronize", "empty_cache"):
        monkeypatch.setattr(torch.cuda, name, lambda *_: None)
    assert made.lanes().how == "answers on 72 of 132 multiprocessors, prompts on 60"
    assert len(driver.streams) == 2
    assert signs[0] == 10 * MEASURE_S
    assert len(signs) > 7


def test_without_a_gpu_one_lane_computes_after_the_other() -> None:
    streams: list[Any] = []

    def program_of(stream: Any) -> Any:
        streams.append(stream)

    made = lanes(torch.device("cpu"), "auto", program_of)
    assert streams == [None, None]
    assert "no GPU" in made.how


def readable(descriptor: int, seconds: float) -> bool:
    return bool(select.select([descriptor], [], [], seconds)[0])


def test_a_bell_rings_when_it_is_over(caplog: pytest.LogCaptureFixture) -> None:
    over, broken = Event(), False

    def wait() -> None:
        over.wait()
        if broken:
            raise RuntimeError("the device is gone")

    bell = Bell(wait)
    bell.hush()
    bell.when_over()
    assert not readable(bell.descriptor, 0)
    over.set()
    assert readable(bell.descriptor, 30)
    bell.hush()
    assert not readable(bell.descriptor, 0)
    broken = True
    bell.when_over()
    assert readable(bell.descriptor, 30)
    assert "the device is gone" in caplog.text


def test_what_one_lane_writes_never_takes_the_workspace_of_the_other() -> None:
    assert CAPTURED_ROWS == MOST_ROWS <= UNPACK_ROWS
