"""The endpoint picker protocol over real gRPC: what a proxy is answered, whatever it sends."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager

import grpc
import pytest
from envoy.service.ext_proc.v3 import external_processor_pb2 as messages
from google.protobuf import struct_pb2
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.config.limits import PickerLimits
from penstock.interfaces import IDEMPOTENCY_KEY
from penstock.launch.picker import ext_proc
from penstock.launch.picker.choice import GatewayRanking, affinity_key
from penstock.launch.picker.ext_proc import DESTINATION, METHOD, SERVICE, SUBSET, EndpointPicker
from penstock.telemetry.registry import PickerMetrics

GATEWAYS = [f"10.0.0.{number}:8000" for number in range(1, 6)]
LIMITS = PickerLimits(first_message_s=0.2, max_message_bytes=1 << 20)
KEYED = {"idempotency-key": b"k-1"}
PATIENCE_S = 20.0


class World:
    """A picker behind a server of its own, and a proxy's channel to it."""

    def __init__(self, channel: grpc.aio.Channel, limits: PickerLimits) -> None:
        self.ranking = GatewayRanking(GATEWAYS)
        self.metrics = PickerMetrics()
        self.picker = EndpointPicker(lambda: self.ranking, limits, self.metrics)
        self._process = channel.stream_stream(f"/{SERVICE}/{METHOD}")

    async def send(self, *sent: messages.ProcessingRequest | bytes) -> list[messages.ProcessingResponse]:
        """All replies to one stream.  Raises grpc.aio.AioRpcError."""
        call = self._process()
        for message in sent:
            await call.write(message if isinstance(message, bytes) else message.SerializeToString())
        await call.done_writing()
        return [messages.ProcessingResponse.FromString(raw) async for raw in call]

    def open(self) -> grpc.aio.StreamStreamCall:
        return self._process()

    def count(self, name: str, **labels: str) -> float:
        return self.metrics.registry.get_sample_value(f"penstock:{name}", labels) or 0.0


@asynccontextmanager
async def world(limits: PickerLimits = LIMITS) -> AsyncIterator[World]:
    server = grpc.server(ThreadPoolExecutor(8), maximum_concurrent_rpcs=limits.max_streams)
    port = server.add_insecure_port("127.0.0.1:0")
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        made = World(channel, limits)
        server.add_generic_rpc_handlers((made.picker.handler(),))
        server.start()
        try:
            yield made
        finally:
            await asyncio.to_thread(server.stop(0).wait)


def of_headers(
    headers: Iterable[tuple[str, bytes]], subset: struct_pb2.Value | None = None
) -> messages.ProcessingRequest:
    message = messages.ProcessingRequest()
    message.request_headers.SetInParent()
    for name, value in headers:
        message.request_headers.headers.headers.add(key=name, raw_value=value)
    if subset is not None:
        message.metadata_context.filter_metadata["envoy.lb.subset_hint"].fields[SUBSET].CopyFrom(subset)
    return message


def endpoints(reply: messages.ProcessingResponse) -> list[str]:
    """Those of the header; the same are in the metadata."""
    (option,) = reply.request_headers.response.header_mutation.set_headers
    assert option.header.key == DESTINATION
    assert option.append_action == option.OVERWRITE_IF_EXISTS_OR_ADD, "a client's own header does not count"
    text = option.header.raw_value.decode()
    assert reply.dynamic_metadata["envoy.lb"][DESTINATION] == text
    assert reply.request_headers.response.clear_route_cache
    return text.split(",")


async def test_a_key_meets_the_gateway_of_its_order_and_the_next_ones_are_named() -> None:
    wanted = GatewayRanking(GATEWAYS).by_key(affinity_key({IDEMPOTENCY_KEY: b"k-1"}).value, 3)
    async with world() as at:
        for more in ({}, {":path": b"/v1/models"}, {DESTINATION: b"10.6.6.6:1"}, {"session_id": b"s"}):
            (reply,) = await at.send(of_headers({**KEYED, **more}.items()))
            assert endpoints(reply) == list(wanted)
        at.ranking = GatewayRanking(set(GATEWAYS) - {wanted[0]})
        (reply,) = await at.send(of_headers(KEYED.items()))
        assert endpoints(reply)[:2] == list(wanted[1:])
        assert at.count("picker_requests_total", outcome="idempotency_key") == 5


async def test_the_first_header_of_a_name_counts_as_in_gateways() -> None:
    async with world() as at:
        (alone,) = await at.send(of_headers([("idempotency-key", b"a")]))
        (twice,) = await at.send(of_headers([("idempotency-key", b"a"), ("idempotency-key", b"b")]))
        assert endpoints(alone) == endpoints(twice)


async def test_a_value_that_older_proxies_send_as_text_counts() -> None:
    message = messages.ProcessingRequest()
    message.request_headers.headers.headers.add(key="idempotency-key", value="k-1")
    async with world() as at:
        (text,), (raw,) = await at.send(message), await at.send(of_headers(KEYED.items()))
        assert endpoints(text) == endpoints(raw)


async def test_requests_without_a_key_are_spread_over_all_gateways() -> None:
    async with world() as at:
        found = [endpoints((await at.send(of_headers([(":path", b"/v1/models")])))[0]) for _ in range(10)]
        firsts = [each[0] for each in found]
        assert sorted(firsts) == sorted(GATEWAYS * 2)
        assert firsts[:5] == firsts[5:]
        assert at.count("picker_requests_total", outcome="none") == 10


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (b"/v1/chat/completions?x=1", {"error": {"type": "server_error", "code": "service_unavailable"}}),
        (b"/v1/messages", {"type": "error", "error": {"type": "overloaded_error"}}),
    ],
)
async def test_without_a_gateway_the_request_is_answered_503_as_its_api_does(path: bytes, body: object) -> None:
    async with world() as at:
        at.ranking = GatewayRanking(())
        (reply,) = await at.send(of_headers([(":path", path)]))
        answer = reply.immediate_response
        assert (answer.status.code, answer.details) == (503, "no_gateway")
        headers = {option.header.key: option.header.raw_value for option in answer.headers.set_headers}
        assert headers == {"content-type": b"application/json", "retry-after": b"1"}
        told = json.loads(answer.body)
        assert contains(told, body)
        assert "No gateway of this service can serve now." in told["error"]["message"]
        assert not reply.HasField("dynamic_metadata")
        assert at.count("picker_requests_total", outcome="no_gateway") == 1


def contains(whole: object, part: object) -> bool:
    if isinstance(part, dict):
        return isinstance(whole, dict) and all(contains(whole.get(name), value) for name, value in part.items())
    return whole == part


# --- subsets ----------------------------------------------------------------------------------------------------------


def listed(*texts: str) -> struct_pb2.Value:
    return struct_pb2.Value(
        list_value=struct_pb2.ListValue(values=[struct_pb2.Value(string_value=text) for text in texts])
    )


@pytest.mark.parametrize(
    ("subset", "among"),
    [
        (listed(GATEWAYS[1], GATEWAYS[3]), [GATEWAYS[1], GATEWAYS[3]]),
        (listed(f"{GATEWAYS[1]}, {GATEWAYS[3]}", "10.9.9.9:1"), [GATEWAYS[1], GATEWAYS[3]]),
        (struct_pb2.Value(string_value=f"{GATEWAYS[2]},"), [GATEWAYS[2]]),
        (listed("10.9.9.9:1"), []),
        (listed(), []),
        (struct_pb2.Value(number_value=1.0), []),
        (struct_pb2.Value(null_value=struct_pb2.NULL_VALUE), []),
    ],
)
async def test_a_proxy_may_allow_some_gateways_only(subset: struct_pb2.Value, among: Sequence[str]) -> None:
    async with world() as at:
        (reply,) = await at.send(of_headers(KEYED.items(), subset))
        if among:
            order = GatewayRanking(GATEWAYS).by_key(affinity_key({IDEMPOTENCY_KEY: b"k-1"}).value, 9)
            assert endpoints(reply) == [endpoint for endpoint in order if endpoint in among]
        else:
            assert reply.immediate_response.status.code == 503
            assert b"among those that the proxy allows" in reply.immediate_response.body


# --- what else a proxy may send ---------------------------------------------------------------------------------------


def body(kind: str, content: bytes, *, last: bool) -> messages.ProcessingRequest:
    message = messages.ProcessingRequest()
    getattr(message, kind).body = content
    getattr(message, kind).end_of_stream = last
    return message


@pytest.mark.parametrize("mode", [None, 4])
async def test_streamed_bodies_are_returned_unchanged(mode: int | None) -> None:
    first = of_headers(KEYED.items())
    if mode is not None:
        first.protocol_config.request_body_mode = first.protocol_config.response_body_mode = mode
    headers = messages.ProcessingRequest()
    headers.response_headers.SetInParent()
    trailers = messages.ProcessingRequest()
    trailers.response_trailers.SetInParent()
    async with world() as at:
        found = await at.send(
            first,
            body("request_body", b"ab", last=False),
            body("request_body", b"", last=True),
            headers,
            body("response_body", b"\x00\xff", last=True),
            trailers,
        )
    kinds = [reply.WhichOneof("response") for reply in found]
    assert kinds == [
        *("request_headers", "request_body", "request_body", "response_headers", "response_body", "response_trailers")
    ]
    pieces = [getattr(found[at], kinds[at]).response.body_mutation.streamed_response for at in (1, 2, 4)]
    assert [(piece.body, piece.end_of_stream) for piece in pieces] == [(b"ab", False), (b"", True), (b"\x00\xff", True)]


async def test_buffered_bodies_are_left_alone() -> None:
    first = of_headers(KEYED.items())
    first.protocol_config.request_body_mode = 2
    async with world() as at:
        _, reply = await at.send(first, body("request_body", b"ab", last=True))
    assert reply.WhichOneof("response") == "request_body"
    assert not reply.request_body.response.HasField("body_mutation")


async def test_a_proxy_that_only_observes_is_answered_nothing() -> None:
    message = of_headers(KEYED.items())
    message.observability_mode = True
    async with world() as at:
        assert await at.send(message) == []


@pytest.mark.parametrize(
    ("sent", "code", "because"),
    [
        ((b"\xff\xff\xff",), grpc.StatusCode.INVALID_ARGUMENT, ""),
        ((messages.ProcessingRequest(),), grpc.StatusCode.INVALID_ARGUMENT, "a message without a request"),
        ((of_headers([]), of_headers([])), grpc.StatusCode.INVALID_ARGUMENT, "request headers came twice"),
    ],
)
async def test_what_is_no_message_ends_its_stream_alone(
    sent: Sequence[messages.ProcessingRequest | bytes], code: grpc.StatusCode, because: str
) -> None:
    async with world() as at:
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await at.send(*sent)
        assert refused.value.code() is code
        assert because in (refused.value.details() or "")
        assert at.count("picker_refused_streams_total") == 1
        assert endpoints((await at.send(of_headers(KEYED.items())))[0])


async def test_a_stream_that_brings_nothing_is_ended() -> None:
    async with world() as at:
        call = at.open()
        reading = asyncio.create_task(call.read())
        async with asyncio.timeout(PATIENCE_S):
            while at.count("picker_refused_streams_total") == 0:
                await asyncio.sleep(0.02)
                at.picker.end_late_streams()
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await reading
        assert refused.value.code() is grpc.StatusCode.CANCELLED
        at.picker.end_late_streams()
        assert at.count("picker_refused_streams_total") == 1
        assert endpoints((await at.send(of_headers(KEYED.items())))[0])


async def test_an_empty_stream_is_no_error() -> None:
    async with world() as at:
        assert await at.send() == []
        assert at.count("picker_refused_streams_total") == 0


async def test_more_streams_than_allowed_are_refused() -> None:
    limits = PickerLimits(max_streams=2, first_message_s=30.0)
    async with world(limits) as at:
        held = [at.open() for _ in range(2)]
        for call in held:
            await call.write(of_headers(KEYED.items()).SerializeToString())
            assert await call.read() is not grpc.aio.EOF
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await at.send(of_headers(KEYED.items()))
        assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        for call in held:
            await call.done_writing()
            assert await call.read() is grpc.aio.EOF
        assert endpoints((await at.send(of_headers(KEYED.items())))[0])


@settings(max_examples=50)
@given(st.binary(max_size=200))
def test_no_bytes_break_the_conversation(raw: bytes) -> None:
    """Each is a reply, or one of the two errors that end a stream."""
    metrics = PickerMetrics()
    conversation = ext_proc._Conversation(EndpointPicker(lambda: GatewayRanking(GATEWAYS), LIMITS, metrics))
    try:
        reply = conversation.on_message(raw)
    except (ext_proc.DecodeError, ext_proc.InvalidMessageError):
        return
    assert reply is None or messages.ProcessingResponse.FromString(reply).WhichOneof("response")


def test_the_reply_of_an_order_is_encoded_once() -> None:
    ext_proc.destination_reply.cache_clear()
    ext_proc.destination_reply(("10.0.0.1:1", "10.0.0.2:1"))
    ext_proc.destination_reply(("10.0.0.1:1", "10.0.0.2:1"))
    assert ext_proc.destination_reply.cache_info().hits == 1
