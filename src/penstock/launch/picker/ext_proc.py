"""The protocol between a proxy and an endpoint picker: Envoy's external processing (ext_proc, over gRPC) with the
conventions of the Gateway API Inference Extension's endpoint picker protocol, version 1.0.0.

::

    proxy                                                    picker
      --- request_headers (, subset of endpoints) ------------>
      <-- x-gateway-destination-endpoint: A,B,C --------------     as a header and as dynamic metadata of envoy.lb
          or an immediate response, 503, if there is none
      --- bodies, trailers, response headers ----------------->     only if the proxy is configured to send them:
      <-- the same, unchanged ---------------------------------     nothing depends on them

Headers decide, so a proxy is best configured to send nothing else.  A stream is one HTTP request.  Of this module the
messages are Envoy's own (xds-protos); knows nothing of sockets or processes.
"""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import NoReturn, Protocol

import grpc
from envoy.config.core.v3 import base_pb2
from envoy.service.ext_proc.v3 import external_processor_pb2 as messages
from envoy.type.v3 import http_status_pb2
from google.protobuf.message import DecodeError

from penstock.api.errors import JSON_TYPE, error_format_of, error_response
from penstock.config.limits import PickerLimits
from penstock.errors import NoWorkers
from penstock.launch.picker.choice import (
    AFFINITY_HEADERS,
    AffinityKind,
    GatewayRanking,
    affinity_key,
)
from penstock.telemetry.registry import PickerMetrics

SERVICE = "envoy.service.ext_proc.v3.ExternalProcessor"
METHOD = "Process"

DESTINATION = "x-gateway-destination-endpoint"
DESTINATION_NAMESPACE = "envoy.lb"
SUBSET = "x-gateway-destination-endpoint-subset"
SUBSET_NAMESPACE = "envoy.lb.subset_hint"

PATH = b":path"
NO_GATEWAY = "no_gateway"

REMEMBERED_REPLIES = 4096
"""Encoded replies, by their endpoints: gateways x gateways x gateways of a small fleet, some 200 bytes each."""

_NAMES = {name.decode(): name for name in (*AFFINITY_HEADERS, PATH)}
_STREAMED = (4, 5)  # ProcessingMode.BodySendMode: FULL_DUPLEX_STREAMED, GRPC
_PLAIN_HEADERS = messages.HeadersResponse()
_OVERWRITE = base_pb2.HeaderValueOption.OVERWRITE_IF_EXISTS_OR_ADD


class InvalidMessageError(Exception):
    """A message that is none, or that no proxy sends at this point."""


@lru_cache(maxsize=REMEMBERED_REPLIES)
def destination_reply(endpoints: tuple[str, ...]) -> bytes:
    """An encoded ``ProcessingResponse`` to request headers: the endpoints to try, in their order."""
    text = ",".join(endpoints)
    reply = messages.ProcessingResponse()
    option = reply.request_headers.response.header_mutation.set_headers.add()
    option.header.key, option.header.raw_value = DESTINATION, text.encode()
    option.append_action = _OVERWRITE  # a client's own must not count
    reply.request_headers.response.clear_route_cache = True
    reply.dynamic_metadata.get_or_create_struct(DESTINATION_NAMESPACE)[DESTINATION] = text
    return bytes(reply.SerializeToString())


def no_gateway_reply(path: bytes, message: str) -> bytes:
    """An encoded ``ProcessingResponse`` that answers the request with 503, in the envelope of its API."""
    error = error_response(NoWorkers(message))
    reply = messages.ProcessingResponse()
    immediate = reply.immediate_response
    immediate.status.code = http_status_pb2.ServiceUnavailable
    immediate.body = error_format_of(path.decode("latin-1").partition("?")[0])(error)
    immediate.details = NO_GATEWAY
    for name, value in (JSON_TYPE, *error.headers):
        option = immediate.headers.set_headers.add()
        option.header.key, option.header.raw_value = name.decode(), value
        option.append_action = _OVERWRITE
    return bytes(reply.SerializeToString())


def request_headers(message: messages.ProcessingRequest) -> dict[bytes, bytes]:
    """The headers that matter here; the first of each name, as gateways read them."""
    found: dict[bytes, bytes] = {}
    for header in message.request_headers.headers.headers:
        name = _NAMES.get(header.key)
        if name is not None and name not in found:
            found[name] = header.raw_value or header.value.encode()
    return found


def subset(message: messages.ProcessingRequest, most: int) -> list[str] | None:
    """The endpoints among which the proxy wants one chosen; None: among all.

    They are a list of strings, or one string with commas; anything else in their place means that none will do.
    """
    metadata = message.metadata_context.filter_metadata
    if SUBSET_NAMESPACE not in metadata or SUBSET not in metadata[SUBSET_NAMESPACE].fields:
        return None
    given = metadata[SUBSET_NAMESPACE].fields[SUBSET]
    texts = [value.string_value for value in given.list_value.values[:most]] or [given.string_value]
    found = [part.strip() for text in texts for part in text.split(",", most)]
    return [part for part in found if part][:most]


class ProxyStream(Protocol):
    """One stream, as gRPC hands it to a service."""

    def is_active(self) -> bool: ...

    def cancel(self) -> bool: ...

    def abort(self, code: grpc.StatusCode, details: str) -> NoReturn: ...


class EndpointPicker:
    """The service.  One for all proxies; a stream's state is in its call.  Thread-safe."""

    def __init__(
        self,
        ranking: Callable[[], GatewayRanking],
        limits: PickerLimits,
        metrics: PickerMetrics,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """``ranking`` returns the gateways that can serve now."""
        self._ranking = ranking
        self._limits = limits
        self._metrics = metrics
        self._clock = clock
        self._turns = itertools.count(random.randrange(1 << 32))  # noqa: S311 - several pickers do not go in step
        self._waiting: dict[ProxyStream, float] = {}  # streams without a message so far, and since when

    def handler(self) -> grpc.GenericRpcHandler:
        """For a gRPC server.  Messages are decoded here, so that one that is none is an error of its sender."""
        method = grpc.stream_stream_rpc_method_handler(self.process)
        return grpc.method_handlers_generic_handler(SERVICE, {METHOD: method})

    def process(self, received: Iterator[bytes], stream: ProxyStream) -> Iterator[bytes]:
        """One HTTP request, until the proxy has nothing more to say about it.  Runs in a thread of its own."""
        self._waiting[stream] = self._clock()
        conversation = _Conversation(self)
        try:
            for raw in received:
                self._waiting.pop(stream, None)
                reply = conversation.on_message(raw)
                if reply is not None:
                    yield reply
        except (DecodeError, InvalidMessageError) as error:
            self._metrics.on_refused_stream()
            stream.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        finally:
            self._waiting.pop(stream, None)

    def end_late_streams(self) -> None:
        """End those that have brought no message within ``first_message_s``.  To be called now and then."""
        since = self._clock() - self._limits.first_message_s
        for stream, begun in list(self._waiting.items()):
            if begun < since and self._waiting.pop(stream, None) is not None:
                self._metrics.on_refused_stream()
                stream.cancel()

    def pick(self, message: messages.ProcessingRequest) -> bytes:
        """The encoded reply to a message with request headers."""
        began = self._clock()
        headers = request_headers(message)
        ranking, wanted = self._ranking(), subset(message, self._limits.max_subset)
        if wanted is not None:
            ranking = ranking.only(wanted)
        if not ranking.endpoints:
            self._metrics.on_choice(NO_GATEWAY, self._clock() - began)
            why = "can serve now" if wanted is None else "among those that the proxy allows can serve now"
            return no_gateway_reply(headers.get(PATH, b""), f"No gateway of this service {why}. Try again later.")
        key = affinity_key(headers)
        if key.kind is AffinityKind.NONE:
            endpoints = ranking.in_turn(next(self._turns), self._limits.max_endpoints)
        else:
            endpoints = ranking.by_key(key.value, self._limits.max_endpoints)
        reply = destination_reply(endpoints)
        self._metrics.on_choice(key.kind.value, self._clock() - began)
        return reply


class _Conversation:
    """What a stream has brought so far."""

    def __init__(self, picker: EndpointPicker) -> None:
        self._picker = picker
        self._begun = False
        # How bodies are to be returned.  Proxies that do not say, and send bodies to an endpoint picker, stream them.
        self._request_streamed = self._response_streamed = True

    def on_message(self, raw: bytes) -> bytes | None:
        """The reply; None: the proxy expects none.  Raises DecodeError, InvalidMessageError."""
        message = messages.ProcessingRequest.FromString(raw)
        if message.HasField("protocol_config"):
            self._request_streamed = message.protocol_config.request_body_mode in _STREAMED
            self._response_streamed = message.protocol_config.response_body_mode in _STREAMED
        reply = self._reply(message)
        return None if message.observability_mode else reply

    def _reply(self, message: messages.ProcessingRequest) -> bytes:
        kind = message.WhichOneof("request")
        if kind == "request_headers":
            if self._begun:
                raise InvalidMessageError("request headers came twice")
            self._begun = True
            return self._picker.pick(message)
        reply = messages.ProcessingResponse()
        match kind:
            case "response_headers":
                reply.response_headers.SetInParent()
            case "request_body":
                _return_body(reply.request_body, message.request_body, streamed=self._request_streamed)
            case "response_body":
                _return_body(reply.response_body, message.response_body, streamed=self._response_streamed)
            case "request_trailers":
                reply.request_trailers.SetInParent()
            case "response_trailers":
                reply.response_trailers.SetInParent()
            case _:
                raise InvalidMessageError("a message without a request")
        return bytes(reply.SerializeToString())


def _return_body(reply: messages.BodyResponse, body: messages.HttpBody, *, streamed: bool) -> None:
    """Unchanged."""
    if not streamed:
        reply.SetInParent()
        return
    piece = reply.response.body_mutation.streamed_response
    piece.body, piece.end_of_stream = body.body, body.end_of_stream
