"""Whole workers in one process, without a model: real scheduler, mailbox and hand-over, a clock that is turned by hand.

The runner writes each token's id into its place in the KV page and, before it computes anything, reads back every
earlier one.  So a page that is lost, mixed up, written by the wrong request or handed over wrongly shows at once.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping, Sequence

from msgspec.structs import replace
from tests.store_rig import HandNow

from penstock.clock import Clock, VirtualClock
from penstock.config.limits import KvTransferConfig
from penstock.config.schema import KvStoreConfig, SchedulerConfig, WorkerConfig
from penstock.engine.core.cost_model import StepCostModel
from penstock.engine.core.plan import SampledTokens, ScheduledTokens, StepPlan
from penstock.engine.core.scheduler import Scheduler
from penstock.engine.loop import EngineLoop
from penstock.engine.runner.null_runner import NullRunner, null_token
from penstock.engine.service.kv_prefetch import KvPrefetcher
from penstock.engine.service.kv_transfer import RecomputeEstimate, TransferEnds
from penstock.engine.service.readiness import NoPrefetch, ReadinessSources
from penstock.engine.service.worker_service import WorkerService
from penstock.hashing import chain_root
from penstock.kernels.operands import KvShape
from penstock.kv.checksum import PageChecksum
from penstock.kv.connectors.shm import InMemoryConnector
from penstock.kv.page_memory import KvLayout, KvMemory
from penstock.kv.store.store import PageStore
from penstock.kv.store.tier import KvTier
from penstock.kv.transfer.receiver import KvReceiver
from penstock.kv.transfer.sender import KvSender
from penstock.kv_spec import FULL_ATTENTION, KvSpec
from penstock.types import ModelIdentity, RequestId, RequestStage, Role, SamplingParams, WorkerId, pack_token_ids
from penstock.wire.gateway_messages import (
    ConfirmRequests,
    Hello,
    MigrateRequests,
    PageSource,
    Recipient,
    RequestReturned,
    Submit,
    TokenItem,
    Tokens,
    WorkerReport,
)
from penstock.wire.in_memory import InMemoryHub

IDENTITY = ModelIdentity(fingerprint="f" * 64, numerics="null-1")
LAYOUT = KvLayout.for_shape(KvShape.plain(layers=1, kv_heads=1, head_dim=2), "fp32")  # 16 places of 16 bytes a page
WINDOW = 40
WINDOWED = KvLayout.for_shape(  # the same pages, for a layer that reads everything and one that reads the last 40
    KvShape.plain(layers=2, kv_heads=1, head_dim=2).grouped([FULL_ATTENTION, KvSpec(window=WINDOW)]), "fp32"
)
VOCAB = 4096  # as the bundled model, whose tokenizer some tests put before it


Asked = tuple[tuple[int, ...], SamplingParams]
"""What a client asks for: its prompt, and how it is answered."""


class MarkingRunner(NullRunner):
    """Draws as the null runner does, and keeps in its page every token's id, as a model keeps keys and values, and
    which role computed it.  Where roles are of two numerics classes, nobody computes what is the other's.

    Its tokens depend on no context, so it compares the context itself: ``asked`` has prompts and sampling of clients.
    """

    def __init__(self, memory: KvMemory, role: Role = Role.BOTH, *, asked: Mapping[RequestId, Asked]) -> None:
        super().__init__(vocab=VOCAB)
        self._memory = memory
        self._reads = role is Role.PREFILL
        self._asked = asked
        self._compared: set[tuple[RequestId, int]] = set()

    def run(self, plan: StepPlan) -> Sequence[SampledTokens]:
        for row in plan.rows:
            self._compare(row)
            for group, reach in enumerate(self._memory.layout.shape.reaches):
                self._check(row, group, reach.first_read_position(row.start))
                for position in range(row.start, row.start + row.count):
                    token = row.request.tokens(position, position + 1)[0]
                    self._place(row, group, position)[:12] = struct.pack("<III", token, group, self._reads)
        return super().run(plan)

    def _compare(self, row: ScheduledTokens) -> None:
        """A leg's prompt is its client's, and what was emitted before it is the beginning of the true answer."""
        request = row.request
        place = (request.id, request.epoch)
        if place in self._compared or request.id not in self._asked:
            return
        self._compared.add(place)
        prompt, sampling = self._asked[request.id]
        assert tuple(request.prompt) == prompt
        emitted = [null_token(sampling, len(prompt) + i, vocab=VOCAB, drawn=i) for i in range(request.emitted)]
        assert request.output[: request.emitted] == emitted

    def _check(self, row: ScheduledTokens, group: int, first: int) -> None:
        known = [(token, group) for token in row.request.tokens(first, row.start)]
        held = [struct.unpack("<III", self._place(row, group, at)[:12]) for at in range(first, row.start)]
        found = [mark[:2] for mark in held]
        assert found == known, f"{row.request.id}: pages hold {found}, not {known}"
        if row.request.prompt_pages_only:
            border = len(row.request.prompt)
            readers = [bool(mark[2]) for mark in held]
            assert readers == [at < border for at in range(first, row.start)], f"{row.request.id}: {readers}"
            assert self._reads == (row.start < border), f"{row.request.id}: position {row.start} is the other role's"

    def _place(self, row: ScheduledTokens, group: int, position: int) -> memoryview:
        block, slot = divmod(position, LAYOUT.page_tokens)
        own = row.request.page_tables[group]
        assert own.first <= block, f"{row.request.id}: block {block} was given back"
        size = LAYOUT.page_bytes // LAYOUT.page_tokens
        return self._memory.view(own.pages[block])[slot * size : (slot + 1) * size]


class StageWorker:
    """One worker on the stage."""

    def __init__(
        self,
        stage: Stage,
        name: str,
        role: Role,
        *,
        incarnation: int = 1,
        identity: ModelIdentity = IDENTITY,
        predecessor_fault: str = "",
        clock: Clock | None = None,
        **scheduler: int,
    ) -> None:
        """``clock``: of its host; None: that of the stage."""
        clock = clock or stage.clock
        self.name = WorkerId(name)
        self.incarnation = incarnation
        self.identity = identity
        self.endpoint = f"memory://{name}" if incarnation == 1 else f"memory://{name}-{incarnation}"
        self.memory = KvMemory.anonymous(stage.layout, scheduler.setdefault("pages", 64))
        stage.memories[self.name] = self.memory
        scheduler.setdefault("max_model_len", 256)
        config = WorkerConfig(
            worker=self.name,
            incarnation=incarnation,
            predecessor_fault=predecessor_fault,
            role=role,
            endpoint=self.endpoint,
            connector="memory",
            vocabulary=VOCAB,
            scheduler=SchedulerConfig(reaches=stage.layout.shape.reaches, **scheduler),
            hand_over=stage.hand_over,
        )
        self.carrier = carrier = stage.carrier(self.memory, stage.memories, PageChecksum(identity, stage.layout))
        self.scheduler = Scheduler(config.scheduler, stage.cost)
        self.sender = KvSender(config.hand_over, carrier, config.incarnation)
        estimate = RecomputeEstimate(self.scheduler)
        self.receiver = KvReceiver(config.hand_over, carrier, predict=estimate.predict)
        self.hands: list[HandNow] = []
        self.stored: KvPrefetcher | None = None
        if stage.tiers is not None:
            pool, tiers = self.scheduler.memory.pool, stage.tiers(self)
            limits = KvStoreConfig()
            store = PageStore(tiers, self.memory, pool.generation, clock.now, limits, job_runner=self._hand)
            self.stored = KvPrefetcher(self.scheduler, store, clock)
        hand_over = TransferEnds(identity, self.sender, self.receiver, vocabulary=VOCAB)
        ready = ReadinessSources(pages=self.stored or NoPrefetch())
        self.mailbox = WorkerService(config, self.scheduler, hand_over, stage.hub, clock, ready=ready)
        self.loop = EngineLoop(self.mailbox, self.scheduler, MarkingRunner(self.memory, role, asked=stage.asked), clock)
        self._hub = stage.hub
        self.link = stage.hub.connect(self.endpoint)
        self.stopped = False

    def _hand(self, name: str, clock: Callable[[], float], pause_s: float) -> HandNow:
        self.hands.append(HandNow(name, clock, pause_s))
        return self.hands[-1]

    def reconnect(self, *, greet: bool = True) -> None:
        """The gateway's connection is made anew, and what waited on the old one is lost."""
        self.link.close()
        self.link = self._hub.connect(self.endpoint)
        if greet:
            self.link.send(Hello(gateway="g", incarnation=1))

    @property
    def recipient(self) -> Recipient:
        """Who is meant by what is sent here."""
        return Recipient(worker=self.name, incarnation=self.incarnation, identity=self.identity)

    @property
    def source(self) -> PageSource:
        return PageSource(worker=self.name, incarnation=self.incarnation, endpoint=self.endpoint)


class Stage:
    """Workers, a hub between them, a clock, and a gateway that writes down what it is told."""

    def __init__(
        self,
        *,
        lease_s: float = 1.0,
        hub: InMemoryHub | None = None,
        layout: KvLayout = LAYOUT,
        tiers: Callable[[StageWorker], list[KvTier]] | None = None,
        cost: StepCostModel | None = None,
        carrier: type[InMemoryConnector] = InMemoryConnector,
    ) -> None:
        self.layout = layout
        self.carrier = carrier
        self.tiers = tiers
        self.cost = cost
        self.clock = VirtualClock(100.0)
        self.hub = hub or InMemoryHub()
        self.hand_over = KvTransferConfig(lease_s=lease_s)
        self.memories: dict[WorkerId, KvMemory] = {}
        self.workers: list[StageWorker] = []
        self.tokens: list[tuple[WorkerId, TokenItem]] = []
        self.returned: list[tuple[WorkerId, RequestReturned]] = []
        self.relieve: list[tuple[WorkerId, MigrateRequests]] = []
        self.questions: list[tuple[WorkerId, RequestId, int]] = []  # what workers asked whether it is still wanted
        self.reports: dict[WorkerId, WorkerReport] = {}
        self.asked: dict[RequestId, Asked] = {}  # by clients of a router; requests of the stage itself have none

    def worker(self, name: str, role: Role, **scheduler: int) -> StageWorker:
        worker = StageWorker(self, name, role, **scheduler)
        self.workers.append(worker)
        worker.link.send(Hello(gateway="g", incarnation=1))
        return worker

    def turn(self, seconds: float = 0.001) -> bool:
        """Every worker turns its loop once, the gateway reads its mail, the clock moves.  True if anything moved."""
        moved = False
        for worker in self.workers:
            if not worker.stopped:
                moved |= worker.loop.step() or worker.mailbox.has_work
            while (received := worker.link.recv()) is not None:
                match received.message:
                    case Tokens(items=items):
                        self.tokens += [(worker.name, item) for item in items]
                        moved = True
                    case RequestReturned() as returned:
                        self.returned.append((worker.name, returned))
                        moved = True
                    case WorkerReport() as report:
                        before = self.reports.get(worker.name)
                        known = before.counters if before and before.incarnation == report.incarnation else {}
                        self.reports[worker.name] = replace(report, counters=known | report.counters)
                    case MigrateRequests() as relieve:
                        self.relieve.append((worker.name, relieve))
                    case ConfirmRequests(requests=requests):
                        self.questions += [(worker.name, *asked) for asked in requests]
                    case other:
                        raise AssertionError(f"a gateway is never told {other}")
        self.clock.advance(seconds)
        return moved

    def run(self, *, turns: int = 2000) -> None:
        """Turn until nothing moves for a while."""
        idle = 0
        for _ in range(turns):
            idle = 0 if self.turn() else idle + 1
            if idle > 5:
                return
        raise AssertionError(f"still busy after {turns} turns")

    def wait(self, seconds: float) -> None:
        """Let time pass, with everybody awake who is not stopped; the gateway goes on saying Hello."""
        for _ in range(int(seconds / 0.1)):
            for worker in self.workers:
                worker.link.send(Hello(gateway="g", incarnation=1))
            self.turn(0.1)

    def ask(
        self, prompt: Sequence[int], *, to: StageWorker, leg: RequestStage = RequestStage.WHOLE, **more: object
    ) -> Submit:
        """Submit one leg."""
        source = more.pop("pages_from", None)
        fields = {"recipient": to.recipient, "request": RequestId("r"), "epoch": 1, "emitted": ()} | {
            key: more.pop(key) for key in ("recipient", "request", "epoch", "emitted", "age_s", "joins") if key in more
        }
        submit = Submit(
            stage=leg,
            prompt=bytes(pack_token_ids(prompt)),
            sampling=SamplingParams(**{"seed": 7, "max_tokens": 8} | more),
            root=chain_root(IDENTITY),
            pages_from=source.source if isinstance(source, StageWorker) else None,
            **fields,
        )
        to.link.send(submit)
        return submit

    def ask_split(self, prompt: Sequence[int], prefill: StageWorker, decode: StageWorker, **more: object) -> Submit:
        """Submit both legs of one request, the decode leg first, as the router does."""
        self.ask(prompt, to=decode, leg=RequestStage.DECODE, pages_from=prefill, **more)
        return self.ask(prompt, to=prefill, leg=RequestStage.PREFILL, **more)

    def answer(self, request: str = "r", epoch: int = 1) -> list[int]:
        """The answer as a client would get it: by index, each once.  Asserts that everybody who spoke agreed."""
        by_index: dict[int, int] = {}
        for _, item in self.tokens:
            if item.request != request or item.epoch != epoch:
                continue
            for offset, token in enumerate(item.tokens):
                assert by_index.setdefault(item.index + offset, token) == token, "two tokens at one place"
        first = min(by_index, default=0)
        assert by_index, "nobody said anything"
        assert sorted(by_index) == list(range(first, first + len(by_index))), "a gap in the answer"
        return [by_index[index] for index in sorted(by_index)]

    def assert_idle(self) -> None:
        """Nobody holds anything."""
        self.wait(0.8)
        for worker in self.workers:
            if worker.stopped:
                continue
            load = worker.scheduler.load()
            assert load.pages_used == 0, f"{worker.name} holds {load.pages_used} pages"
            assert worker.scheduler.check_leaks().total == 0
            assert not worker.sender.open_transfers
            assert not worker.receiver.open_pulls
            assert len(worker.mailbox._requests) == 0
            assert self.reports[worker.name].kv_pages_leaked == 0


def expected(prompt_len: int, *, seed: int = 7, tokens: int = 8) -> list[int]:
    sampling = SamplingParams(seed=seed, max_tokens=tokens)
    return [null_token(sampling, prompt_len + i, vocab=VOCAB) for i in range(tokens)]


def split(layout: KvLayout = LAYOUT, **scheduler: int) -> tuple[Stage, StageWorker, StageWorker]:
    stage = Stage(layout=layout)
    return stage, stage.worker("p", Role.PREFILL, **scheduler), stage.worker("d", Role.DECODE, **scheduler)


def merged(stage: Stage, request: str) -> list[int]:
    """The answer over all epochs."""
    by_index: dict[int, int] = {}
    for _, item in stage.tokens:
        if item.request == request:
            for offset, token in enumerate(item.tokens):
                assert by_index.setdefault(item.index + offset, token) == token
    assert sorted(by_index) == list(range(len(by_index)))
    return [by_index[index] for index in sorted(by_index)]


def reasons(stage: Stage) -> dict[str, list[str]]:
    """Why which worker gave something back."""
    by_worker: dict[str, list[str]] = {}
    for name, returned in stage.returned:
        by_worker.setdefault(name, []).append(returned.reason)
    return by_worker
