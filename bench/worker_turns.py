"""What one turn of a worker's loop costs at sizes that are not reached every day, and what of it takes longest.

    PYTHONPATH=src python bench/worker_turns.py [--held 4096] [--tokens 100000] [--page-kib 32] [--gateways 16]

No model, and no collections of garbage: real scheduler, mailbox, pages with checksums and KV store, and a runner that
draws from a hash.  Figures are CPU time of the thread that turns the loop.  A watchdog looks at that thread: of turns
over ``--bar-ms`` by the clock it shows the line at which the longest one was.

- ``held``: so many requests wait for grammars that are never compiled, while one answer is written.
- ``cached``: a prompt of so many tokens is in the prefix cache, and is asked for again.
- ``tier``: a tier of the KV store has it, in memory; its pages are fetched, sealed and used.
- ``snapshot``: gateways ask at once for all that is cached, and for 262,144 blocks below.
"""

from __future__ import annotations

import argparse
import gc
import os
import statistics
import sys
import threading
import time
import traceback
from array import array
from collections.abc import Callable, Sequence
from types import FrameType

from penstock.clock import MonotonicClock
from penstock.config.limits import KvTransferConfig
from penstock.config.schema import KvStoreConfig, SchedulerConfig, WorkerConfig
from penstock.engine.core.cost_model import StepCostModel
from penstock.engine.core.scheduler import Scheduler
from penstock.engine.loop import EngineLoop
from penstock.engine.runner.null_runner import NullRunner
from penstock.engine.service.kv_events import LowerTiers
from penstock.engine.service.kv_prefetch import KvPrefetcher
from penstock.engine.service.kv_transfer import TransferEnds
from penstock.engine.service.readiness import NoPrefetch, ReadinessSources
from penstock.engine.service.worker_service import WorkerService
from penstock.errors import GrammarRefused
from penstock.grammar.matcher import GrammarMatcher
from penstock.hashing import block_hashes, chain_root
from penstock.kernels.operands import KvShape
from penstock.kv.checksum import PageChecksum, PageChecksums
from penstock.kv.connectors.shm import InMemoryConnector
from penstock.kv.page_memory import KvLayout, KvMemory
from penstock.kv.store.store import PageStore
from penstock.kv.store.tier import FinalPage, PageKey
from penstock.kv.transfer.receiver import KvReceiver
from penstock.kv.transfer.sender import KvSender
from penstock.types import (
    BlockHash,
    Grammar,
    GrammarKind,
    ModelIdentity,
    RequestId,
    RequestStage,
    Role,
    SamplingParams,
    WorkerId,
)
from penstock.wire.gateway_messages import Hello, Recipient, Submit
from penstock.wire.in_memory import InMemoryHub

IDENTITY = ModelIdentity(fingerprint="f" * 64, numerics="null-1")
NAME = WorkerId("both-0")
SUNK = 1 << 18


class NeverCompiled:
    """A compiler that is never done."""

    def get_or_compile(self, grammar: Grammar) -> NeverCompiled:
        return self

    def ready(self) -> bool:
        return False

    def matcher(self) -> GrammarMatcher:
        raise GrammarRefused("never")


class InMemory:
    """A tier that has every page, full of zeros."""

    name, stores_copies, is_remote, pages = "host", True, False, 1

    def contains(self, keys: Sequence[PageKey]) -> list[bool]:
        return [True] * len(keys)

    def read_page(self, key: PageKey, into: memoryview) -> bool:
        return True

    def write_page(self, final: FinalPage, content: memoryview) -> bool:
        return False

    def on_evicted(self, key: PageKey) -> None:
        pass

    def close(self) -> None:
        pass


class Bench:
    """One worker, and the time of its turns."""

    def __init__(self, tokens: int, page_bytes: int, bar_s: float, *, tier: bool = False) -> None:
        self.hub, clock = InMemoryHub(), MonotonicClock()
        layout = KvLayout.for_shape(KvShape.plain(layers=1, kv_heads=1, head_dim=page_bytes // 16 // 2 // 2), "bf16")
        pages = 2 * (tokens // layout.page_tokens) + 64
        memory = KvMemory.anonymous(layout, pages)
        config = WorkerConfig(
            worker=NAME,
            incarnation=1,
            role=Role.BOTH,
            endpoint="memory://both-0",
            connector="memory",
            scheduler=SchedulerConfig(pages=pages, max_model_len=tokens + 64, prefill_step_budget_ms=1e9),
        )  # fmt: skip
        cost = StepCostModel((1e-3, 1e-3, 1e-9, 1e-3)) if tier else StepCostModel()
        self.scheduler = Scheduler(config.scheduler, cost, verifier=PageChecksums(memory))
        carrier = InMemoryConnector(memory, {}, PageChecksum(IDENTITY, layout))
        hand_over = TransferEnds(
            IDENTITY,
            KvSender(KvTransferConfig(), carrier, 1),
            KvReceiver(KvTransferConfig(), carrier),
        )
        pool = self.scheduler.memory.pool
        store = PageStore([InMemory()] if tier else [], memory, pool.generation, clock.now, KvStoreConfig(always=True))
        here = KvPrefetcher(self.scheduler, store, clock) if tier else NoPrefetch()
        ready = ReadinessSources(grammars=NeverCompiled(), pages=here)
        self.mailbox = WorkerService(
            config,
            self.scheduler,
            hand_over,
            self.hub,
            clock,
            ready=ready,
            lower_tiers=LowerTiers(lambda blocks: [0] * len(blocks), 2),
        )
        self.loop = EngineLoop(self.mailbox, self.scheduler, NullRunner(vocab=1000), clock)
        self.links = [self.hub.connect("memory://both-0")]
        self.links[0].send(Hello(gateway="g0", incarnation=1))
        self.watchdog = Watchdog(bar_s)
        self.asked = 0
        self.spent: list[float] = []

    def ask(self, prompt: tuple[int, ...], *, max_tokens: int, grammar: Grammar | None = None) -> None:
        self.asked += 1
        root = chain_root(IDENTITY)
        self.links[0].send(
            Submit(
                recipient=Recipient(worker=NAME, incarnation=1, identity=IDENTITY),
                request=RequestId(f"r{self.asked}/0"),
                epoch=1,
                stage=RequestStage.WHOLE,
                prompt=array("I", prompt).tobytes(),
                sampling=SamplingParams(seed=1, max_tokens=max_tokens, grammar=grammar),
                root=root,
                block_hashes=tuple(block_hashes(root, prompt)),
            )
        )

    def turn(self) -> None:
        """One turn; then the gateways read their mail, which is not counted."""
        begin = time.thread_time()
        with self.watchdog:
            self.loop.step()
        self.spent.append(time.thread_time() - begin)
        for link in self.links:
            while link.recv() is not None:
                pass

    def until(self, done: Callable[[], bool], most: int = 20_000) -> None:
        for _ in range(most):
            if done():
                return
            self.turn()
        raise SystemExit(f"not done after {most} turns")

    def show(self, name: str) -> None:
        spent_ms = sorted(1e3 * spent for spent in self.spent)
        print(
            f"{name:9} {len(spent_ms):6} turns, CPU ms: p50 {statistics.median(spent_ms):8.3f}  "
            f"p99 {spent_ms[int(0.99 * (len(spent_ms) - 1))]:8.3f}  longest {spent_ms[-1]:8.3f}"
        )
        if self.watchdog.seen:
            print(self.watchdog.seen)
        self.spent.clear()


class Watchdog:
    """Looks where the thread is whose turn takes longer than it may."""

    def __init__(self, bar_s: float) -> None:
        self.seen = ""
        self._bar_s = bar_s
        self._longest = 0.0
        self._began = 0.0
        self._thread = threading.get_ident()
        threading.Thread(target=self._look, daemon=True).start()

    def __enter__(self) -> None:
        self._began = time.monotonic()

    def __exit__(self, *_: object) -> None:
        self._began = 0.0

    def _look(self) -> None:
        while True:
            time.sleep(self._bar_s / 4)
            began = self._began
            took = time.monotonic() - began if began else 0.0
            if took > self._bar_s and took > self._longest:
                self._longest = took
                frame: FrameType | None = sys._current_frames().get(self._thread)
                calls = [
                    (one.name, os.path.basename(one.filename), one.lineno) for one in traceback.extract_stack(frame)
                ]
                where = " < ".join(f"{name} {file}:{line}" for name, file, line in calls[-4:][::-1])
                self.seen = f"          over {1e3 * self._bar_s:g} ms by the clock: {where}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--held", type=int, default=4096, help="requests that wait (default 4096)")
    parser.add_argument("--tokens", type=int, default=100_000, help="of the prompt (default 100,000)")
    parser.add_argument("--page-kib", type=int, default=32, help="of a KV page (default 32)")
    parser.add_argument("--gateways", type=int, default=16, help="that ask for all that is cached (default 16)")
    parser.add_argument("--bar-ms", type=float, default=20.0, help="a turn may take so long (default 20)")
    options = parser.parse_args()
    gc.disable()
    size, bar_s = options.page_kib << 10, options.bar_ms / 1e3
    prompt = tuple(number * 7919 % 997 for number in range(options.tokens))

    held = Bench(1024, size, bar_s)
    held.turn()
    held.ask((1, 2, 3), max_tokens=400)
    grammar = Grammar(kind=GrammarKind.REGEX, text="never")
    for _ in range(options.held):
        held.ask((1,), max_tokens=4, grammar=grammar)
    for _ in range(300):
        held.turn()
    held.show("held")

    cached = Bench(options.tokens, size, bar_s)
    cached.turn()
    cached.ask(prompt, max_tokens=1)
    cached.until(lambda: len(cached.mailbox._requests) == 0 and not cached.mailbox.has_work and len(cached.spent) > 3)
    cached.show("computed")
    cached.ask(prompt, max_tokens=1)
    cached.turn()
    cached.until(lambda: len(cached.mailbox._requests) == 0 and not cached.mailbox.has_work)
    cached.show("cached")

    tier = Bench(options.tokens, size, bar_s, tier=True)
    tier.turn()
    tier.ask(prompt, max_tokens=1)
    tier.turn()
    tier.until(lambda: len(tier.mailbox._requests) == 0 and not tier.mailbox.has_work)
    tier.show("tier")

    sunk = {BlockHash(os.urandom(32)): 1 for _ in range(SUNK)}
    known = cached.mailbox.publisher._demoted
    assert known is not None
    known._tiers.update(sunk)
    for _ in range(1, options.gateways):
        cached.links.append(cached.hub.connect("memory://both-0"))
    for number, link in enumerate(cached.links):
        link.send(Hello(gateway=f"g{number}", incarnation=1, kv_snapshot=True))
    cached.until(lambda: cached.mailbox.publisher.is_sending_snapshot)
    cached.until(lambda: not cached.mailbox.publisher.is_sending_snapshot)
    cached.show("snapshot")


if __name__ == "__main__":
    main()
