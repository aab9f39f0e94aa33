"""A parsed JSON body to a checked call: which fields exist, which are ignored, which are refused, and by what name.

Unknown fields are refused as OpenAI refuses them, or passed over where the operator says so; fields that change nothing
here are accepted and ignored; fields that OpenAI has and this server has not yet are refused by name, never quietly
dropped.  One rule a field, in the ``*_fields`` modules.  Nothing below checks again.  Knows nothing about tokenizers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from penstock.config.limits import Limits
from penstock.config.schema import RequestConfig
from penstock.errors import BadField, RequestError, UnknownModel
from penstock.intake.fields import Fields, integer, mapping, refuse_large, refuse_unknown, string, unsupported
from penstock.intake.grammar_fields import GRAMMAR_FIELDS, Asked, parse_grammar, parse_json_form
from penstock.intake.message_fields import (
    ImageUrl,
    Message,
    parse_documents,
    parse_messages,
    parse_template_arguments,
)
from penstock.intake.prompt_fields import Prompt, parse_prompts, parse_token_prompt
from penstock.intake.sampling_fields import SAMPLING_FIELDS, Ends, ModelFacts, Sampling, parse_sampling
from penstock.intake.service_fields import SERVICE_CLASS_FIELDS, parse_service
from penstock.intake.template import RESERVED
from penstock.intake.tool_fields import TOOL_FIELDS, Tooling, parse_tooling
from penstock.types import ServiceClass

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


class ChatText(msgspec.Struct, frozen=True, kw_only=True):
    """What a template is given."""

    messages: list[Message]
    images: list[ImageUrl] = []
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    arguments: dict[str, Any] = {}
    documents: list[dict[str, Any]] | None = None
    tooling: Tooling = Tooling()


class StreamOptions(msgspec.Struct, frozen=True, kw_only=True):
    """``stream_options``, checked."""

    include_usage: bool = False
    continuous_usage: bool = False  # in every event


class Call(msgspec.Struct, frozen=True, kw_only=True):
    """What chats and completions have in common, checked."""

    sampling: Sampling
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
    grammar: Asked | None  # what the answer must look like
    closed: bool  # objects of JSON schemas are closed


class ChatCall(msgspec.Struct, frozen=True, kw_only=True):
    """A checked body of ``/v1/chat/completions``."""

    call: Call
    text: ChatText


class CompletionCall(msgspec.Struct, frozen=True, kw_only=True):
    """A checked body of ``/v1/completions``; prompts that are text are still to be encoded."""

    call: Call
    prompts: list[Prompt]
    echo: bool
    add_special_tokens: bool


def parse_chat(body: Mapping[str, Any], limits: Limits, facts: ModelFacts) -> ChatCall:
    """Raises RequestError, the model's name first: a wrong address is told before a wrong letter."""
    refuse_unknown(body, CHAT_FIELDS, facts.requests)
    refuse_large(body, CHAT_FIELDS - IGNORED_FIELDS, limits.max_ignored_chars)
    fields = Fields(body)
    parse_model(fields, facts, required=True)
    images: list[ImageUrl] = []
    messages = _parse_messages(fields.required("messages"), limits, facts, images)
    refuse_later_chat_fields(fields)
    most = limits.default_max_tokens
    unnamed = "as many as the context leaves" if most is None else f"{most} at most"
    call = _parse_call(fields, limits, facts, logprobs=parse_chat_logprobs(fields, limits), ends=(1, unnamed))
    call = _with_kept(call, fields, facts, most)
    if call.keep is not None and images:
        raise unsupported("truncate_prompt_tokens", "a chat with images is not cut.")
    return ChatCall(call=call, text=parse_chat_text(fields, (messages, images), limits))


def parse_completion(body: Mapping[str, Any], limits: Limits, facts: ModelFacts) -> CompletionCall:
    """Raises RequestError."""
    refuse_unknown(body, COMPLETION_FIELDS, facts.requests)
    refuse_large(body, COMPLETION_FIELDS - IGNORED_FIELDS, limits.max_ignored_chars)
    fields = Fields(body)
    parse_model(fields, facts, required=True)
    given = fields.required("prompt")
    if fields.string("suffix", max_chars=1 << 62):
        raise unsupported("suffix", "this server does not fill in the middle.")
    logprobs = fields.integer("logprobs", low=0, high=limits.max_top_logprobs)
    echo = fields.boolean("echo")
    ends = (0 if echo else 1, f"{_COMPLETION_MAX_TOKENS} at most")
    call = _parse_call(fields, limits, facts, logprobs=logprobs, ends=ends)
    refuse_best_of(fields, call)
    if call.sampling.max_tokens is None:
        call = msgspec.structs.replace(
            call, sampling=msgspec.structs.replace(call.sampling, max_tokens=_COMPLETION_MAX_TOKENS)
        )
    call = _with_kept(call, fields, facts, None)
    return CompletionCall(
        call=call,
        prompts=parse_prompts(given, limits, facts, keep=call.keep),
        echo=echo,
        add_special_tokens=fields.boolean("add_special_tokens", default=True),
    )


def parse_tokenize(body: Mapping[str, Any], limits: Limits, facts: ModelFacts) -> tuple[ChatText | str, bool, bool]:
    """What to tokenize, whether with special tokens, and whether to tell the tokens' strings."""
    refuse_unknown(body, TOKENIZE_FIELDS, facts.requests)
    fields = Fields(body)
    parse_model(fields, facts, required=False)
    strings = fields.boolean("return_token_strs")
    if (fields.raw("prompt") is None) == (fields.raw("messages") is None):
        raise RequestError("Exactly one of 'prompt' and 'messages' is needed.", param="prompt")
    if fields.raw("messages") is not None:
        images: list[ImageUrl] = []
        messages = _parse_messages(fields.raw("messages"), limits, facts, images)
        return parse_chat_text(fields, (messages, images), limits), fields.boolean("add_special_tokens"), strings
    prompt = fields.raw("prompt")
    return (
        string("prompt", prompt, max_chars=limits.max_tokenize_chars),
        fields.boolean("add_special_tokens", default=True),
        strings,
    )


def parse_detokenize(body: Mapping[str, Any], facts: ModelFacts) -> tuple[int, ...]:
    """Token ids, at most a whole context of them."""
    refuse_unknown(body, DETOKENIZE_FIELDS, facts.requests)
    fields = Fields(body)
    parse_model(fields, facts, required=False)
    ids = fields.required("tokens")
    if not isinstance(ids, list):
        raise BadField("tokens", got=ids, want="an array of token ids", code="invalid_type")
    return parse_token_prompt("tokens", ids, facts) if ids else ()


def parse_model(fields: Fields, facts: ModelFacts, *, required: bool) -> None:
    """The one model there is."""
    name = fields.required("model") if required else fields.raw("model")
    if name is None:
        return
    if not isinstance(name, str):
        raise BadField("model", got=name, want="a string", code="invalid_type")
    if name != facts.name:
        raise UnknownModel(name[:128], facts.name)


def parse_chat_text(fields: Fields, given: tuple[list[Message], list[ImageUrl]], limits: Limits) -> ChatText:
    """The messages and their images, the tools, and how the template is to end."""
    messages, images = given
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
    return ChatText(
        messages=messages,
        images=images,
        add_generation_prompt=adds,
        continue_final_message=continues,
        arguments=_parse_effort(fields) | parse_template_arguments(fields.raw("chat_template_kwargs"), RESERVED),
        documents=parse_documents(fields.raw("documents"), limits),
        tooling=parse_tooling(fields, limits),
    )


def _parse_effort(fields: Fields) -> dict[str, Any]:
    """``reasoning_effort`` for templates that ask for it; "none" is also said in the words of those that only know on
    and off."""
    effort = fields.string("reasoning_effort", max_chars=32)
    if effort is None:
        return {}
    return {"reasoning_effort": effort} | ({"enable_thinking": False, "thinking": False} if effort == "none" else {})


def parse_chat_logprobs(fields: Fields, limits: Limits) -> int | None:
    """``logprobs`` switches them on, ``top_logprobs`` says how many alternatives."""
    wanted = fields.boolean("logprobs")
    top = fields.integer("top_logprobs", low=0, high=limits.max_top_logprobs)
    if top is not None and not wanted:
        raise RequestError(
            "'top_logprobs' needs 'logprobs' to be true.", param="top_logprobs", code="invalid_parameter_combination"
        )
    return (top or 0) if wanted else None


def refuse_later_chat_fields(fields: Fields) -> None:
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


def refuse_best_of(fields: Fields, call: Call) -> None:
    """``best_of`` above ``n`` would need choices that nobody sees; equal to ``n`` it changes nothing."""
    best_of = fields.integer("best_of", low=1, high=128)
    if best_of is not None and best_of != call.sampling.n:
        raise unsupported("best_of", "this server shows every choice that it makes; 'best_of' may only equal 'n'.")


def _parse_messages(value: Any, limits: Limits, facts: ModelFacts, images: list[ImageUrl]) -> list[Message]:
    lenient = facts.requests.unknown_fields == "ignore"
    return parse_messages(value, limits, images if facts.sees else None, lenient=lenient)


def _parse_call(
    fields: Fields, limits: Limits, facts: ModelFacts, *, logprobs: int | None, ends: tuple[int, str]
) -> Call:
    """``ends``: the fewest tokens that may be asked for, and what is said of no number."""
    stream = fields.boolean("stream")
    json = parse_json_form(fields, facts.requests)
    grammar = parse_grammar(fields, limits, json)
    least, unnamed = ends
    return Call(
        sampling=parse_sampling(fields, limits, facts, Ends(least=least, unnamed=unnamed, always=grammar is not None)),
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


def _with_kept(call: Call, fields: Fields, facts: ModelFacts, default: int | None) -> Call:
    """With ``truncate_prompt_tokens``: so many tokens, or -1 for what the context leaves beside the answer, which has
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


def parse_stream_options(fields: Fields, config: RequestConfig, *, stream: bool) -> StreamOptions:
    """Only with ``stream``."""
    value = fields.raw("stream_options")
    if value is None:
        return StreamOptions()
    options = Fields(mapping("stream_options", value))
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


def parse_cache_salt(fields: Fields) -> str:
    """Requests with different salts share no cached pages."""
    salt = fields.string("cache_salt", max_chars=MAX_SALT_CHARS)
    if salt == "":
        raise BadField("cache_salt", got="", want="a string that is not empty", code="empty_string")
    return salt or ""
