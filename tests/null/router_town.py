"""A whole system without a model, in one event loop and under one clock that is turned by hand.

The router's real service in front of real workers (``worker_stage``), joined by the in-memory transport; the test
plays the supervisor.  Nothing sleeps: a turn lets every worker make one step and then lets every task run until none
has anything to do.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from penstock.config.schema import GatewayConfig
from penstock.engine.runner.null_runner import null_token
from penstock.errors import PenstockError
from penstock.hashing import block_hashes, chain_root
from penstock.kv.page_memory import KvLayout
from penstock.router.service import RouterService
from penstock.telemetry.spans import NoTracer, Tracer
from penstock.types import (
    FinishReason,
    ModelIdentity,
    RequestId,
    Role,
    SamplingParams,
    TokenBatch,
    ValidRequest,
    WorkerId,
    WorkerState,
    pack_token_ids,
    read_token_ids,
)
from penstock.wire.in_memory import InMemoryHub
from penstock.wire.supervisor_messages import ServiceDraining, SuspectWorker, WorkerDown, WorkerUp

from .worker_stage import IDENTITY, LAYOUT, VOCAB, Stage, StageWorker

TURN_S = 0.001

SPLIT = ("prefill-0", "decode-0")
WIDE = ("prefill-0", "prefill-1", "decode-0", "decode-1")
WHOLE = ("both-0",)


@dataclass
class Client:
    """Somebody who asked: what came, and the task that reads it."""

    request: ValidRequest
    batches: list[TokenBatch] = field(default_factory=list)
    error: PenstockError | None = None
    task: asyncio.Task[None] | None = None

    @property
    def tokens(self) -> list[int]:
        return [token for batch in self.batches for token in batch.tokens]

    @property
    def finish(self) -> FinishReason | None:
        return self.batches[-1].finish if self.batches else None

    @property
    def over(self) -> bool:
        return self.task is not None and self.task.done()

    def truth(self) -> list[int]:
        """The answer, had nothing ever gone wrong."""
        sampling, known = self.request.sampling, len(self.request.prompt)
        tokens: list[int] = []
        for index in range(sampling.max_tokens):
            tokens.append(null_token(sampling, known + index, vocab=VOCAB, drawn=index))
            if tokens[-1] in sampling.stop_token_ids:
                break
        return tokens

    def assert_true_answer(self) -> None:
        assert self.error is None
        assert self.tokens == self.truth()
        assert [batch.finish is not None for batch in self.batches].count(True) == 1
        assert self.finish is not None


class Town:
    """Workers that can be forked, killed and stopped; a router; clients."""

    def __init__(
        self,
        *names: str,
        config: GatewayConfig | None = None,
        lease_s: float = 1.0,
        hub: InMemoryHub | None = None,
        layout: KvLayout = LAYOUT,
        tracer: Tracer | None = None,
        **scheduler: int,
    ) -> None:
        self.stage = Stage(lease_s=lease_s, hub=hub, layout=layout)
        self.clock = self.stage.clock
        self.suspects: list[SuspectWorker] = []
        self.router = RouterService(
            config or GatewayConfig(name="g", model_name="null"),
            connect=self.stage.hub.connect_async,
            clock=self.clock,
            suspect=self.suspects.append,
            tracer=tracer or NoTracer(),
        )
        self.clients: list[Client] = []
        self._scheduler = scheduler
        self._incarnations: dict[str, int] = {}
        self._alive: dict[str, StageWorker] = {}
        self._names = names

    async def __aenter__(self) -> Town:
        for name in self._names:
            self.fork(name)
        await self.turn()
        return self

    async def __aexit__(self, *_: object) -> None:
        for client in self.clients:
            if client.task is not None:
                client.task.cancel()
        await asyncio.gather(*(client.task for client in self.clients if client.task), return_exceptions=True)
        await self.router.close()

    # --- the supervisor's part --------------------------------------------------------------------------------------

    def fork(
        self, name: str, identity: ModelIdentity = IDENTITY, predecessor_fault: str = "", **scheduler: int
    ) -> StageWorker:
        """Start a worker, as the next incarnation of its name; its role is in the name."""
        incarnation = self._incarnations[name] = self._incarnations.get(name, 0) + 1
        role = Role(name.split("-", maxsplit=1)[0])
        worker = StageWorker(
            self.stage,
            name,
            role,
            incarnation=incarnation,
            identity=identity,
            predecessor_fault=predecessor_fault,
            **(self._scheduler | scheduler),
        )
        worker.link.close()
        self._alive[name] = worker
        self.stage.workers.append(worker)
        self.router.on_supervisor(
            WorkerUp(
                worker=WorkerId(name), incarnation=incarnation, role=role, pid=incarnation, endpoint=worker.endpoint
            )
        )
        return worker

    def kill(self, name: str, state: WorkerState = WorkerState.DEAD, *, fault: bool = False) -> None:
        """End a worker at once; the router is told, as by a pidfd.  ``fault``: it died of what it did."""
        worker = self._alive.pop(name)
        self.stage.workers.remove(worker)
        worker.mailbox._listener.close()
        self.router.on_supervisor(
            WorkerDown(worker=WorkerId(name), incarnation=worker.incarnation, state=state, reason="killed", fault=fault)
        )

    def stop(self, name: str) -> None:
        """As SIGSTOP: it does nothing more, and nobody is told."""
        self._alive[name].stopped = True

    def wake(self, name: str) -> None:
        """As SIGCONT."""
        self._alive[name].stopped = False

    async def tell(self, name: str, **order: object) -> dict:
        """An operator's word, and the worker's row after it."""
        task = asyncio.get_running_loop().create_task(self.router.admin.assign(name, **order))
        await self.until(task.done, turns=500)
        return task.result()

    async def retire(self, name: str) -> None:
        """As SIGTERM: it hands over what it writes, says its last words, and ends."""
        worker = self._alive[name]
        worker.mailbox.begin_shutdown()
        await self.until(lambda: worker.mailbox.lifecycle.is_over(self.clock.now()))
        worker.mailbox.return_all()
        await self.turn()
        self.kill(name)

    def drain(self) -> None:
        self.router.on_supervisor(ServiceDraining())

    def worker(self, name: str) -> StageWorker:
        return self._alive[name]

    @property
    def alive(self) -> list[str]:
        return sorted(self._alive)

    # --- the clients' part ------------------------------------------------------------------------------------------

    def ask(
        self, name: str = "r", *, prompt: int | tuple[int, ...] = 40, open_ended: bool = False, **sampling: object
    ) -> Client:
        """A client asks; ``prompt`` is its tokens, or how many of them."""
        tokens = tuple(range(prompt)) if isinstance(prompt, int) else prompt
        params: dict[str, object] = {"seed": 7, "max_tokens": 8} | sampling
        request = ValidRequest(
            id=RequestId(name),
            prompt=pack_token_ids(tokens),
            block_hashes=tuple(block_hashes(chain_root(IDENTITY), tokens)),
            sampling=SamplingParams(**params),
            arrival=self.clock.now(),
            open_ended=open_ended,
        )
        return self.serve(request)

    def serve(self, request: ValidRequest) -> Client:
        """A client asks for this very thing."""
        return self.serve_by(self.router, request)

    def serve_by(self, router: RouterService, request: ValidRequest) -> Client:
        """A client asks this gateway for it."""
        client = Client(request)
        self.stage.asked[request.id] = (tuple(read_token_ids(bytes(request.prompt))), request.sampling)
        client.task = asyncio.get_running_loop().create_task(self._read(router, client))
        self.clients.append(client)
        return client

    async def _read(self, router: RouterService, client: Client) -> None:
        stream = router.stream(client.request)
        try:
            async for batch in stream:
                client.batches.append(batch)
        except PenstockError as error:
            client.error = error
        finally:
            await stream.aclose()

    async def leave(self, client: Client) -> None:
        """The client goes away."""
        assert client.task is not None
        client.task.cancel()
        await asyncio.gather(client.task, return_exceptions=True)

    # --- time -------------------------------------------------------------------------------------------------------

    async def settle(self) -> None:
        """Let every task run until it waits."""
        for _ in range(8):
            await asyncio.sleep(0)

    async def turn(self, seconds: float = TURN_S) -> None:
        """Every worker that is awake turns its loop once, everybody reads its mail, the clock moves."""
        await self.settle()
        for worker in list(self.stage.workers):
            if not worker.stopped:
                worker.loop.step()
        await self.settle()
        self.clock.advance(seconds)
        self.router.tick()
        await self.settle()

    async def until(self, condition, *, turns: int = 3000, seconds: float = TURN_S) -> None:
        """Turn until something is so."""
        for _ in range(turns):
            if condition():
                return
            await self.turn(seconds)
        raise AssertionError(f"not so after {turns} turns of {seconds} s")

    async def finish(self, *clients: Client, turns: int = 3000) -> None:
        """Turn until these clients (or all) have their answers."""
        waited = clients or tuple(self.clients)
        await self.until(lambda: all(client.over for client in waited), turns=turns)

    async def wait(self, seconds: float, *, step: float = 0.05) -> None:
        """Let time pass."""
        for _ in range(round(seconds / step)):
            await self.turn(step)

    def held(self) -> list[str]:
        """What workers that are awake still hold, in words; empty when nothing."""
        found = []
        for worker in self.stage.workers:
            pages, leaked = worker.scheduler.load().pages_used, worker.scheduler.check_leaks().total
            legs, pulls = worker.sender.open_transfers, worker.receiver.open_pulls
            if not worker.stopped and (pages or leaked or legs or pulls or len(worker.mailbox._requests)):
                found.append(f"{worker.name}: {pages} pages, {leaked} leaked, {legs} legs, {pulls} pulls")
        return found

    async def assert_idle(self, *, within: float = 1.0) -> None:
        """Within so many seconds nobody holds anything, and the router's book is empty."""
        await self.until(lambda: not self.held(), turns=round(within / 0.02), seconds=0.02)
        assert not self.router.fleet.has_work()
        await self.wait(0.3)  # the next reports
        assert all(load == 0 for load in self.router.fleet.load)


def rows(town: Town) -> dict[str, str]:
    """Each worker's state."""
    return {row["id"]: row["state"] for row in town.router.workers()}
