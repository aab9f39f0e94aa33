"""A process that holds the keys says what none of ours would: every field of every message, at its extremes.

Nothing that it says ends another process, drives another gateway or worker out, or reaches a client.
"""

from __future__ import annotations

import asyncio
import copy
import os
import socket
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from tests.message_samples import MESSAGES

from penstock.clock import VirtualClock
from penstock.config.limits import SuperviseConfig
from penstock.config.schema import GatewayConfig
from penstock.engine.service import gateways
from penstock.engine.service.readiness import REFUSAL_REASONS
from penstock.errors import PenstockError, ProtocolError
from penstock.hashing import chain_root
from penstock.launch.channel import MAX_MESSAGE_BYTES, Channel
from penstock.launch.restart_policy import RestartPolicy, WorkerSuspected
from penstock.launch.shared_rates import SharedTokenBuckets
from penstock.router.service import RouterService
from penstock.types import (
    Grammar,
    GrammarKind,
    RequestId,
    RequestStage,
    Role,
    SamplingParams,
    TokenLogprob,
    ValidRequest,
    WorkerId,
    WorkerState,
    pack_token_ids,
)
from penstock.wire.codec import PROTOCOL_VERSION, decode_peer, encode_message
from penstock.wire.gateway_messages import (
    AdapterChanged,
    AdapterNames,
    AssignRole,
    Cancel,
    ChangeAdapter,
    ClaimIdempotencyKey,
    ConfirmRequests,
    FindTokens,
    FoundTokens,
    Hello,
    IdempotencyKeyState,
    KvEvents,
    MigrateRequests,
    OpenRequestAnswer,
    OpenRequestCounts,
    PageSource,
    PoisonRequests,
    RateDemands,
    RateTotals,
    RequestReturned,
    ReturnReason,
    SaveTokens,
    Submit,
    TokenItem,
    Tokens,
    WorkerReport,
)
from penstock.wire.in_memory import InMemoryHub, _Parcel
from penstock.wire.supervisor_messages import (
    LoadModel,
    ServiceDraining,
    SuspectWorker,
    UnloadModel,
    WorkerDown,
    WorkerRemoved,
    WorkerUp,
)
from penstock.wire.transfer_messages import (
    EncodeImage,
    FetchTicket,
    HandOverAlive,
    HandOverFailed,
    ImageAlive,
    ImageEncoded,
    PageReady,
    PagesReady,
    PagesReceived,
    PrefillDone,
    PullPages,
)

from .router_town import Town
from .worker_stage import IDENTITY, VOCAB, Stage, StageWorker, expected

EXTREMES: dict[type, tuple[object, ...]] = {
    int: (-1, 0, 1 << 20, VOCAB, 1 << 31, 1 << 53, 1 << 62, (1 << 63) - 1, -(1 << 63), (1 << 64) - 1),
    float: (-1.0, 0.0, 1e308, float("inf"), float("-inf"), float("nan")),
    str: ("", "\0", "x" * 5000, "memory://", "memory://nobody", "\N{PILE OF POO}" * 300),
    bytes: (b"", b"\0", bytes(31), bytes(33), b"\xff" * 40, bytes(200_000)),
    bool: (True, False),
}


def mutations(message: object) -> Iterator[bytes]:
    """Frames of the message with one of its values, at any depth, at an extreme; and with lists empty or long."""
    tree = msgspec.msgpack.decode(msgspec.msgpack.encode(message))
    # What stands at its default does not travel: it is named here, or it would not be changed.
    for name in message.__struct_fields__:  # type: ignore[attr-defined]
        tree.setdefault(name, msgspec.to_builtins(getattr(message, name), builtin_types=(bytes,)))
    for path, value in _leaves(tree, ()):
        if path == ("t",):
            continue
        for other in _others(value):
            changed = copy.deepcopy(tree)
            place = changed
            for step in path[:-1]:
                place = place[step]
            place[path[-1]] = other
            yield bytes((PROTOCOL_VERSION,)) + msgspec.msgpack.encode(changed)


def _leaves(value: Any, path: tuple[Any, ...]) -> Iterator[tuple[tuple[Any, ...], Any]]:
    if path:
        yield path, value
    if isinstance(value, dict):
        for name, inner in value.items():
            yield from _leaves(inner, (*path, name))
    elif isinstance(value, list | tuple):
        for index, inner in enumerate(value[:2]):
            if isinstance(value, list):
                yield from _leaves(inner, (*path, index))


def _others(value: object) -> tuple[object, ...]:
    if value is None:
        return (0, -1, "", b"", [], {})
    if isinstance(value, list | tuple):
        return ([], [*value] * 2000, None)
    if isinstance(value, dict):
        return ({}, {str(number): float("nan") for number in range(2000)}, {1 << 62: 1.0}, None)
    return (*EXTREMES[type(value)], None)


def sample(kind: type, **fields: object) -> Any:
    """The sample of this kind, about what is going on here."""
    (message,) = [one for one in MESSAGES if type(one) is kind][:1]
    known = {name: value for name, value in fields.items() if name in kind.__struct_fields__}  # type: ignore[attr-defined]
    return msgspec.structs.replace(message, **known)


# --- to a worker -----------------------------------------------------------------------------------------------------


@pytest.fixture
def stage() -> Stage:
    return Stage()


def step(stage: Stage, turns: int = 2) -> None:
    """As ``Stage.turn``, for workers that get messages which no gateway sends."""
    for _ in range(turns):
        for worker in stage.workers:
            worker.loop.step()
        stage.clock.advance(0.001)


def serves(stage: Stage, worker: StageWorker) -> None:
    """The gateway that is there has its requests served."""
    while worker.link.recv() is not None:
        pass
    stage.ask(list(range(40)), to=worker, request="after")
    for _ in range(400):
        step(stage, 1)
        while (received := worker.link.recv()) is not None:
            if isinstance(received.message, Tokens):
                stage.tokens += [(worker.name, item) for item in received.message.items]
        if any(item.request == "after" and item.finish for _, item in stage.tokens):
            break
    assert stage.answer("after") == expected(40)


TO_WORKERS = [
    Hello,
    Submit,
    Cancel,
    PullPages,
    PagesReceived,
    EncodeImage,
    AssignRole,
    PoisonRequests,
    RateDemands,
    ClaimIdempotencyKey,
    SaveTokens,
    FindTokens,
    OpenRequestCounts,
    ChangeAdapter,
    AdapterNames,
    WorkerReport,
    Tokens,
    KvEvents,
]


@pytest.mark.parametrize("kind", TO_WORKERS)
def test_a_worker_outlives_whatever_a_gateway_says(stage: Stage, kind: type) -> None:
    worker = stage.worker("both-0", Role.BOTH)
    stage.ask(list(range(30)), to=worker, request="r", max_tokens=200)
    step(stage, 3)
    other = stage.hub.connect(worker.endpoint)
    other.send(Hello(gateway="other", incarnation=1, host="another"))
    plain = {
        "prompt": bytes(pack_token_ids((1, 2, 3))),
        "stage": RequestStage.WHOLE,
        "pages_from": None,
        "images": (),
        "pictures": (),
        "block_hashes": (),
        "recipient": worker.recipient,
    }
    message = sample(kind, request=RequestId("hostile"), **plain)
    for number, frame in enumerate(mutations(message)):
        other.send_raw(frame)  # type: ignore[attr-defined]
        step(stage, 1)
        if number % 16 == 0:
            worker.link.send(Hello(gateway="g", incarnation=1))
            other.send(Cancel(request=RequestId("hostile"), epoch=(1 << 53) - 1))
            other.send(AssignRole(role=Role.BOTH))
    while other.recv() is not None:
        pass
    worker.link.send(AssignRole(duty="serve"))  # type: ignore[arg-type]
    step(stage, 5)
    serves(stage, worker)


TO_RECEIVERS = [
    PageReady,
    PagesReady,
    FetchTicket,
    PrefillDone,
    HandOverAlive,
    HandOverFailed,
    ImageAlive,
    ImageEncoded,
]


@pytest.mark.parametrize("kind", TO_RECEIVERS)
def test_a_worker_outlives_whatever_another_worker_says(stage: Stage, kind: type) -> None:
    worker = stage.worker("decode-0", Role.DECODE)
    sender = stage.hub.listen("memory://hostile")
    source = PageSource(worker=WorkerId("prefill-9"), incarnation=1, endpoint="memory://hostile")
    for number, frame in enumerate(mutations(sample(kind, request=RequestId("r"), epoch=1))):
        request = RequestId(f"r{number}")
        worker.link.send(
            Submit(
                recipient=worker.recipient,
                request=request,
                epoch=1,
                stage=RequestStage.DECODE,
                prompt=bytes(pack_token_ids(range(20))),
                pages_from=source,
                sampling=SamplingParams(seed=1, max_tokens=4),
                root=chain_root(IDENTITY),
            )
        )
        step(stage, 2)
        peer = b""
        while (received := sender.recv()) is not None:
            peer = received.peer
        named = frame.replace(b"\xa7request\xa1r", b"\xa7request" + msgspec.msgpack.encode(request))
        stage.hub.to_link(peer, _Parcel(b"", named, b"x" * 64))
        step(stage, 1)
        worker.link.send(Cancel(request=request, epoch=1))
        step(stage, 1)
        worker.link.send(Hello(gateway="g", incarnation=1))
    serves(stage, worker)


@pytest.mark.parametrize(
    "fields",
    [
        {"prompt": bytes(pack_token_ids((5, VOCAB)))}, {"prompt": b"\xff" * 4},
        {"emitted": (VOCAB,)}, {"emitted": (-1,)},
        {"block_hashes": (bytes(32),) * 9},
        {"sampling": SamplingParams(seed=1, max_tokens=4, logit_bias={VOCAB: 1.0})},
        {"sampling": SamplingParams(seed=1, max_tokens=4, stop_token_ids=(1 << 31,))},
        {"sampling": SamplingParams(seed=1, max_tokens=4, banned=(VOCAB,))},
        {"sampling": SamplingParams(seed=1, max_tokens=4, banned_first=(VOCAB,))},
        {"sampling": SamplingParams(seed=1, max_tokens=4, logprobs=VOCAB + 1)},
    ],
    ids=str,
)  # fmt: skip
def test_what_the_model_cannot_compute_is_given_back(stage: Stage, fields: dict[str, Any]) -> None:
    worker = stage.worker("both-0", Role.BOTH)
    plain = Submit(
        recipient=worker.recipient, request=RequestId("r"), epoch=1, stage=RequestStage.WHOLE,
        prompt=bytes(pack_token_ids((1, 2, 3))),
        sampling=SamplingParams(seed=1, max_tokens=4), root=chain_root(IDENTITY),
    )  # fmt: skip
    worker.link.send(msgspec.structs.replace(plain, **fields))
    stage.run()
    assert [(returned.request, returned.reason.split(":")[0]) for _, returned in stage.returned] == [("r", "unfit")]
    serves(stage, worker)


@pytest.mark.parametrize("connection", [0, 1 << 40])
@pytest.mark.parametrize("incarnation", [1, 2, 1 << 61])
def test_nobody_drives_a_gateway_out_that_is_there(stage: Stage, incarnation: int, connection: int) -> None:
    worker = stage.worker("both-0", Role.BOTH)
    stage.ask(list(range(30)), to=worker, request="r", max_tokens=60)
    step(stage, 5)
    other = stage.hub.connect(worker.endpoint)
    for _ in range(200):
        other.send(Hello(gateway="g", incarnation=incarnation, connection=connection))
        other.send(Cancel(request=RequestId("r"), epoch=1))
        worker.link.send(Hello(gateway="g", incarnation=1))
        stage.turn(0.01)
    assert stage.answer("r") == expected(30, tokens=60)
    assert stage.returned == []
    assert not any(isinstance(received.message, Tokens) for received in iter(other.recv, None))


@pytest.mark.parametrize("name", ["g", "one too many"])
def test_a_gateway_that_is_not_let_in_is_sent_nothing(stage: Stage, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """However often it asks for all that is cached."""
    monkeypatch.setattr(gateways, "MAX_GATEWAYS", 1)
    worker = stage.worker("both-0", Role.BOTH)
    stage.ask(list(range(40)), to=worker, request="r")
    stage.run()
    other = stage.hub.connect(worker.endpoint)
    for _ in range(50):
        other.send(Hello(gateway=name, incarnation=1, kv_snapshot=True))
        worker.link.send(Hello(gateway="g", incarnation=1))
        stage.turn(0.01)
    heard = [received.message for received in iter(other.recv, None)]
    assert all(isinstance(message, ConfirmRequests) and not message.requests for message in heard), "is it there?"
    assert not worker.mailbox.publisher.is_sending_snapshot
    serves(stage, worker)


def test_no_gateway_takes_anothers_request(stage: Stage) -> None:
    worker = stage.worker("both-0", Role.BOTH)
    submit = stage.ask(list(range(30)), to=worker, request="r", max_tokens=60)
    step(stage, 5)
    other = stage.hub.connect(worker.endpoint)
    other.send(Hello(gateway="h", incarnation=1))
    other.send(msgspec.structs.replace(submit, epoch=2, sampling=SamplingParams(seed=8, max_tokens=1)))
    for _ in range(200):
        worker.link.send(Hello(gateway="g", incarnation=1))
        stage.turn(0.01)
    assert stage.answer("r") == expected(30, tokens=60)
    assert not any(isinstance(received.message, Tokens) for received in iter(other.recv, None))


def test_a_stranger_gives_no_orders(stage: Stage) -> None:
    worker = stage.worker("both-0", Role.BOTH)
    step(stage, 2)
    stage.hub.connect(worker.endpoint).send(AssignRole(duty="restart"))  # type: ignore[arg-type]
    step(stage, 5)
    assert not worker.mailbox.lifecycle.draining
    serves(stage, worker)


# --- to a gateway ----------------------------------------------------------------------------------------------------


class Fake:
    """A gateway's router with one worker that the test plays, and one of ours."""

    def __init__(self) -> None:
        self.hub, self.clock = InMemoryHub(), VirtualClock(10.0)
        self.mailbox = self.hub.listen("memory://fake")
        config = GatewayConfig(name="g", model_name="m", vocabulary=VOCAB)
        self.suspects: list[str] = []
        self.router = RouterService(
            config,
            connect=self.hub.connect_async,
            clock=self.clock,
            suspect=lambda s: self.suspects.append(s.reason),
            rates=SharedTokenBuckets(4),
        )
        self.worker = WorkerId("both-0")
        self.peer = b""
        self.wrong: list[int] = []  # tokens that clients were told and that the model does not have

    def ask(self, number: int) -> asyncio.Task[None]:
        """A client, always of the same request."""
        request = ValidRequest(
            id=RequestId("r"), prompt=pack_token_ids(range(8)), block_hashes=(), arrival=self.clock.now(),
            sampling=SamplingParams(seed=number, max_tokens=8, logprobs=1, prompt_logprobs=0),
        )  # fmt: skip

        async def read() -> None:
            try:
                async for batch in self.router.stream(request):
                    told = [*(batch.logprobs or ()), *(batch.prompt_logprobs or ())]
                    tokens = [*batch.tokens, *(t for one in told for t in (one.token, *(at for at, _ in one.top)))]
                    self.wrong += [token for token in tokens if not 0 <= token < VOCAB]
            except PenstockError:
                return

        return asyncio.get_running_loop().create_task(read())

    async def begin(self) -> None:
        up = WorkerUp(worker=self.worker, incarnation=1, role=Role.BOTH, pid=1, endpoint="memory://fake")
        self.router.on_supervisor(up)
        await self.turn()
        self.say(self.report())
        await self.turn()

    def report(self) -> WorkerReport:
        return WorkerReport(
            worker=self.worker, incarnation=1, role=Role.BOTH, state=WorkerState.READY, pid=1, identity=IDENTITY,
            max_model_len=4096, kv_pages_free=100, steps=1, gateway_hosts=2,
        )  # fmt: skip

    def say(self, message: object) -> None:
        self.raw(encode_message(message))  # type: ignore[arg-type]

    def raw(self, frame: bytes) -> None:
        self.hub.to_link(self.peer, _Parcel(b"", frame, None))

    async def turn(self) -> list[object]:
        heard: list[object] = []
        for _ in range(6):
            await asyncio.sleep(0)
        while (received := self.mailbox.recv()) is not None:
            self.peer = received.peer
            heard.append(received.message)
        return heard


FROM_WORKERS = [
    Tokens,
    RateTotals,
    IdempotencyKeyState,
    FoundTokens,
    OpenRequestAnswer,
    AdapterChanged,
    AdapterNames,
    RequestReturned,
    WorkerReport,
    KvEvents,
    MigrateRequests,
    ConfirmRequests,
    PoisonRequests,
    HandOverFailed,
    PageReady,
]


@pytest.mark.parametrize("kind", FROM_WORKERS)
async def test_a_gateway_outlives_whatever_a_worker_says(kind: type, caplog: pytest.LogCaptureFixture) -> None:
    fake = Fake()
    await fake.begin()
    fields = {"worker": fake.worker, "incarnation": 1, "identity": IDENTITY, "request": RequestId("r")}
    message = sample(kind, **fields)
    if kind is WorkerReport:
        message = msgspec.structs.replace(message, role=Role.BOTH, max_model_len=4096, cached=(sample(KvEvents),))
    if kind is Tokens:
        message = Tokens(worker=fake.worker, incarnation=1, items=(TokenItem(
            request=RequestId("r"), epoch=1, index=0, tokens=(1,), queued_s=0.5, cached_tokens=2,
            logprobs=(TokenLogprob(1, -0.5, ((1, -0.5),)),), prompt_logprobs=(TokenLogprob(1, -0.5),),
        ),))  # fmt: skip
    client = fake.ask(1)
    for number, frame in enumerate(mutations(message)):
        await fake.turn()
        if client.done():
            client = fake.ask(number + 2)
            await fake.turn()
        fake.raw(frame)
        await fake.turn()
        fake.clock.advance(0.05)
        fake.router.tick()
        fake.router.workers()
        if number % 8 == 0:
            fake.router.metrics.exposition()
            fake.say(fake.report())
    unexpected = [record.getMessage() for record in caplog.records if record.exc_info]
    assert unexpected == []
    assert fake.wrong == []
    client.cancel()
    await asyncio.gather(client, return_exceptions=True)
    await fake.router.close()


FROM_SUPERVISORS = [WorkerUp, WorkerDown, WorkerRemoved, ServiceDraining, SuspectWorker, LoadModel, UnloadModel]


@pytest.mark.parametrize("kind", FROM_SUPERVISORS)
async def test_what_comes_over_the_supervisors_channel_is_taken_or_refused(kind: type) -> None:
    """At both ends: by a gateway's router, and by what decides about restarts."""
    fake, ours, theirs = Fake(), *Channel.pair()
    await fake.begin()
    restarts = RestartPolicy.of(SuperviseConfig())
    restarts.add_workers(["both-0"])
    for frame in mutations(sample(kind, worker=fake.worker)):
        with socket.socket(fileno=os.dup(theirs.fileno())) as raw:
            raw.send(frame[:MAX_MESSAGE_BYTES])
        try:
            message = ours.receive()
        except ProtocolError:
            continue
        assert message is not None
        fake.router.on_supervisor(message)
        if isinstance(message, SuspectWorker):
            restarts.handle(WorkerSuspected(message.worker, message.incarnation, message.reason), 1.0)
        fake.clock.advance(0.05)
        fake.router.tick()
    await fake.router.close()
    ours.close()
    theirs.close()


def bad_items() -> list[TokenItem]:
    plain = TokenItem(request=RequestId("r"), epoch=1, index=0, tokens=(1,))
    return [
        msgspec.structs.replace(plain, tokens=(VOCAB,)),
        msgspec.structs.replace(plain, tokens=(1, (1 << 32) - 1)),
        msgspec.structs.replace(plain, index=9),
        msgspec.structs.replace(plain, tokens=(1,) * 20),
        msgspec.structs.replace(plain, cached_tokens=1 << 40),
        msgspec.structs.replace(plain, logprobs=(TokenLogprob(VOCAB, -1.0),)),
        msgspec.structs.replace(plain, logprobs=(TokenLogprob(1, -1.0, ((1 << 20, -1.0),)),)),
        msgspec.structs.replace(plain, logprobs=()),
        msgspec.structs.replace(plain, pooled=bytes(4)),
    ]


def said(item: TokenItem) -> Tokens:
    return Tokens(worker=WorkerId("both-0"), incarnation=1, items=(item,))


def minus_one() -> bytes:
    frame = encode_message(
        Tokens(
            worker=WorkerId("both-0"),
            incarnation=1,
            items=(TokenItem(request=RequestId("r"), epoch=1, index=0, tokens=(77,)),),
        )
    )
    assert frame.count(b"\x91\x4d") == 1
    return frame.replace(b"\x91\x4d", b"\x91\xff")


@pytest.mark.parametrize("number", range(len(bad_items()) + 1))
async def test_a_worker_that_says_what_cannot_be_loses_its_work_and_clients_do_not_see_it(number: int) -> None:
    config = GatewayConfig(name="g", model_name="null", vocabulary=VOCAB)
    async with Town("both-0", config=config) as town:
        stop = town.worker("both-0")
        town.stop("both-0")
        client = town.ask("r")
        await town.turn()
        peer = next(iter(town.stage.hub._links))
        frame = minus_one() if number == len(bad_items()) else encode_message(said(bad_items()[number]))
        town.stage.hub.to_link(peer, _Parcel(b"", frame, None))
        await town.turn()
        await town.turn(0.3)
        assert len(town.suspects) == 1, town.suspects
        assert client.tokens == []
        town.wake("both-0")
        await town.finish(turns=6000)
        client.assert_true_answer()
        assert stop is town.worker("both-0")


@pytest.mark.parametrize("logprobs", [None, 0])
async def test_an_answer_that_has_begun_well_is_looked_at_all_the_same(logprobs: int | None) -> None:
    """It becomes no longer than was asked for, and nothing of it lacks its log-probabilities."""
    async with Town("both-0", config=GatewayConfig(name="g", model_name="null", vocabulary=VOCAB)) as town:
        town.stop("both-0")
        client = town.ask("r", max_tokens=8, logprobs=logprobs)
        await town.turn()
        peer = next(iter(town.stage.hub._links))
        for index in range(20):
            told = (TokenLogprob(1, -1.0),) if logprobs is not None and not index else None
            item = TokenItem(request=RequestId("r"), epoch=1, index=index, tokens=(1,), logprobs=told)
            town.stage.hub.to_link(peer, _Parcel(b"", encode_message(said(item)), None))
            await town.settle()
        assert len(client.tokens) == (8 if logprobs is None else 1)
        assert all(batch.logprobs is not None for batch in client.batches) or logprobs is None
        assert {suspect.worker for suspect in town.suspects} == {"both-0"}


async def test_a_worker_that_gives_everything_back_costs_requests_nothing() -> None:
    """Others are asked next, and it is soon out of routing."""
    async with Town("both-0", "both-1") as town:
        first = town.worker("both-0").mailbox
        first._config = msgspec.structs.replace(first._config, vocabulary=1)  # every prompt is unfit for it
        clients = [town.ask(f"r{number}", prompt=4 + number, max_tokens=2) for number in range(40)]
        await town.finish()
        for client in clients:
            client.assert_true_answer()
        assert sum(suspect.worker == "both-0" for suspect in town.suspects) >= 1
        assert {suspect.worker for suspect in town.suspects} == {"both-0"}


async def test_requests_whose_grammars_cannot_be_followed_drive_no_worker_out() -> None:
    async with Town("both-0") as town:
        grammar = Grammar(kind=GrammarKind.REGEX, text="a+")
        for number in range(4):  # each is submitted several times
            client = town.ask(f"r{number}", prompt=4, grammar=grammar)
            await town.finish(client, turns=9000)
            assert client.error is not None
        assert town.suspects == []
        detailed = [reason for reason in REFUSAL_REASONS.values() if "{}" in reason]
        assert all(ReturnReason.from_text(reason.format("x")).concerns_request for reason in detailed)


def test_every_kind_of_message_is_tried() -> None:
    peers = {type(message) for message in MESSAGES if _is_of_peers(message)}
    assert {*TO_WORKERS, *TO_RECEIVERS, *FROM_WORKERS} >= peers
    assert {*TO_WORKERS, *TO_RECEIVERS, *FROM_WORKERS, *FROM_SUPERVISORS} >= {type(message) for message in MESSAGES}


def _is_of_peers(message: Any) -> bool:
    try:
        decode_peer(encode_message(message))
    except PenstockError:
        return False
    return True
