"""Cached pages are compared with their checksums before a request uses them, some in each turn: nobody else waits for a
long prompt's, and nothing is used that was not looked at."""

from __future__ import annotations

from penstock.config.schema import SchedulerConfig
from penstock.engine.core.events import AddRequest
from penstock.engine.core.plan import SampledTokens, StepPlan
from penstock.engine.core.scheduler import Scheduler
from penstock.hashing import block_hashes
from penstock.types import BlockHash, PageId, RequestId, RequestStage, SamplingParams

ROOT = BlockHash(bytes(32))
PAGES = 40
PROMPT = tuple(range(PAGES * 16 + 3))


class Seals:
    """Counts who looks at which page; some are damaged."""

    pages_per_step = 8
    page_s = 0.5

    def __init__(self) -> None:
        self.looked_at: list[PageId] = []
        self.damaged: set[PageId] = set()

    def seal(self, page: PageId) -> None:
        self.damaged.discard(page)

    def is_intact(self, page: PageId) -> bool:
        self.looked_at.append(page)
        return page not in self.damaged


class Engine:
    def __init__(self) -> None:
        config = SchedulerConfig(pages=200, max_model_len=1024, max_chunk_tokens=1024, prefill_step_budget_ms=1e9)
        self.seals = Seals()
        self.scheduler = Scheduler(config, verifier=self.seals)

    def ask(self, name: str, prompt: tuple[int, ...], most: int = 1) -> None:
        sampling = SamplingParams(seed=1, max_tokens=most)
        hashes = tuple(block_hashes(ROOT, prompt))
        self.scheduler.apply(
            AddRequest(
                id=RequestId(name),
                epoch=1,
                stage=RequestStage.WHOLE,
                prompt=prompt,
                sampling=sampling,
                arrival=0.0,
                root=ROOT,
                hashes=hashes,
            ),
            0.0,
        )

    def step(self) -> tuple[StepPlan, list[str]]:
        self.seals.looked_at.clear()
        plan = self.scheduler.plan(0.0)
        drawn = [SampledTokens((7,) if row.samples else ()) for row in plan.rows]
        self.scheduler.commit(plan, drawn, 0.0)
        return plan, [f"{row.request.id} {row.start}" for row in plan.rows]


def with_cached_prompt() -> Engine:
    engine = Engine()
    engine.ask("first", PROMPT)
    while engine.step()[1]:
        pass
    return engine


def test_a_long_cached_prompt_is_looked_at_in_slices_and_others_go_on_meanwhile() -> None:
    engine = with_cached_prompt()
    engine.ask("other", (9, 9, 9), most=20)
    engine.step()
    engine.ask("long", PROMPT)
    rows: list[list[str]] = []
    slices: list[int] = []
    while not rows or not any(row.startswith("long") for row in rows[-1]):
        plan, granted = engine.step()
        rows.append(granted)
        slices.append(len(engine.seals.looked_at))
        assert plan.verified_pages == slices[-1]
        assert plan.predicted_s >= 0.5 * plan.verified_pages, "it counts as time of the step"
    assert slices == [8] * 5, "each page once, eight in a turn"
    assert [row[0].split()[0] for row in rows] == ["other"] * 5
    assert rows[-1][1] == f"long {PAGES * 16}", "all of it was found"
    assert engine.scheduler.memory.damaged_pages == 0


def test_two_of_one_prompt_share_what_was_looked_at_and_the_next_looks_anew() -> None:
    engine = with_cached_prompt()
    engine.ask("one", PROMPT)
    engine.ask("two", PROMPT)
    seen = 0
    while engine.scheduler.load().queued:
        engine.step()
        seen += len(engine.seals.looked_at)
        assert len(engine.seals.looked_at) <= 8
    assert seen <= 2 * PAGES
    while engine.step()[1]:
        pass
    engine.ask("three", PROMPT)
    engine.step()
    assert len(engine.seals.looked_at) == 8


def test_a_damaged_page_is_found_in_whichever_slice_and_computed_anew() -> None:
    engine = with_cached_prompt()
    prefix = engine.scheduler.memory.prefix
    hashes = tuple(block_hashes(ROOT, PROMPT))
    with prefix.match(hashes, PAGES).lease as lease:
        engine.seals.damaged.add(lease.pages[20])
    engine.ask("long", PROMPT)
    granted: list[str] = []
    for _ in range(10):
        granted = engine.step()[1]
        if granted:
            break
    assert granted == [f"long {20 * 16}"]
    assert engine.scheduler.memory.damaged_pages == 1
    assert engine.scheduler.check_leaks().total == 0
