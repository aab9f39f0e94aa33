"""Bodies of chats, completions, ``/tokenize`` and ``/detokenize`` to checked requests.

Unknown fields are refused as OpenAI refuses them, or ignored where the operator says so; fields that change nothing
here are accepted and ignored; fields that OpenAI has and this server does not are refused by name, never dropped
silently.  The service class comes from ``service_tier`` in OpenAI's words or ``priority`` in vLLM's; headers take
precedence.  Nothing downstream checks again.  Knows nothing about tokenizers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from penstock.config.limits import RequestLimits
from penstock.config.schema import RequestConfig
from penstock.errors import BadField, PromptTooLong, RequestError, UnknownModel
from penstock.processing.chat.template import RESERVED
from penstock.processing.model_aliases import aliased_model, plain_aliases
from penstock.processing.requests.fields import (
    WRONG_TYPE,
    BodyFields,
    array,
    integer,
    mapping,
    refuse_large,
    refuse_unknown,
    string,
    token_ids,
    unsupported,
)
from penstock.processing.requests.messages import (
    ImageUrl,
    Message,
    parse_documents,
    parse_messages,
    parse_template_arguments,
)
from penstock.processing.requests.sampling import (
    SAMPLING_FIELDS,
    LengthRules,
    ModelProperties,
    SamplingFields,
    parse_sampling,
)
from penstock.processing.requests.tools_and_grammar import (
    GRAMMAR_FIELDS,
    TOOL_FIELDS,
    RequestedGrammar,
    ToolOptions,
    parse_grammar,
    parse_json_form,
    parse_tooling,
)
from penstock.types import ServiceClass

SERVICE_CLASS_FIELDS = frozenset({"service_tier", "priority"})

_TIERS = {
    "auto": None,  # as the key has it
    "default": ServiceClass.INTERACTIVE,
    "standard": ServiceClass.INTERACTIVE,
    "scale": ServiceClass.INTERACTIVE,
    "priority": ServiceClass.INTERACTIVE,
    "flex": ServiceClass.BATCH,
    "batch": ServiceClass.BATCH,
}
_NAMED = {service.name.lower(): service for service in ServiceClass}
_MOST = 1 << 31


def parse_service(fields: BodyFields) -> ServiceClass | None:
    """None when nothing is said.  Raises RequestError."""
    tier, own = _parse_tier(fields), _parse_priority(fields)
    if tier is not None and own is not None and tier is not own:
        raise RequestError(
            f"'service_tier' means {tier.name.lower()} here and 'priority' means {own.name.lower()}: leave one out.",
            param="priority",
            code="invalid_parameter_combination",
        )
    return tier if own is None else own


def _parse_tier(fields: BodyFields) -> ServiceClass | None:
    value = fields.raw("service_tier")
    if value is None:
        return None
    if not isinstance(value, str):
        raise BadField("service_tier", got=value, want="a string", code=WRONG_TYPE)
    if value not in _TIERS:
        raise BadField("service_tier", got=value, want=f"one of {', '.join(_TIERS)}")
    return _TIERS[value]


def _parse_priority(fields: BodyFields) -> ServiceClass | None:
    """A class by its name; or a number as vLLM's, of which lower ones go first: above 0 is batch work."""
    value = fields.raw("priority")
    if value is None:
        return None
    if isinstance(value, str):
        if value not in _NAMED:
            raise BadField("priority", got=value, want=f"one of {', '.join(_NAMED)}, or an integer")
        return _NAMED[value]
    if type(value) is not int or not -_MOST <= value < _MOST:
        raise BadField("priority", got=value, want=f"one of {', '.join(_NAMED)}, or an integer", code=WRONG_TYPE)
    return ServiceClass.BATCH if value > 0 else ServiceClass.INTERACTIVE


Prompt = str | tuple[int, ...]
"""Text still to be encoded, or token ids that were checked."""

ParseIds = Callable[[str, Sequence[Any]], tuple[int, ...]]
"""From a field's name and an array to token ids that were checked."""

_WANT = "a string, an array of strings, an array of token ids, or an array of such arrays"


def parse_prompts(
    value: object, limits: RequestLimits, facts: ModelProperties, *, keep: int | None = None
) -> list[Prompt]:
    """At least one prompt, each short enough for the model.  Of token ids only the last ``keep`` are kept."""

    def parse_ids(where: str, ids: Sequence[Any]) -> tuple[int, ...]:
        return parse_token_prompt(where, ids if keep is None else ids[-keep:], facts)

    return texts_or_ids("prompt", value, limits.max_prompts, parse_ids)


def texts_or_ids(field: str, value: object, max_items: int, parse_ids: ParseIds) -> list[Prompt]:
    """At least one text.  A flat list of integers is one."""
    if isinstance(value, str):
        return [value]
    if not isinstance(value, list):
        raise BadField(field, got=value, want=_WANT, code=WRONG_TYPE)
    if not value:
        raise BadField(field, got="an empty array", want=_WANT, code="empty_array")
    if type(value[0]) is int:
        return [parse_ids(field, value)]
    items = array(field, value, max_items=max_items, what=f"{field}s")
    return [_parse_one(f"{field}[{i}]", item, parse_ids) for i, item in enumerate(items)]


def _parse_one(where: str, item: Any, parse_ids: ParseIds) -> Prompt:
    if isinstance(item, str):
        return item
    if isinstance(item, list):
        return parse_ids(where, item)
    raise BadField(where, got=item, want="a string or an array of token ids", code=WRONG_TYPE)


def parse_token_prompt(where: str, ids: Sequence[Any], facts: ModelProperties) -> tuple[int, ...]:
    """Token ids that exist, and at least one of them."""
    if not ids:
        raise BadField(where, got="an empty array", want="at least one token id", code="empty_array")
    if len(ids) > facts.max_model_len:  # before each id is looked at
        raise PromptTooLong(
            prompt_tokens=len(ids),
            max_tokens=1,
            limit=facts.max_model_len,
            param="prompt",
            model_len=facts.requests.max_positions,
        )
    return token_ids(where, ids, vocabulary=facts.vocabulary)


IGNORED_FIELDS = frozenset(
    {
        *("user", "metadata", "store", "safety_identifier", "verbosity", "reasoning_effort"),
        *("prompt_cache_retention", "prompt_cache_options", "prediction"),
    }
)
"""Fields that change nothing about an answer of this server."""

_OWN = frozenset(
    {
        *("model", "stream", "stream_options", "logprobs", "cache_salt", "prompt_cache_key", "return_token_ids"),
        *("skip_special_tokens", "include_stop_str_in_output", "truncate_prompt_tokens"),
    }
)
_COMMON = SAMPLING_FIELDS | GRAMMAR_FIELDS | IGNORED_FIELDS | _OWN | SERVICE_CLASS_FIELDS
_TEMPLATE = TOOL_FIELDS | {"add_generation_prompt", "continue_final_message", "chat_template_kwargs", "documents"}
_CHAT_LATER = frozenset(
    {
        *("functions", "function_call", "audio", "modalities", "web_search_options", "moderation"),
    }
)
CHAT_FIELDS = _COMMON | _TEMPLATE | _CHAT_LATER | {"messages", "max_completion_tokens", "top_logprobs"}
COMPLETION_FIELDS = _COMMON | {"prompt", "echo", "suffix", "best_of", "add_special_tokens"}
TOKENIZE_FIELDS = _TEMPLATE | {"model", "prompt", "messages", "add_special_tokens", "return_token_strs"}
DETOKENIZE_FIELDS = frozenset({"model", "tokens"})

MAX_SALT_CHARS = 256
STREAM_OPTIONS = ("include_usage", "include_obfuscation", "continuous_usage_stats")
_COMPLETION_MAX_TOKENS = 16
"""What OpenAI gives a completion that names no ``max_tokens``."""


class ChatInput(msgspec.Struct, frozen=True, kw_only=True):
    """What a template is given."""

    messages: list[Message]
    images: list[ImageUrl] = []
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    arguments: dict[str, Any] = {}
    documents: list[dict[str, Any]] | None = None
    tooling: ToolOptions = ToolOptions()


class StreamOptions(msgspec.Struct, frozen=True, kw_only=True):
    """``stream_options``, checked."""

    include_usage: bool = False
    continuous_usage: bool = False  # in every event


class GenerationFields(msgspec.Struct, frozen=True, kw_only=True):
    """What chats and completions have in common, checked."""

    sampling: SamplingFields
    stream: bool
    options: StreamOptions
    logprobs: int | None  # alternatives to report for each token
    cache_salt: str
    service: ServiceClass | None  # None: nothing is said
    session: str  # that the client says it belongs to
    token_ids: bool
    special: bool  # the text of special tokens is shown
    stop_shown: bool  # so is what ended the answer
    keep: int | None  # tokens of the prompt, the last; what is before them is cut off.  None: it is not cut
    grammar: RequestedGrammar | None  # what the answer must look like
    closed: bool  # objects of JSON schemas are closed


class ChatRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A checked body of ``/v1/chat/completions``."""

    call: GenerationFields
    text: ChatInput


class CompletionRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A checked body of ``/v1/completions``; prompts that are text are still to be encoded."""

    call: GenerationFields
    prompts: list[Prompt]
    echo: bool
    add_special_tokens: bool


class TokenizeRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A checked body of ``/tokenize``."""

    input: ChatInput | str
    add_special_tokens: bool
    token_strings: bool  # return the tokens' strings


def parse_chat(body: Mapping[str, Any], limits: RequestLimits, facts: ModelProperties) -> ChatRequest:
    """Raises RequestError, the model's name first."""
    refuse_unknown(body, CHAT_FIELDS, facts.requests)
    refuse_large(body, CHAT_FIELDS - IGNORED_FIELDS, limits.max_ignored_chars)
    fields = BodyFields(body)
    parse_model(fields, facts, required=True)
    images: list[ImageUrl] = []
    messages = _parse_messages(fields.required("messages"), limits, facts, images)
    refuse_later_chat_fields(fields)
    most = limits.default_max_tokens
    unnamed = "as many as the context leaves" if most is None else f"{most} at most"
    call = _parse_call(
        fields, limits, facts, logprobs=parse_chat_logprobs(fields, limits), min_allowed=1, unnamed=unnamed
    )
    call = _with_kept(call, fields, facts, most)
    if call.keep is not None and images:
        raise unsupported("truncate_prompt_tokens", "a chat with images is not cut.")
    return ChatRequest(call=call, text=parse_chat_text(fields, messages, images, limits))


def parse_completion(body: Mapping[str, Any], limits: RequestLimits, facts: ModelProperties) -> CompletionRequest:
    """Raises RequestError."""
    refuse_unknown(body, COMPLETION_FIELDS, facts.requests)
    refuse_large(body, COMPLETION_FIELDS - IGNORED_FIELDS, limits.max_ignored_chars)
    fields = BodyFields(body)
    parse_model(fields, facts, required=True)
    given = fields.required("prompt")
    if fields.string("suffix", max_chars=1 << 62):
        raise unsupported("suffix", "this server does not fill in the middle.")
    logprobs = fields.integer("logprobs", low=0, high=limits.max_top_logprobs)
    echo = fields.boolean("echo")
    unnamed = f"{_COMPLETION_MAX_TOKENS} at most"
    call = _parse_call(fields, limits, facts, logprobs=logprobs, min_allowed=0 if echo else 1, unnamed=unnamed)
    refuse_best_of(fields, call)
    if call.sampling.max_tokens is None:
        call = msgspec.structs.replace(
            call, sampling=msgspec.structs.replace(call.sampling, max_tokens=_COMPLETION_MAX_TOKENS)
        )
    call = _with_kept(call, fields, facts, None)
    return CompletionRequest(
        call=call,
        prompts=parse_prompts(given, limits, facts, keep=call.keep),
        echo=echo,
        add_special_tokens=fields.boolean("add_special_tokens", default=True),
    )


def parse_tokenize(body: Mapping[str, Any], limits: RequestLimits, facts: ModelProperties) -> TokenizeRequest:
    """Raises RequestError."""
    refuse_unknown(body, TOKENIZE_FIELDS, facts.requests)
    fields = BodyFields(body)
    parse_model(fields, facts, required=False)
    strings = fields.boolean("return_token_strs")
    if (fields.raw("prompt") is None) == (fields.raw("messages") is None):
        raise RequestError("Exactly one of 'prompt' and 'messages' is needed.", param="prompt")
    if fields.raw("messages") is not None:
        images: list[ImageUrl] = []
        messages = _parse_messages(fields.raw("messages"), limits, facts, images)
        return TokenizeRequest(
            input=parse_chat_text(fields, messages, images, limits),
            add_special_tokens=fields.boolean("add_special_tokens"),
            token_strings=strings,
        )
    return TokenizeRequest(
        input=string("prompt", fields.raw("prompt"), max_chars=limits.max_tokenize_chars),
        add_special_tokens=fields.boolean("add_special_tokens", default=True),
        token_strings=strings,
    )


def parse_detokenize(body: Mapping[str, Any], facts: ModelProperties) -> tuple[int, ...]:
    """Token ids, at most a whole context of them."""
    refuse_unknown(body, DETOKENIZE_FIELDS, facts.requests)
    fields = BodyFields(body)
    parse_model(fields, facts, required=False)
    ids = fields.required("tokens")
    if not isinstance(ids, list):
        raise BadField("tokens", got=ids, want="an array of token ids", code="invalid_type")
    return parse_token_prompt("tokens", ids, facts) if ids else ()


def parse_model(fields: BodyFields, facts: ModelProperties, *, required: bool) -> None:
    """The one model there is, by its name or an alias."""
    name = fields.required("model") if required else fields.raw("model")
    if name is None:
        return
    if not isinstance(name, str):
        raise BadField("model", got=name, want="a string", code="invalid_type")
    given = facts.requests.model_alias
    if name != facts.name and aliased_model(name, given) != facts.name:
        raise UnknownModel(name[:128], [facts.name, *facts.adapters, *(alias for alias, _ in plain_aliases(given))])


def parse_chat_text(
    fields: BodyFields, messages: list[Message], images: list[ImageUrl], limits: RequestLimits
) -> ChatInput:
    """The messages and their images, the tools, and how the template is to end."""
    continues = fields.boolean("continue_final_message")
    adds = fields.boolean("add_generation_prompt", default=not continues)
    if continues and adds:
        raise RequestError(
            "'continue_final_message' and 'add_generation_prompt' cannot both be true.",
            param="continue_final_message",
            code="invalid_parameter_combination",
        )
    if continues and (messages[-1]["role"] != "assistant" or messages[-1]["content"] is None):
        raise BadField("continue_final_message", got=True, want="a last message of the assistant, with text")
    return ChatInput(
        messages=messages,
        images=images,
        add_generation_prompt=adds,
        continue_final_message=continues,
        arguments=_parse_effort(fields) | parse_template_arguments(fields.raw("chat_template_kwargs"), RESERVED),
        documents=parse_documents(fields.raw("documents"), limits),
        tooling=parse_tooling(fields, limits),
    )


def _parse_effort(fields: BodyFields) -> dict[str, Any]:
    """``reasoning_effort`` for templates that ask for it; "none" is also said in the words of those that only know on
    and off."""
    effort = fields.string("reasoning_effort", max_chars=32)
    if effort is None:
        return {}
    return {"reasoning_effort": effort} | ({"enable_thinking": False, "thinking": False} if effort == "none" else {})


def parse_chat_logprobs(fields: BodyFields, limits: RequestLimits) -> int | None:
    """``logprobs`` switches them on, ``top_logprobs`` says how many alternatives."""
    wanted = fields.boolean("logprobs")
    top = fields.integer("top_logprobs", low=0, high=limits.max_top_logprobs)
    if top is not None and not wanted:
        raise RequestError(
            "'top_logprobs' needs 'logprobs' to be true.", param="top_logprobs", code="invalid_parameter_combination"
        )
    return (top or 0) if wanted else None


def refuse_later_chat_fields(fields: BodyFields) -> None:
    """What OpenAI's chats have and ours have not yet; values that ask for nothing pass."""
    if fields.raw("functions") not in (None, []) and fields.raw("function_call") != "none":
        raise unsupported("functions", "this server calls 'tools', not 'functions'.")
    if fields.raw("function_call") not in (None, "none", "auto"):
        raise unsupported("function_call", "this server calls 'tools', not 'functions'.")
    if fields.raw("modalities") not in (None, ["text"]):
        raise unsupported("modalities", "this server answers in text only.")
    for name in ("audio", "web_search_options", "moderation"):
        if fields.raw(name) is not None:
            raise unsupported(name, "this server does not have it.")


def refuse_best_of(fields: BodyFields, call: GenerationFields) -> None:
    """``best_of`` above ``n`` would compute choices that are not shown; equal to ``n`` it changes nothing."""
    best_of = fields.integer("best_of", low=1, high=128)
    if best_of is not None and best_of != call.sampling.n:
        raise unsupported("best_of", "this server shows every choice that it makes; 'best_of' may only equal 'n'.")


def _parse_messages(value: Any, limits: RequestLimits, facts: ModelProperties, images: list[ImageUrl]) -> list[Message]:
    lenient = facts.requests.unknown_fields == "ignore"
    return parse_messages(value, limits, images if facts.sees else None, lenient=lenient)


def _parse_call(
    fields: BodyFields,
    limits: RequestLimits,
    facts: ModelProperties,
    *,
    logprobs: int | None,
    min_allowed: int,
    unnamed: str,
) -> GenerationFields:
    """``min_allowed``: the least ``max_tokens``.  ``unnamed``: what a request without one gets, for the error."""
    stream = fields.boolean("stream")
    json = parse_json_form(fields, facts.requests)
    grammar = parse_grammar(fields, limits, json)
    return GenerationFields(
        sampling=parse_sampling(
            fields, limits, facts, LengthRules(least=min_allowed, unnamed=unnamed, always=grammar is not None)
        ),
        stream=stream,
        options=parse_stream_options(fields, facts.requests, stream=stream),
        logprobs=logprobs,
        cache_salt=parse_cache_salt(fields),
        service=parse_service(fields),
        session=fields.string("prompt_cache_key", max_chars=limits.max_session_chars) or "",
        token_ids=fields.boolean("return_token_ids"),
        special=not fields.boolean("skip_special_tokens", default=True),
        stop_shown=fields.boolean("include_stop_str_in_output"),
        keep=None,
        grammar=grammar,
        closed=json.closed,
    )


def _with_kept(
    call: GenerationFields, fields: BodyFields, facts: ModelProperties, default: int | None
) -> GenerationFields:
    """With ``truncate_prompt_tokens``: a count, or -1 for what the context leaves besides the output, which has
    ``default`` tokens where it names none."""
    name = "truncate_prompt_tokens"
    value = fields.raw(name)
    if value is None:
        return call
    if type(value) is int and value == -1:
        length = call.sampling.max_tokens if call.sampling.max_tokens is not None else default
        if length is None:
            raise BadField(name, got=-1, want="a number of tokens, or -1 together with 'max_tokens'")
        value = max(1, facts.max_model_len - max(1, length))
    keep = integer(name, value, low=1, high=facts.max_model_len)
    return msgspec.structs.replace(call, keep=keep)


def parse_stream_options(fields: BodyFields, config: RequestConfig, *, stream: bool) -> StreamOptions:
    """Only with ``stream``."""
    value = fields.raw("stream_options")
    if value is None:
        return StreamOptions()
    options = BodyFields(mapping("stream_options", value))
    if not stream:
        raise RequestError(
            "The 'stream_options' parameter is only allowed when 'stream' is enabled.",
            param="stream_options",
            code="invalid_parameter_combination",
        )
    unknown = next((name for name in value if name not in STREAM_OPTIONS), None)
    if unknown is not None and config.unknown_fields == "refuse":
        raise RequestError(
            f"Unknown parameter: 'stream_options.{unknown[:64]}'.", param="stream_options", code="unknown_parameter"
        )
    options.boolean("include_obfuscation")
    usage, continuous = options.boolean("include_usage"), options.boolean("continuous_usage_stats")
    return StreamOptions(include_usage=usage, continuous_usage=usage and continuous)


def parse_cache_salt(fields: BodyFields) -> str:
    """Requests with different salts share no cached pages."""
    salt = fields.string("cache_salt", max_chars=MAX_SALT_CHARS)
    if salt == "":
        raise BadField("cache_salt", got="", want="a string that is not empty", code="empty_string")
    return salt or ""
