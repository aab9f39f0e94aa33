"""The bodies of requests as JSON schemas, for OpenAPI: every field that the parsers know, with the limits they hold.

The parsers decide which fields a body has (``processing.requests.generation`` and its neighbors), and a test compares
the bounds.  Knows nothing about routes beyond their bodies.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from penstock.config.limits import RequestLimits
from penstock.processing.lora import LOAD_FIELDS, UNLOAD_FIELDS
from penstock.processing.pooling import CLASSIFY_FIELDS, EMBEDDINGS_FIELDS, RERANK_FIELDS
from penstock.processing.requests.anthropic import MESSAGES_FIELDS, PROMPT_FIELDS
from penstock.processing.requests.generation import (
    CHAT_FIELDS,
    COMPLETION_FIELDS,
    DETOKENIZE_FIELDS,
    MAX_SALT_CHARS,
    STREAM_OPTIONS,
    TOKENIZE_FIELDS,
)
from penstock.processing.requests.responses import RESPONSES_FIELDS
from penstock.processing.transcription import TRANSCRIPTION_FIELDS

Schema = dict[str, Any]

_TEXT: Schema = {"type": "string"}
_SWITCH: Schema = {"type": "boolean"}
_ANY: Schema = {"type": "object"}
_IDS: Schema = {"type": "array", "items": {"type": "integer", "minimum": 0}}
_TEXTS: Schema = {"type": "array", "items": _TEXT}
_PROMPT: Schema = {"anyOf": [_TEXT, _TEXTS, _IDS, {"type": "array", "items": _IDS}]}
_INT64 = 1 << 63


def request_schemas(limits: RequestLimits, *, unknown_fields: str = "refuse") -> Mapping[str, Schema]:
    """By path; ``unknown_fields``: as ``config.schema.RequestConfig``."""
    open_to_more = unknown_fields == "ignore"
    known = _fields(limits)

    def body(names: Collection[str], required: tuple[str, ...], **own: Schema) -> Schema:
        found = {name: own.get(name) or known.get(name, {}) for name in sorted(names)}
        return {"type": "object", "required": list(required), "properties": found, "additionalProperties": open_to_more}

    chat = body(CHAT_FIELDS, ("model", "messages"), logprobs=_SWITCH)
    top = limits.max_top_logprobs
    completion = body(COMPLETION_FIELDS, ("model", "prompt"), logprobs=_integer(0, top), max_tokens=_integer(0))
    message = body(MESSAGES_FIELDS, ("model", "messages", "max_tokens"), tool_choice=_ANY, output_config=_ANY)
    counted = body(PROMPT_FIELDS | {"model"}, ("model", "messages"), tool_choice=_ANY, output_config=_ANY)
    rerank = body(RERANK_FIELDS, ("query", "documents"))
    sound = body(TRANSCRIPTION_FIELDS, ("model", "file"), file={"type": "string", "format": "binary"}, prompt=_TEXT)
    return {
        "/v1/chat/completions": chat,
        "/v1/completions": completion,
        "/v1/responses": _responses_body(known, limits),
        "/v1/messages": message | {"additionalProperties": True},
        "/v1/messages/count_tokens": counted | {"additionalProperties": True},
        "/v1/embeddings": body(EMBEDDINGS_FIELDS, ("model", "input")),
        **dict.fromkeys(("/rerank", "/v1/rerank", "/v2/rerank"), rerank),
        "/classify": body(CLASSIFY_FIELDS, ("input",), input={}),
        **dict.fromkeys(("/v1/audio/transcriptions", "/v1/audio/translations"), sound),
        "/tokenize": body(TOKENIZE_FIELDS, (), prompt=_TEXT),
        "/detokenize": body(DETOKENIZE_FIELDS, ("tokens",)),
        "/v1/load_lora_adapter": body(LOAD_FIELDS, ("lora_name", "lora_path")),
        "/v1/unload_lora_adapter": body(UNLOAD_FIELDS, ("lora_name",)),
    }


def _responses_body(known: Mapping[str, Schema], limits: RequestLimits) -> Schema:
    """Open to more: fields that are not known are skipped."""
    own: dict[str, Schema] = {
        **dict.fromkeys(("store", "background"), _SWITCH),
        **dict.fromkeys(("metadata", "reasoning", "text", "stream_options"), _ANY),
        **dict.fromkeys(("instructions", "previous_response_id", "service_tier", "safety_identifier", "user"), _TEXT),
        "input": {"anyOf": [_TEXT, {"type": "array", "items": _ANY, "maxItems": limits.max_messages}]},
        "max_output_tokens": _integer(1),
        "max_tool_calls": _integer(0),
        "include": _TEXTS,
        "truncation": _one_of("auto", "disabled"),
    }
    fields = {name: own.get(name) or known.get(name, {}) for name in sorted(RESPONSES_FIELDS)}
    return {"type": "object", "required": ["model"], "properties": fields, "additionalProperties": True}


def _number(low: float, high: float) -> Schema:
    return {"type": "number", "minimum": low, "maximum": high}


def _integer(low: int, high: int | None = None) -> Schema:
    return {"type": "integer", "minimum": low} | ({} if high is None else {"maximum": high})


def _string(most: int) -> Schema:
    return {"type": "string", "maxLength": most}


def _one_of(*values: str) -> Schema:
    return {"type": "string", "enum": list(values)}


_SWITCHES = (
    *("add_generation_prompt", "add_special_tokens", "continue_final_message", "echo", "include_stop_str_in_output"),
    *("normalize", "parallel_tool_calls", "return_documents", "return_token_ids", "return_token_strs"),
    *("skip_special_tokens", "stream"),
)
_TEXTS_OF_ANY_KIND = (
    *("input_type", "language", "lora_name", "lora_path", "model", "prompt_name", "query", "reasoning_effort"),
    *("service_tier", "suffix", "user"),
)
_COUNTS = ("dimensions", "max_tokens_per_doc", "top_n")


def _fields(limits: RequestLimits) -> dict[str, Schema]:
    """By name, where a name means the same everywhere."""
    options = dict.fromkeys(STREAM_OPTIONS, _SWITCH)
    return {
        **dict.fromkeys(_SWITCHES, _SWITCH),
        **dict.fromkeys(_TEXTS_OF_ANY_KIND, _TEXT),
        **dict.fromkeys(_COUNTS, _integer(1)),
        **_sampling(limits),
        **_forms(limits),
        "messages": {"type": "array", "items": _ANY, "minItems": 1, "maxItems": limits.max_messages},
        "prompt": _PROMPT,
        "input": _PROMPT,
        "stream_options": {"type": "object", "properties": options, "additionalProperties": False},
        "top_logprobs": _integer(0, limits.max_top_logprobs),
        "cache_salt": _string(MAX_SALT_CHARS),
        "prompt_cache_key": _string(limits.max_session_chars),
        "priority": {"anyOf": [_TEXT, {"type": "integer"}]},
        "truncate_prompt_tokens": _integer(-1),
        "best_of": _integer(1, 128),
        "tokens": _IDS,
        "documents": {"type": "array"},
        "encoding_format": _one_of("float", "base64"),
    }


def _sampling(limits: RequestLimits) -> dict[str, Schema]:
    stop = _string(limits.max_stop_chars)
    return {
        "temperature": _number(0, 2),
        "top_p": {"type": "number", "exclusiveMinimum": 0, "maximum": 1},
        "top_k": _integer(-1, (1 << 31) - 1),
        "min_p": _number(0, 1),
        "presence_penalty": _number(-2, 2),
        "frequency_penalty": _number(-2, 2),
        "repetition_penalty": _number(0.01, 2),
        "logit_bias": _ANY | {"additionalProperties": _number(-100, 100), "maxProperties": limits.max_logit_bias},
        "seed": _integer(-_INT64, _INT64 - 1),
        "n": _integer(1, limits.max_n),
        "stop": {"anyOf": [stop, {"type": "array", "items": stop, "maxItems": limits.max_stops}]},
        "stop_token_ids": _IDS | {"maxItems": limits.max_stop_token_ids},
        "min_tokens": _integer(0),
        "max_tokens": _integer(1),
        "max_completion_tokens": _integer(1),
        "ignore_eos": _SWITCH,
    }


def _forms(limits: RequestLimits) -> dict[str, Schema]:
    texts = _TEXTS | {"minItems": 1, "maxItems": limits.max_grammar_choices}
    grammar = _string(limits.max_grammar_chars)
    return {
        "response_format": {"anyOf": [_ANY, _TEXT]},
        "structured_outputs": _ANY,
        "guided_json": {"anyOf": [_ANY, _SWITCH, grammar]},
        "guided_regex": grammar,
        "guided_choice": texts,
        "guided_grammar": grammar,
        "tools": {"type": "array", "items": _ANY, "maxItems": limits.max_tools},
        "tool_choice": {"anyOf": [_ANY, _one_of("none", "auto", "required")]},
        "chat_template_kwargs": _ANY,
    }
