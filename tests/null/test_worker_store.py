"""Workers with a KV store: pages of prompts come from other places, and the answers are what they were.

The runner of the stage reads every earlier token back out of its page before it computes: a page that is not the right
one shows at once.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.engine.core.cost_model import StepCostModel, StepWork
from penstock.engine.service import kv_prefetch
from penstock.engine.service.readiness import PageWait
from penstock.errors import TierError
from penstock.kv.page_memory import KvLayout
from penstock.kv.store.envelope import PageEnvelope
from penstock.kv.store.page_index import index_bytes
from penstock.kv.store.peer_tier import PeerTier
from penstock.kv.store.slab_tier import SlabFile, SlabTier, slab_head
from penstock.kv.store.tier import FinalPage, KvTier, PageKey
from penstock.kv.store.tier_worker import JobThread
from penstock.types import RequestStage, Role, WorkerId
from penstock.wire.gateway_messages import Cancel

from .worker_stage import IDENTITY, LAYOUT, WINDOWED, Stage, StageWorker, expected, merged

PAGES = 64
SIZE = 2 << 20


class FixedCost(StepCostModel):
    """The stage's clock stands still during a step, so there is nothing to be learned from it."""

    def update(self, work: StepWork, seconds: float) -> None:
        del work, seconds


def on_disk(path: Path, layout: KvLayout = LAYOUT, workers: tuple[str, ...] = ("p", "d")):
    def tiers(worker: StageWorker) -> list[KvTier]:
        head = slab_head(IDENTITY, layout, SIZE, encrypted=False)
        share = (workers.index(worker.name), len(workers))
        return [
            SlabTier(
                "disk",
                SlabFile.at(path, head, writer=share[0], writers=share[1], direct=False),
                PageEnvelope(IDENTITY, layout),
            )
        ]

    return tiers


def among_peers(workers: tuple[str, ...] = ("p", "d")) -> Callable[[StageWorker], list[KvTier]]:
    sizes = [(WorkerId(name), PAGES) for name in workers]
    descriptor = os.memfd_create("test-directory")
    os.ftruncate(descriptor, index_bytes(PAGES * len(workers)))
    memories: dict[WorkerId, object] = {}

    def tiers(worker: StageWorker) -> list[KvTier]:
        memories[worker.name] = worker.memory
        made = PeerTier(descriptor, sizes, worker.name, memories, PageEnvelope(IDENTITY, LAYOUT))
        if len(memories) == len(workers):  # nobody else is to map it
            os.close(descriptor)
        return [made]

    return tiers


def stage_of(
    tiers: Callable[[StageWorker], list[KvTier]], layout: KvLayout = LAYOUT
) -> tuple[Stage, StageWorker, StageWorker]:
    stage = Stage(layout=layout, tiers=tiers, cost=FixedCost())
    return stage, stage.worker("p", Role.PREFILL), stage.worker("d", Role.DECODE)


def run(stage: Stage) -> None:
    """Until nothing moves, with time for those that wait for a tier in vain."""
    for _ in range(100):
        stage.turn()
    stage.run()


def end(stage: Stage) -> None:
    """Nothing is left to do, and the tiers are free for the next one."""
    stage.assert_idle()
    for worker in stage.workers:
        assert worker.stored is not None
        worker.stored.close()


def computed(worker: StageWorker) -> float:
    return worker.mailbox.reporter._counts["prompt_tokens_computed"]


def tokens_brought(worker: StageWorker) -> float:
    assert worker.stored is not None
    return worker.stored.counters()["stored_tokens"]


def waits_of(worker: StageWorker) -> list[PageWait]:
    """What it tells of waiting for tiers, from now on."""
    assert worker.stored is not None
    waits: list[PageWait] = []
    worker.stored.watch(lambda request, wait: waits.append(wait))
    return waits


def first_item(stage: Stage, request: str):
    return next(item for _, item in stage.tokens if item.request == request)


def test_the_next_turn_finds_the_last_answer_at_the_decode_worker():
    stage, prefill, decode = stage_of(among_peers())
    prompt = [i % 50 for i in range(40)]
    stage.ask_split(prompt, prefill, decode, request="one", max_tokens=60)
    stage.run()
    answer = stage.answer("one")
    before = computed(prefill)
    longer = [*prompt, *answer, 7, 8, 9]
    stage.ask_split(longer, prefill, decode, request="two", max_tokens=5)
    stage.run()
    assert stage.answer("two") == expected(len(longer), tokens=5)
    known = (len(prompt) + len(answer) - 1) // 16 * 16
    assert first_item(stage, "two").cached_tokens == known
    assert computed(prefill) - before == len(longer) - known
    assert tokens_brought(prefill) == known - len(prompt) // 16 * 16
    stage.assert_idle()


def test_what_a_peer_has_evicted_is_computed():
    stage, prefill, decode = stage_of(among_peers())
    prompt = [i % 50 for i in range(40)]
    stage.ask_split(prompt, prefill, decode, request="one", max_tokens=60)
    stage.run()
    answer = stage.answer("one")
    for number in range(6):  # all of the decode worker's memory becomes others'
        stage.ask([100 + number] * 200, to=decode, request=f"other-{number}")
    stage.run()
    longer = [*prompt, *answer, 7]
    stage.ask_split(longer, prefill, decode, request="two", max_tokens=5)
    stage.run()
    assert stage.answer("two") == expected(len(longer), tokens=5)
    assert tokens_brought(prefill) == 0
    stage.assert_idle()


@pytest.mark.parametrize("layout", [LAYOUT, WINDOWED], ids=["plain", "windows"])
def test_a_restarted_service_finds_its_pages_on_disk(tmp_path: Path, layout: KvLayout):
    prompt = [i % 70 for i in range(150)]
    answers, items, waits = [], [], []
    for _ in range(2):
        stage, prefill, decode = stage_of(on_disk(tmp_path / "f", layout), layout)
        waits.append(waits_of(prefill))
        stage.ask_split(prompt, prefill, decode)
        stage.run()
        answers.append(stage.answer())
        items.append(first_item(stage, "r"))
        end(stage)
    assert answers[0] == answers[1] == expected(150)
    assert [item.cached_tokens for item in items] == [0, 144]
    assert [len(told) for told in waits] == [0, 1]
    facts = dict(waits[1][0].facts)
    assert facts.pop("disk_pages") > 0
    assert facts == {"wanted_tokens": 144, "found_tokens": 144}
    assert waits[1][0].began <= waits[1][0].ended


def test_pages_that_do_not_come_in_time_are_computed_and_kept_when_they_come(tmp_path: Path):
    prompt = [i % 70 for i in range(150)]
    for turn in range(2):
        stage, prefill, decode = stage_of(on_disk(tmp_path / "f"))
        reader = prefill.hands[0]
        reader.asleep = turn == 1
        stage.ask_split(prompt, prefill, decode)
        run(stage)
        assert stage.answer() == expected(150)
        if turn == 1:
            assert first_item(stage, "r").cached_tokens == 0
            assert reader.queued == 9
            assert not prefill.scheduler.memory.has_foreign_pages, "what no tier has begun is taken back"
            assert prefill.scheduler.check_leaks().total == 0
            reader.work()
            stage.turn()
            assert not prefill.scheduler.memory.has_foreign_pages
        end(stage)


class HangingTier:
    """Has everything, and stops in the middle of its first read, as a file server does that is gone."""

    name = "disk"
    stores_copies = True
    is_remote = False
    pages = 1000

    def __init__(self) -> None:
        self.reads, self.goes_on = threading.Event(), threading.Event()

    def contains(self, keys: Sequence[PageKey]) -> list[bool]:
        return [True] * len(keys)

    def read_page(self, key: PageKey, into: memoryview) -> bool:
        self.reads.set()
        assert self.goes_on.wait(60)
        return False

    def write_page(self, final: FinalPage, content: memoryview) -> bool:
        return False

    def on_evicted(self, key: PageKey) -> None:
        pass

    def close(self) -> None:
        pass


def test_of_a_cancelled_request_a_tier_that_hangs_keeps_one_page(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(StageWorker, "_hand", lambda worker, *words: JobThread(*words))  # real threads
    tier = HangingTier()
    stage = Stage(tiers=lambda worker: [tier], cost=FixedCost((1e-3, 1.0, 1e-3, 1e-3)))  # computing takes for ever
    worker = stage.worker("both", Role.BOTH)
    stage.ask([i % 70 for i in range(150)], to=worker)
    stage.turn()
    assert tier.reads.wait(60)
    assert worker.scheduler.memory.foreign_pages == 9
    worker.link.send(Cancel(request="r", epoch=1))
    stage.wait(0.3)
    report = stage.reports[worker.name]
    assert (report.kv_pages_used, report.kv_pages_loading) == (1, 1), "the page under the thread's hands"
    lost = worker.scheduler.memory.pool.allocate(2).detach()  # somebody loses pages meanwhile
    stage.wait(0.8)
    assert stage.reports[worker.name].kv_pages_leaked == 2, "the check goes on beside the tier that hangs"
    worker.scheduler.memory.pool.release(lost)
    tier.goes_on.set()
    for thread in ("_reader", "_writer"):
        getattr(worker.stored._store._tiers[0], thread).finish()
    assert worker.stored._store._tiers[0]._reader.join(60)
    stage.assert_idle()


def test_pages_are_asked_for_some_in_a_turn_and_those_that_were_not_are_free_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(kv_prefetch, "LOADS_PER_TURN", 4)
    prompt = [i % 70 for i in range(150)]
    for turn in range(3):
        stage, prefill, decode = stage_of(on_disk(tmp_path / "f"))
        reader = prefill.hands[0]
        stage.ask_split(prompt, prefill, decode)
        reader.asleep = turn > 0
        if turn == 0:
            stage.run()
            assert stage.answer() == expected(150)
            end(stage)
            continue
        asked = []
        while len(asked) < 2 or asked[-1] > asked[-2]:
            stage.turn(0.0)
            asked.append(reader.queued)
            if turn == 2:
                break
        assert max(b - a for a, b in zip([0, *asked], asked, strict=False)) <= 4, asked
        if turn == 1:
            assert asked[-1] == 9
        else:
            assert 0 < reader.queued < 9
        for worker in stage.workers:
            worker.link.send(Cancel(request="r", epoch=1))
        for _ in range(3):
            stage.turn()
        assert not prefill.scheduler.memory.has_foreign_pages
        reader.work()
        stage.assert_idle()
        end(stage)


def test_a_cancelled_request_leaves_nothing_behind(tmp_path: Path):
    prompt = [i % 70 for i in range(150)]
    for turn in range(2):
        stage, prefill, decode = stage_of(on_disk(tmp_path / "f"))
        reader = prefill.hands[0]
        reader.asleep = turn == 1
        stage.ask_split(prompt, prefill, decode)
        if turn == 0:
            stage.run()
        else:
            for _ in range(5):
                stage.turn()
            assert reader.queued
            for worker in stage.workers:
                worker.link.send(Cancel(request="r", epoch=1))
            for _ in range(5):
                stage.turn()
            reader.work()
            stage.ask([1, 2, 3], to=prefill, request="again", max_tokens=1)
            stage.run()
        end(stage)


def test_equal_prompts_at_once_fetch_their_pages_once(tmp_path: Path):
    prompt = [i % 70 for i in range(150)]
    for turn in range(2):
        stage, prefill, decode = stage_of(on_disk(tmp_path / "f"))
        for number in range(3 if turn else 1):
            stage.ask_split([*prompt, number], prefill, decode, request=f"r{number}")
        stage.run()
        for number in range(3 if turn else 1):
            assert stage.answer(f"r{number}") == expected(151)
        assert prefill.stored is not None
        assert prefill.stored.counters()["kv_disk_pages_read"] == (9 if turn else 0)
        end(stage)


class Broken:
    """A tier that says it has everything and then fails."""

    name = "disk"
    stores_copies = True
    is_remote = False
    pages = 0

    def __init__(self, error: Exception) -> None:
        self.error = error
        self.asked = 0

    def contains(self, keys):
        return [True] * len(keys)

    def read_page(self, key, into):
        self.asked += 1
        into[:4] = b"junk"
        raise self.error

    def write_page(self, final, content):
        raise self.error

    def on_evicted(self, key):
        pass

    def close(self):
        pass


@pytest.mark.parametrize("error", [OSError("worn out"), TierError("gone"), ValueError("a bug")])
def test_a_tier_that_fails_costs_a_computation(error: Exception, caplog: pytest.LogCaptureFixture):
    tier = Broken(error)
    stage = Stage(tiers=lambda worker: [tier], cost=FixedCost())
    worker = stage.worker("w", Role.BOTH)

    def forgiving(job: Callable[[], None]) -> None:  # as the real thread does it
        try:
            job()
        except ValueError:
            caplog.clear()

    for hand in worker.hands:
        hand.submit = forgiving  # type: ignore[method-assign]
    for number in range(5):
        stage.ask([number] * 100, to=worker, request=f"r{number}")
        stage.run()
        assert stage.answer(f"r{number}") == expected(100)
    if not isinstance(error, ValueError):
        assert tier.asked == 3, "then it is left alone"
    stage.assert_idle()


turns = st.lists(
    st.tuples(st.integers(0, 3), st.integers(1, 60), st.integers(1, 40), st.booleans()), min_size=1, max_size=8
)


@settings(max_examples=15)
@given(turns)
def test_chats_with_all_their_pages_in_motion(tmp_path_factory: pytest.TempPathFactory, turns):
    """Several chats, little memory, threads that sleep now and then: answers stay what they are, and nothing leaks."""
    stage, prefill, decode = stage_of(on_disk(tmp_path_factory.mktemp("store") / "f"))
    chats: dict[int, list[int]] = {number: [number] * 20 for number in range(4)}
    for index, (chat, message, length, asleep) in enumerate(turns):
        prompt = [*chats[chat], *range(message)]
        if len(prompt) + length > 250:
            continue
        for worker in stage.workers:
            for hand in worker.hands:
                hand.asleep = asleep
                if not asleep:
                    hand.work()
        name = f"t{index}"
        stage.ask_split(prompt, prefill, decode, request=name, max_tokens=length)
        run(stage)
        assert merged(stage, name) == expected(len(prompt), tokens=length)
        chats[chat] = [*prompt, *merged(stage, name)]
    for worker in stage.workers:
        for hand in worker.hands:
            hand.work()
    stage.ask([1, 2, 3], to=prefill, leg=RequestStage.WHOLE, request="last", max_tokens=1)
    stage.run()
    stage.assert_idle()
