"""All errors that Penstock raises on purpose, as one tree.

::

    PenstockError
      RequestError      4xx, the client's fault, never retried by us
        BadField            a field has a wrong type or value
        PromptTooLong       prompt and response exceed the context
        InputTooLong        the input of a pooling request exceeds the context
        WrongTask           the model cannot do what was requested
        UnknownModel        404
        ModelNotAllowed     403, the key is not for this model
        BadJson             the body is not strict JSON
        BodyTooLarge        413
        BodyTimeout         408
        WrongMediaType      415
        Unauthorized        401
        Forbidden           403
        UnknownPath         404
        UnknownRequest      404, unknown request id
        UnknownResponse     404, no stored response of this tenant
        UnknownWorker       404
        Conflict            409, not possible in the current state
        MethodNotAllowed    405
        KeyReused           422, the idempotency key belongs to another request
        PoisonRequest       422, workers crashed on it
      CapacityError     429 or 503, with Retry-After
        QueueFull           the queue is full, of all tenants or of this one
        RateLimited         a tenant exceeds its rate
        TooManyConcurrentRequests  a key has as many open requests as it may have
        Overloaded          503, the predicted wait exceeds the limit
        DeadlineMissed      503, the wait has exceeded the limit
      WorkerError       503, after our own retries
        NoWorkers           no worker can serve now
        WorkerLost          resubmissions used up
        StalledRequest      no progress within the limit
        StoreUnavailable    the stored responses cannot be read or changed now
        AssignmentTimeout   a worker has not taken on a role or duty in time
      PageCorrupt       a page failed verification: recomputed, never shown to a client
      TierError         a tier of the KV store failed: its pages are recomputed
      TransferRefused   sender and receiver do not fit (fingerprint, generation)
      ProtocolError     an invalid frame
        ProtocolVersionError  a frame of another version
      ModelError        a model that cannot be served, raised before a process starts
      ConfigError       an invalid setting
      ImageRefused      an image that a worker cannot read, or that does not match its request
      GrammarRefused    a grammar that cannot be compiled, or not within the limits
      AdapterRefused    an adapter that a worker cannot load
      KernelError       a kernel family that this machine or build does not have
      GroupError        ranks of one worker disagree, or one of them has ended

Each error has its HTTP status, type and code, so the API maps it without a table of its own.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

MOST_NAMED = 20
"""Names of models that an error lists."""


class PenstockError(Exception):
    """Root of the tree."""


class RequestError(PenstockError):
    """The request is at fault.  ``param`` and ``code`` are those of OpenAI's error object."""

    status = 400
    type = "invalid_request_error"

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.code = code


class BadField(RequestError):
    """A field that has a wrong type or value."""

    def __init__(self, param: str, *, got: object, want: str, code: str | None = "invalid_value") -> None:
        shown = repr(got)
        if len(shown) > 80:
            shown = shown[:77] + "..."
        super().__init__(f"Invalid value for '{param}': expected {want}, got {shown}.", param=param, code=code)


class PromptTooLong(RequestError):
    """Prompt and response together exceed the context.  Never truncated; the message has both numbers."""

    def __init__(
        self,
        *,
        prompt_tokens: int,
        max_tokens: int,
        limit: int,
        param: str = "messages",
        at_least: bool = False,
        model_len: int | None = None,
        cuts: bool = True,
    ) -> None:
        """``model_len``: the context that the model itself has.  ``cuts``: the request may have its prompt cut."""
        self.prompt_tokens = prompt_tokens
        self.limit = limit
        self._sum = prompt_tokens + max_tokens
        self.max_tokens = max_tokens
        self._at_least = at_least
        self._model_len = model_len
        super().__init__(self.advice("max_tokens", cuts=cuts), param=param, code="context_length_exceeded")

    def advice(self, length: str | None, *, cuts: bool) -> str:
        """The message, with what helps.  ``length``: the field that limits the response; None: that is cut anyway."""
        told = (
            f"This model's maximum context length is {self.limit} tokens. However, you requested "
            f"{'at least ' if self._at_least else ''}{self._sum} tokens "
            f"({self.prompt_tokens} in the prompt, {self.max_tokens} in the answer)."
        )
        room = self.limit - self.prompt_tokens
        ways = ["shorten the conversation (agents: /compact)"]
        if cuts:
            ways.insert(0, "keep the end of the prompt with 'truncate_prompt_tokens'")
        if length is not None and room >= 1 and not self._at_least:
            ways.insert(0, f"set '{length}' to {room} or less")
        helps = ", or ".join((", ".join(ways[:-1]), ways[-1]) if ways[1:] else ways)
        more = ""
        if self._model_len is not None and self._model_len > self.limit:
            more = f" The model itself has {self._model_len} tokens: its operator may allow more with --max-model-len."
        return f"{told} {helps[0].upper()}{helps[1:]}.{more}"


class InputTooLong(RequestError):
    """The input of a pooling request has more tokens than the model reads.  Truncated only on request."""

    def __init__(self, param: str, *, tokens: int, limit: int, at_least: bool = False) -> None:
        super().__init__(
            f"This model's maximum input length is {limit} tokens, and '{param}' has {'at least ' if at_least else ''}"
            f"{tokens}. Shorten it, or have it cut with 'truncate_prompt_tokens': -1 where that is offered.",
            param=param,
            code="context_length_exceeded",
        )


class WrongTask(RequestError):
    """The model cannot do what was requested.  ``instead``: paths that it serves."""

    def __init__(self, name: str, why: str, instead: str) -> None:
        super().__init__(f"The model '{name}' {why}. Use {instead}.", param="model", code="wrong_task")


class UnknownModel(RequestError):
    """The requested model is not served here."""

    status = 404

    def __init__(self, name: str, served: Sequence[str], *, mappable: bool = True) -> None:
        """``served``: all names that there are.  ``mappable``: an operator may map ``name`` to one of them."""
        shown = ", ".join(f"'{one}'" for one in served[:MOST_NAMED]) or "none"
        more = f" and {len(served) - MOST_NAMED} more" if len(served) > MOST_NAMED else ""
        message = f"The model '{name}' does not exist. This server has {shown}{more}."
        if mappable and served:
            family, dash, _ = name.partition("-")
            pattern = f"{family}{dash}*" if dash and re.fullmatch(r"\w+", family) else "claude-*"
            message += f" Its operator can map names: --model-alias '{pattern}={served[0]}'."
        super().__init__(message, param="model", code="model_not_found")


class ModelNotAllowed(RequestError):
    """The key is not for this model, which may or may not exist.  Status, code and ``param`` are OpenAI's."""

    status = 403

    def __init__(self, name: str, allowed: Sequence[str]) -> None:
        """``allowed``: the models that the key is for."""
        shown = ", ".join(f"'{one}'" for one in allowed[:MOST_NAMED])
        more = f" and {len(allowed) - MOST_NAMED} more" if len(allowed) > MOST_NAMED else ""
        super().__init__(
            f"This API key does not have access to model '{name[:128]}'. It is for {shown}{more}.",
            code="model_not_found",
        )


class BadJson(RequestError):
    """The body is not strict JSON (RFC 8259, UTF-8, no duplicate keys, no NaN)."""


class BodyTooLarge(RequestError):
    """The body is larger than the limit."""

    status = 413


class BodyTimeout(RequestError):
    """The body did not arrive within the limit."""

    status = 408


class WrongMediaType(RequestError):
    """The body is not declared to be JSON."""

    status = 415


class Unauthorized(RequestError):
    """No key, or a wrong one."""

    status = 401


class Forbidden(RequestError):
    """The service was started without what this needs."""

    status = 403


class UnknownPath(RequestError):
    """Nothing is served at this path."""

    status = 404


class UnknownRequest(RequestError):
    """There is no such request, or it ended long ago."""

    status = 404


class UnknownResponse(RequestError):
    """No response of this id is stored for its asker."""

    status = 404

    def __init__(self, name: str) -> None:
        super().__init__(f"Response with id '{name}' not found.", param="response_id", code="response_not_found")


class UnknownWorker(RequestError):
    """No worker of this name was ever seen."""

    status = 404

    def __init__(self, name: str, known: str) -> None:
        super().__init__(f"There is no worker '{name}'. There are: {known}.", param="worker", code="worker_not_found")


class Conflict(RequestError):
    """Not possible in the current state; the message says what would have to change."""

    status = 409


class MethodNotAllowed(RequestError):
    """The path exists, but not with this method.  ``allow`` names those that do."""

    status = 405

    def __init__(self, method: str, path: str, *, allow: str) -> None:
        super().__init__(f"Not allowed to {method} on {path}. Allowed: {allow}.", code="method_not_allowed")
        self.allow = allow


class KeyReused(RequestError):
    """An idempotency key, or an event's id, that belongs to another request."""

    status = 422

    def __init__(self, message: str) -> None:
        super().__init__(message, code="idempotency_key_reused")


class PoisonRequest(RequestError):
    """Several workers crashed on this request, so it is not tried on the others.  Sent tokens stay valid."""

    status = 422

    def __init__(self, message: str) -> None:
        super().__init__(message, code="poison_request")


class CapacityError(PenstockError):
    """Retry later.  ``retry_after`` is in whole seconds, at least 1."""

    status = 429
    type = "rate_limit_error"
    code = "rate_limit_exceeded"
    reason = "queue_full"  # as metrics name it

    def __init__(self, message: str, *, retry_after: int = 1) -> None:
        super().__init__(message)
        self.message = message
        self.retry_after = max(1, retry_after)


class QueueFull(CapacityError):
    """The queue is full."""


class RateLimited(CapacityError):
    """A tenant has used up its rate for this minute."""

    reason = "rate_limit"


class TooManyConcurrentRequests(CapacityError):
    """A key has as many open requests as it may have."""

    code = "concurrency_limit_exceeded"
    reason = "concurrency"

    def __init__(self, limit: int) -> None:
        super().__init__(
            f"Your key may have {limit} requests open at once, and has as many. Wait until one of them has ended."
        )


class Overloaded(CapacityError):
    """The predicted wait exceeds the limit, so the request is not admitted."""

    status = 503
    type = "server_error"
    code = "overloaded"
    reason = "predicted_wait"


class DeadlineMissed(CapacityError):
    """The request has waited longer than its limit without a token."""

    status = 503
    type = "server_error"
    code = "deadline_exceeded"
    reason = "deadline"


class WorkerError(PenstockError):
    """The service is at fault.  Requests are resubmitted before a client sees one of these."""

    status = 503
    type = "server_error"
    code = "service_unavailable"

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message


class NoWorkers(WorkerError):
    """No worker can serve this now, and none came back in time."""


class WorkerLost(WorkerError):
    """Resubmitted as often as allowed without a new token."""


class StalledRequest(WorkerError):
    """No progress within the limit."""


class StoreUnavailable(WorkerError):
    """The stored responses cannot be read or changed now."""


class AssignmentTimeout(WorkerError):
    """A worker has not taken on a role or duty within the limit; it may still do so."""


class PageCorrupt(PenstockError):
    """A page's checksum is wrong."""


class TierError(PenstockError):
    """A tier of the KV store is broken, too slow or missing."""


class TransferRefused(PenstockError):
    """Pages cannot be transferred between these two workers."""


class ProtocolError(PenstockError):
    """A frame with a wrong version, tag, type or size."""


class ProtocolVersionError(ProtocolError):
    """A frame of another protocol version, which is its first byte."""

    def __init__(self, version: int, expected: int) -> None:
        super().__init__(f"protocol version {version}, expected {expected}")
        self.version = version


class ModelError(PenstockError):
    """A model that cannot be served; the message says why and what would work."""


class ConfigError(PenstockError):
    """A setting that cannot be; the message names it and says what would work."""


class ImageRefused(PenstockError):
    """An image that cannot be read, or does not match its request; the message is the reason."""


class GrammarRefused(PenstockError):
    """A grammar that cannot be compiled, or not within the limits; the message is the reason."""


class AdapterRefused(PenstockError):
    """An adapter that a worker cannot load; the message is the reason."""


class KernelError(PenstockError):
    """A kernel family that this machine or build does not have."""


class GroupError(PenstockError):
    """Ranks of one worker disagree on what they exchange, wait for one another, or one has ended; the group is over."""


class RestartLimitReached(PenstockError):
    """A process could not be kept running; the message says why and what would help."""
