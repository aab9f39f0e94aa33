"""HTTP over ASGI: reads a request body within limits, parses it, sends one response, notices a disconnect.

``EndpointFactory`` adds to every endpoint with a body what they share: reserved memory, limits, strict parsing,
errors.  Large bodies are parsed on ``FairThreads``, where tenants take turns.  Two ASGI extensions avoid a message and
a task switch per token: ``BodyWriter`` writes straight to the connection, ``DisconnectSignal`` reports that the client
has gone.  Knows nothing about routes or the meaning of a body.
"""

from __future__ import annotations

import asyncio
import secrets
from collections import OrderedDict, deque
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from types import TracebackType
from typing import Any, Protocol, Self, TypeVar
from urllib.parse import parse_qsl

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from penstock.api import json_strict
from penstock.api.admission import Admission, BodyReservation
from penstock.api.errors import (
    JSON_TYPE,
    MESSAGES_PATH,
    ClientDisconnected,
    Header,
    error_code,
    error_format_of,
    logged_error_response,
)
from penstock.api.multipart import boundary_of, parse_multipart
from penstock.api.request_log import LOG_ENTRY, RequestLogEntry
from penstock.config.limits import RequestLimits
from penstock.errors import BadField, BodyTimeout, BodyTooLarge, CapacityError, NoWorkers, RequestError, WrongMediaType
from penstock.interfaces import JsonObject, MultipartForm


class FairThreads:
    """Two threads: one for work of up to ``small`` bytes, one for what is larger.  One for an event loop."""

    def __init__(self, name: str, small: int) -> None:
        self._small = small
        self._lanes = (_WorkerThread(f"{name}-small"), _WorkerThread(f"{name}-large"))

    async def run(self, tenant: str, size: int, work: Callable[[], T]) -> T:
        """``work`` on ``size`` bytes of this tenant's, in its turn."""
        lane = self._lanes[size > self._small]
        await lane.acquire(tenant)
        result: T = await asyncio.wrap_future(lane.submit(work))
        return result


class _WorkerThread:
    """One thread, which waiting tenants get in turns (round robin), each with its oldest work."""

    def __init__(self, name: str) -> None:
        self._pool = ThreadPoolExecutor(1, thread_name_prefix=name)
        self._waiting: OrderedDict[str, deque[asyncio.Future[None]]] = OrderedDict()
        self._busy = False

    async def acquire(self, tenant: str) -> None:
        """Waits for the thread; the caller must then ``submit`` at once."""
        if not self._busy:
            self._busy = True
            return
        place = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(tenant, deque()).append(place)
        try:
            await place
        except asyncio.CancelledError:
            if place.done() and not place.cancelled():
                self._next()  # it was our turn just now
            raise

    def submit(self, work: Callable[[], T]) -> Future[T]:
        """Run ``work``.  The thread is then passed on, also when the result is no longer awaited."""
        loop = asyncio.get_running_loop()

        def ended(_: Future[Any]) -> None:
            with suppress(RuntimeError):  # the loop has been closed meanwhile
                loop.call_soon_threadsafe(self._next)

        future = self._pool.submit(work)
        future.add_done_callback(ended)
        return future

    def _next(self) -> None:
        while self._waiting:
            tenant, places = self._waiting.popitem(last=False)
            place = places.popleft()
            if places:
                self._waiting[tenant] = places  # behind the others
            if not place.done():
                place.set_result(None)
                return
        self._busy = False


BODY_WRITER = "penstock.body_writer"


class BodyWriter(Protocol):
    """Writes the body of one response."""

    @property
    def usable(self) -> bool:
        """Whether parts of the body may be written: the head is sent, without a length, and allows a body."""
        ...

    @property
    def paused(self) -> bool:
        """Whether the client reads more slowly than data is written.  What is written anyway is buffered."""
        ...

    def write(self, body: bytes) -> bool:
        """Writes a part of the body, not empty.  Returns ``paused``.  Ignored when the client has gone."""
        ...

    def when_writable(self, ready: Callable[[], None]) -> None:
        """Calls ``ready`` once, when it is no longer paused or the client has gone.  Only while paused."""
        ...


DISCONNECT_SIGNAL = "penstock.hang_up"


class DisconnectSignal(Protocol):
    """Tells one request that its client has disconnected."""

    def when_gone(self, call: Callable[[], None] | None) -> None:
        """Calls ``call`` once, in the event loop, when the client has gone or if it has; None removes the listener."""
        ...


TENANT = "penstock.tenant"
"""In a scope: who has the key that the request came with (``auth.Tenant``)."""

_LINGER_S = 1.0
_LINGER_BYTES = 32 << 20
"""For so long the rest of a refused body is read and thrown away, or the client might never see the refusal."""


MAX_QUERY_FIELDS = 64
"""Parameters of one URL."""

MAX_UNUSED_BODY_BYTES = 64 << 10
"""Of a body that means nothing to its endpoint."""


class HttpExchange:
    """A request and its response.  The body is read at most once, the response started at most once."""

    __slots__ = ("_body_read", "_receive", "_scope", "_send", "finished", "started")

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._scope = scope
        self._receive = receive
        self._send = send
        self._body_read = False
        self.started = False  # the status line is out
        self.finished = False  # so is everything else

    @property
    def path(self) -> str:
        """The path that was asked for."""
        return str(self._scope["path"])

    def request_id_headers(self, request_id: str) -> tuple[Header, ...]:
        """The headers in which clients look for the request's id: Anthropic's have a name of their own."""
        own = (b"x-request-id", request_id.encode())
        return ((b"request-id", own[1]), own) if self.path.startswith(MESSAGES_PATH) else (own,)

    @property
    def log_entry(self) -> RequestLogEntry:
        """The entry for the request log."""
        note: RequestLogEntry | None = self._scope.get(LOG_ENTRY)
        return RequestLogEntry() if note is None else note

    @property
    def tenant(self) -> Any:
        """What stands in the scope under ``TENANT``; None where no key is needed."""
        return self._scope.get(TENANT)

    # --- in ----------------------------------------------------------------------------------------------------------

    def header(self, name: bytes) -> bytes | None:
        """The value of a header, None without it."""
        return next((value for key, value in self._scope["headers"] if key == name), None)

    def headers(self, name: bytes) -> bytes | None:
        """The values of all headers of this name, as one list; None without any."""
        values = [value for key, value in self._scope["headers"] if key == name]
        return b", ".join(values) if values else None

    def path_parameter(self, name: str) -> str:
        """A part of the path that its route names.  Raises KeyError for one that it does not."""
        return str(self._scope["path_params"][name])

    def query(self) -> dict[str, str]:
        """The parameters behind the path, the last of each name.  Raises RequestError for too many."""
        raw: bytes = self._scope.get("query_string", b"")
        try:
            return dict(parse_qsl(raw.decode("latin-1"), keep_blank_values=True, max_num_fields=MAX_QUERY_FIELDS))
        except ValueError:
            raise RequestError(f"The URL has more than {MAX_QUERY_FIELDS} parameters.", code="bad_query") from None

    async def read_json_body(self, limits: RequestLimits, hold: BodyReservation) -> bytes:
        """The raw body of a request that says it is JSON.

        Raises WrongMediaType, BodyTooLarge, BodyTimeout, QueueFull (all before more is read than must be) and
        ClientDisconnected.
        """
        self._check_type()
        return await self.read_body(limits, hold, limits.max_body_bytes)

    async def read_body(self, limits: RequestLimits, hold: BodyReservation, most: int) -> bytes:
        """The raw body, of at most ``most`` bytes.  Raises as ``read_json_body``, without the check of its type."""
        codings = (self.headers(b"content-encoding") or b"").lower().split(b",")
        if any(coding.strip() not in (b"", b"identity") for coding in codings):
            raise WrongMediaType("Compressed bodies are not read here.", code="unsupported_media_type")
        declared = self._declared_length()
        if declared is not None and declared > most:
            raise _too_large(most)
        try:
            async with asyncio.timeout(limits.slow_body_s):
                return await self._read(hold, most)
        except TimeoutError as error:
            raise BodyTimeout(
                f"The body did not arrive within the limit of {limits.slow_body_s:g} s.", code="slow_body"
            ) from error

    async def _read(self, hold: BodyReservation, most: int) -> bytes:
        chunks: list[bytes] = []
        while not self._body_read:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                raise ClientDisconnected
            chunk: bytes = message.get("body", b"")
            self._body_read = not message.get("more_body", False)
            if hold.held + len(chunk) > most:
                raise _too_large(most)
            hold.grow(len(chunk))
            chunks.append(chunk)
        return b"".join(chunks)

    def _check_type(self) -> None:
        kind, *parameters = (self.header(b"content-type") or b"").lower().split(b";")
        wrong = [item for item in map(bytes.strip, parameters) if item.startswith(b"charset=")]
        if kind.strip() != b"application/json" or any(item.strip(b'charset="') != b"utf-8" for item in wrong):
            raise WrongMediaType("Send the header 'Content-Type: application/json'.", code="unsupported_media_type")

    def _declared_length(self) -> int | None:
        value = self.header(b"content-length")
        if value is None:
            return None
        if not value.isdigit():
            raise RequestError("The content-length is not a number.", code="bad_content_length")
        return int(value[:20])

    def watch_disconnect(self) -> DisconnectWatch:
        """A scope that raises ClientDisconnected as soon as the client disconnects."""
        hang_up: DisconnectSignal | None = self._scope.get("extensions", {}).get(DISCONNECT_SIGNAL)
        return DisconnectWatch(self, self._receive, hang_up)

    # --- out ---------------------------------------------------------------------------------------------------------

    @property
    def chunked(self) -> bool:
        """Whether a response of unknown length can be sent.  HTTP/1.0 has no chunks."""
        return bool(self._scope.get("http_version", "1.1") != "1.0")

    def release_headers(self) -> None:
        """Forgets the request's headers: a response that has begun needs them no more, and may take long."""
        self._scope["headers"].clear()

    async def start(self, status: int, *headers: Header) -> None:
        """The status line and headers."""
        self.started = True
        await self._send({"type": "http.response.start", "status": status, "headers": list(headers)})

    async def send(self, body: bytes) -> None:
        """A part of the body."""
        await self._send({"type": "http.response.body", "body": body, "more_body": True})

    def body_writer(self) -> BodyWriter | None:
        """What writes parts of a body that has begun straight to the connection, where the server has such a thing."""
        writer: BodyWriter | None = self._scope.get("extensions", {}).get(BODY_WRITER)
        return writer if writer is not None and writer.usable else None

    async def finish(self, body: bytes = b"") -> None:
        """The last part of the body."""
        self.finished = True
        await self._send({"type": "http.response.body", "body": body})

    async def send_response(self, status: int, body: bytes, *headers: Header) -> None:
        """Sends a whole response, of type JSON unless a header says otherwise."""
        kind = () if any(name == b"content-type" for name, _ in headers) else (JSON_TYPE,)
        await self.start(status, *kind, (b"content-length", str(len(body)).encode()), *headers)
        await self.finish(body)

    async def send_error(self, error: BaseException) -> None:
        """Sends an error, after which at most a bounded rest of the body is read."""
        note = self.log_entry
        note.code, note.id = error_code(error), note.id or f"req_{secrets.token_hex(12)}"
        note.reason = error.reason if isinstance(error, CapacityError) else ""
        answer = logged_error_response(error, note.id)
        body = error_format_of(self.path)(answer)
        headers = (JSON_TYPE, (b"content-length", str(len(body)).encode()), *answer.headers)
        headers += self.request_id_headers(note.id)
        if self._body_read or not self._has_body():
            await self.start(answer.status, *headers)
            await self.finish(body)
            return
        await self.start(answer.status, *headers, (b"connection", b"close"))
        await self.send(body)
        await self._linger()
        await self.finish()

    def _has_body(self) -> bool:
        return self.header(b"transfer-encoding") is not None or self.header(b"content-length") not in (None, b"0")

    async def _linger(self) -> None:
        thrown_away = 0
        with suppress(TimeoutError):
            async with asyncio.timeout(_LINGER_S):
                while not self._body_read and thrown_away < _LINGER_BYTES:
                    message: Message = await self._receive()
                    thrown_away += len(message.get("body", b""))
                    self._body_read = message["type"] != "http.request" or not message.get("more_body", False)


class DisconnectWatch:
    """Watches for a disconnect while a request is served, without cost per token."""

    __slots__ = ("_exchange", "_gone", "_hang_up", "_receive", "_task", "_watch")

    def __init__(self, exchange: HttpExchange, receive: Receive, hang_up: DisconnectSignal | None = None) -> None:
        """``hang_up`` reports a disconnect; without it a task waits for one."""
        self._exchange = exchange
        self._receive = receive
        self._hang_up = hang_up
        self._gone = False
        self._watch: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        task = asyncio.current_task()
        assert task is not None
        self._task = task
        if self._hang_up is None:
            self._watch = asyncio.get_running_loop().create_task(self._listen())
        else:
            self._hang_up.when_gone(self._leave)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._watch is not None:
            self._watch.cancel()
        if self._hang_up is not None:
            self._hang_up.when_gone(None)
            self._hang_up = None  # or it would still be called, if it is about to be
        if self._gone and kind is asyncio.CancelledError and self._task.uncancel() == 0:
            raise ClientDisconnected from error

    async def _listen(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self._leave()

    def _leave(self) -> None:
        over = self._watch is None and self._hang_up is None
        if not over and not self._exchange.finished:
            self._gone = True
            self._task.cancel()


def _too_large(most: int) -> BodyTooLarge:
    return BodyTooLarge(f"The body is larger than the limit of {most} bytes.", code="body_too_large")


INLINE_BODY_BYTES = 16 << 10
"""Larger bodies are parsed on a thread, which lets others run between two numbers."""


SMALL_BODY_BYTES = 256 << 10
"""Larger ones have a thread of their own, so that they hold up none but their like."""


class JsonBody:
    """A parsed body, and the memory that is reserved for it."""

    __slots__ = ("body", "raw", "reservation")

    def __init__(self, body: JsonObject, raw: bytes, hold: BodyReservation) -> None:
        self.body = body
        self.raw = raw
        self.reservation = hold

    def release_parsed(self) -> None:
        """Releases what was parsed, but not the raw bytes."""
        self.body = {}
        self.reservation.shrink(len(self.raw))

    def release(self) -> None:
        """Releases everything: responses take long, and bodies may be large."""
        self.body, self.raw = {}, b""
        self.reservation.release()


class FormBody:
    """A parsed form, and the memory that is reserved for it."""

    def __init__(self, form: MultipartForm, hold: BodyReservation) -> None:
        self._form: MultipartForm | None = form
        self.reservation = hold

    def take_form(self) -> MultipartForm:
        """The form, once; it is not kept here, because files are large and responses take long."""
        form, self._form = self._form, None
        assert form is not None, "taken already"
        return form


T = TypeVar("T")
B = TypeVar("B")
RestOfResponse = Coroutine[Any, Any, None] | None
"""What is still to be awaited, once the handler has returned and freed what only parsing needs."""

JsonHandler = Callable[[HttpExchange, JsonBody], Awaitable[RestOfResponse]]
FormHandler = Callable[[HttpExchange, FormBody], Awaitable[RestOfResponse]]


class EndpointFactory:
    """Makes the endpoints with bodies of one application."""

    def __init__(self, limits: RequestLimits, admission: Admission) -> None:
        self.admission = admission
        self._limits = limits
        self._threads = FairThreads("body", SMALL_BODY_BYTES)

    def json_endpoint(self, work: JsonHandler, check: Callable[[], None] = lambda: None) -> ASGIApp:
        """An endpoint that runs ``work``; ``check`` may refuse a request before anything is read."""

        async def read(exchange: HttpExchange, hold: BodyReservation) -> JsonBody:
            return await self._asked(exchange, await exchange.read_json_body(self._limits, hold), hold)

        return self._guarded(read, work, check)

    def bodiless_endpoint(self, work: Callable[[HttpExchange], Awaitable[None]]) -> ASGIApp:
        """An endpoint that needs no body; a small one is read and ignored."""

        async def read(exchange: HttpExchange, hold: BodyReservation) -> None:
            await exchange.read_body(self._limits, hold, MAX_UNUSED_BODY_BYTES)
            hold.release()

        async def respond(exchange: HttpExchange, body: None) -> None:
            await work(exchange)

        return self._guarded(read, respond, lambda: None)

    def form_endpoint(self, work: FormHandler, most: int) -> ASGIApp:
        """The same for a form with files, of at most ``most`` bytes."""

        async def read(exchange: HttpExchange, hold: BodyReservation) -> FormBody:
            return await self._sent(exchange, hold, most)

        return self._guarded(read, work, self.admission.check)

    def _guarded(
        self,
        read: Callable[[HttpExchange, BodyReservation], Awaitable[B]],
        work: Callable[[HttpExchange, B], Awaitable[RestOfResponse]],
        check: Callable[[], None],
    ) -> ASGIApp:
        async def endpoint(scope: Scope, receive: Receive, send: Send) -> None:
            exchange = HttpExchange(scope, receive, send)
            try:
                check()
                with self.admission.reserve_body() as hold:
                    body = await read(exchange, hold)
                    async with exchange.watch_disconnect():
                        rest = await work(exchange, body)
                        del body
                        if rest is not None:
                            await rest
            except ClientDisconnected:
                exchange.log_entry.code = "client_gone"
                return
            except asyncio.CancelledError:  # the process is ending: another one can serve the request
                if exchange.started:
                    raise
                await exchange.send_error(NoWorkers("The service has stopped."))
            except Exception as error:
                if exchange.started:
                    exchange.log_entry.code = error_code(error)
                    logged_error_response(error)
                    raise
                await exchange.send_error(error)

        return _Endpoint(endpoint)

    async def _sent(self, exchange: HttpExchange, hold: BodyReservation, most: int) -> FormBody:
        boundary = boundary_of(exchange.header(b"content-type"))
        raw = await exchange.read_body(self._limits, hold, most)
        return FormBody(await self._beside(exchange, len(raw), lambda: parse_multipart(raw, boundary)), hold)

    async def _asked(self, exchange: HttpExchange, raw: bytes, hold: BodyReservation) -> JsonBody:
        """The parsed body.  Its memory is reserved before it is parsed."""
        limits = self._limits

        def weigh() -> int:
            return json_strict.estimated_bytes(
                raw, max_values=limits.max_json_values, max_containers=limits.max_json_containers
            )

        def parse() -> object:
            return json_strict.parse_json(raw, max_depth=limits.max_json_depth)

        if len(raw) <= INLINE_BODY_BYTES:
            value = parse()
        else:
            hold.grow(await self._beside(exchange, len(raw), weigh))
            value = await self._beside(exchange, len(raw), parse)
        if not isinstance(value, dict):
            raise BadField("body", got=value, want="a JSON object", code="invalid_type")
        return JsonBody(value, raw, hold)

    async def _beside(self, exchange: HttpExchange, size: int, work: Callable[[], T]) -> T:
        """Runs ``work`` on a thread, where tenants take turns."""
        return await self._threads.run("" if exchange.tenant is None else exchange.tenant.id, size, work)


class _Endpoint:
    """An ASGI application in the form that Starlette's router accepts."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    def __call__(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        return self._app(scope, receive, send)
