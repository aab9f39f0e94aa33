"""Python looks for garbage among all objects only while few streams are open, or when the process has grown."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from penstock.config.limits import TurnLimits
from penstock.launch import gateway_process
from penstock.launch.gateway_process import NEVER, GarbageCollector


@pytest.fixture
def as_before() -> Iterator[None]:
    thresholds = gc.get_threshold()
    yield
    gc.set_threshold(*thresholds)
    gc.unfreeze()


@pytest.mark.usefixtures("as_before")
def test_what_there_is_at_the_start_is_never_looked_at_again_and_a_full_look_never_comes_by_itself():
    collection = GarbageCollector(TurnLimits(), lambda: 0)
    collection.start()
    assert gc.get_freeze_count() > 1000
    assert gc.get_threshold()[0] == TurnLimits().young_collection_objects
    assert gc.get_threshold()[2] == NEVER


@pytest.mark.usefixtures("as_before")
def test_a_full_look_waits_until_few_streams_are_open_or_the_process_has_grown(monkeypatch: pytest.MonkeyPatch):
    streams, resident = [10_000], [1 << 20]
    monkeypatch.setattr(gateway_process, "resident_bytes", lambda: resident[0])
    limits = TurnLimits(full_collection_streams=100, full_collection_bytes=1 << 20)
    collection = GarbageCollector(limits, lambda: streams[0])
    collection.start()
    assert not collection.collect_if_due()
    resident[0] += 1 << 20
    assert collection.collect_if_due()
    assert not collection.collect_if_due()
    streams[0] = 100
    assert collection.collect_if_due()
