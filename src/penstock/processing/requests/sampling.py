"""Fields that control sampling and length: one rule per field.

Knows nothing about the rest of a body.
"""

from __future__ import annotations

import secrets
from typing import Any

import msgspec

from penstock.config.limits import RequestLimits
from penstock.config.schema import RequestConfig
from penstock.errors import BadField, RequestError
from penstock.processing.requests.fields import (
    WRONG_TYPE,
    BodyFields,
    array,
    integer,
    mapping,
    number,
    string,
    token_ids,
)
from penstock.weights.config_json import LEAST_TEMPERATURE, SamplingDefaults

SAMPLING_FIELDS = frozenset(
    {
        *("temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty"),
        *("logit_bias", "seed", "n", "stop", "stop_token_ids", "min_tokens", "max_tokens", "ignore_eos"),
    }
)

_LEAST_REPETITION_PENALTY = 0.01
_INT64 = 1 << 63
_UINT64_MASK = (1 << 64) - 1
_DRAWN_SEED_BITS = 53
"""A drawn seed survives clients that keep JSON numbers as doubles."""


class ModelProperties(msgspec.Struct, frozen=True, kw_only=True):
    """What the fields' limits depend on."""

    name: str
    max_model_len: int
    vocabulary: int  # rows of the embedding: token ids below it exist
    end_tokens: tuple[int, ...]  # any of them ends an answer
    sees: bool = False  # images can be read into its chats
    sampling: SamplingDefaults = SamplingDefaults()  # of requests that do not say
    requests: RequestConfig = RequestConfig()
    adapters: tuple[str, ...] = ()  # other names that are served, for a refusal


class SamplingFields(msgspec.Struct, frozen=True, kw_only=True):
    """What all choices of one HTTP request have in common, checked."""

    seed: int  # as the client knows it
    n: int
    temperature: float
    top_p: float
    top_k: int | None
    min_p: float
    presence_penalty: float
    frequency_penalty: float
    repetition_penalty: float
    logit_bias: dict[int, float]
    stops: tuple[str, ...]
    stop_token_ids: tuple[int, ...]  # end tokens included unless ignore_eos was asked for
    min_tokens: int
    max_tokens: int | None  # None: as many as there is room for

    @property
    def key(self) -> int:
        """The seed as the generator's unsigned 64-bit key."""
        return self.seed & _UINT64_MASK


class LengthRules(msgspec.Struct, frozen=True, kw_only=True):
    """What else an answer's end depends on."""

    least: int = 1  # tokens that may be asked for; 0: its prompt alone may be wanted
    unnamed: str  # what an answer gets whose request names no length
    always: bool  # end tokens end it in any case


def parse_sampling(
    fields: BodyFields, limits: RequestLimits, facts: ModelProperties, ends: LengthRules
) -> SamplingFields:
    """All fields in ``SAMPLING_FIELDS`` (and ``max_completion_tokens``)."""
    max_tokens = parse_max_tokens(fields, facts.max_model_len, ends)
    suggested = facts.sampling
    return SamplingFields(
        seed=parse_seed(fields),
        n=fields.integer("n", low=1, high=limits.max_n) or 1,
        temperature=parse_temperature(fields, suggested),
        top_p=parse_top_p(fields, suggested),
        top_k=parse_top_k(fields, suggested),
        min_p=fields.number("min_p", low=0, high=1, default=suggested.min_p or 0.0),
        presence_penalty=fields.number("presence_penalty", low=-2, high=2, default=0.0),
        frequency_penalty=fields.number("frequency_penalty", low=-2, high=2, default=0.0),
        repetition_penalty=parse_repetition_penalty(fields, suggested),
        logit_bias=parse_logit_bias(fields, limits, facts),
        stops=parse_stop(fields, limits),
        stop_token_ids=parse_stop_token_ids(fields, limits, facts, ends=ends.always),
        min_tokens=parse_min_tokens(fields, max_tokens, facts.max_model_len),
        max_tokens=max_tokens,
    )


def parse_seed(fields: BodyFields) -> int:
    """A signed 64-bit integer; drawn when there is none."""
    given = fields.integer("seed", low=-_INT64, high=_INT64 - 1)
    return secrets.randbits(_DRAWN_SEED_BITS) if given is None else given


def parse_temperature(fields: BodyFields, suggested: SamplingDefaults) -> float:
    """0 (greedy), or a number that single precision can divide by."""
    default = 1.0 if suggested.temperature is None else suggested.temperature
    value = fields.number("temperature", low=0, high=2, default=default)
    if 0 < value < LEAST_TEMPERATURE:
        raise BadField("temperature", got=value, want=f"0 or a number from {LEAST_TEMPERATURE:g} to 2")
    return value


def parse_top_p(fields: BodyFields, suggested: SamplingDefaults) -> float:
    """Above 0, at most 1."""
    value = fields.number("top_p", low=0, high=1, default=suggested.top_p or 1.0)
    if value == 0:
        raise BadField("top_p", got=0, want="a number > 0", code="decimal_below_min_value")
    return value


def parse_top_k(fields: BodyFields, suggested: SamplingDefaults) -> int | None:
    """At least 1; 0 and -1 are vLLM's ways to say "all"."""
    value = fields.integer("top_k", low=-1, high=(1 << 31) - 1)
    if value is None:
        return suggested.top_k
    return value if value >= 1 else None


def parse_repetition_penalty(fields: BodyFields, suggested: SamplingDefaults) -> float:
    """1 changes nothing; bounded so that single precision can divide by it."""
    default = suggested.repetition_penalty or 1.0
    return fields.number("repetition_penalty", low=_LEAST_REPETITION_PENALTY, high=2, default=default)


def parse_logit_bias(fields: BodyFields, limits: RequestLimits, facts: ModelProperties) -> dict[int, float]:
    """An object from token ids, written as strings, to numbers from -100 to 100."""
    value = fields.raw("logit_bias")
    if value is None:
        return {}
    entries = mapping("logit_bias", value)
    if len(entries) > limits.max_logit_bias:
        raise BadField("logit_bias", got=f"{len(entries)} tokens", want=f"at most {limits.max_logit_bias} tokens")
    return {
        _token_key("logit_bias", key, facts.vocabulary): number(f"logit_bias.{key[:20]}", bias, low=-100, high=100)
        for key, bias in entries.items()
    }


def _token_key(name: str, key: str, vocabulary: int) -> int:
    # ASCII digits only, without a leading zero: two keys never mean one token.
    plain = key.isascii() and key.isdigit() and len(key) <= 10 and (key == "0" or key[0] != "0")
    if not plain or int(key) >= vocabulary:
        raise BadField(name, got=key, want=f"keys that are token ids from 0 to {vocabulary - 1}")
    return int(key)


def parse_stop(fields: BodyFields, limits: RequestLimits) -> tuple[str, ...]:
    """A string or a list of strings, none of them empty."""
    value = fields.raw("stop")
    if value is None:
        return ()
    words = [value] if isinstance(value, str) else array("stop", value, max_items=limits.max_stops, what="strings")
    for i, word in enumerate(words):
        name = "stop" if isinstance(value, str) else f"stop[{i}]"
        if string(name, word, max_chars=limits.max_stop_chars) == "":
            raise BadField(name, got=word, want="a string that is not empty", code="empty_string")
    return tuple(dict.fromkeys(words))


def parse_stop_token_ids(
    fields: BodyFields, limits: RequestLimits, facts: ModelProperties, *, ends: bool
) -> tuple[int, ...]:
    """The client's, and the model's end tokens unless ``ignore_eos``; those also where ``ends``."""
    value: Any = fields.raw("stop_token_ids")
    own = () if fields.boolean("ignore_eos") and not ends else facts.end_tokens
    if value is None:
        return own
    items = array("stop_token_ids", value, max_items=limits.max_stop_token_ids, what="token ids")
    return tuple(dict.fromkeys((*own, *token_ids("stop_token_ids", items, vocabulary=facts.vocabulary))))


def parse_max_tokens(fields: BodyFields, max_model_len: int, ends: LengthRules) -> int | None:
    """``max_tokens`` or ``max_completion_tokens``, not both."""
    if fields.raw("max_tokens") is not None and fields.raw("max_completion_tokens") is not None:
        raise RequestError(
            "Setting 'max_tokens' and 'max_completion_tokens' at the same time is not supported.",
            param="max_tokens",
            code="invalid_parameter_combination",
        )
    name = "max_tokens" if fields.raw("max_tokens") is not None else "max_completion_tokens"
    value = fields.raw(name)
    if value is None:
        return None
    if type(value) is int and value < ends.least:
        want = f"an integer >= {ends.least} (left out: {ends.unnamed})"
        raise BadField(name, got=value, want=want, code="integer_below_min_value")
    # Too many is a matter of the context.
    count = integer(name, value, low=ends.least, high=(1 << 31) - 1)
    if count > max_model_len:
        raise RequestError(
            f"'{name}' is too large: {count}. This model's maximum context length is {max_model_len} tokens, "
            "prompt and answer together.",
            param=name,
            code="context_length_exceeded",
        )
    return count


def parse_min_tokens(fields: BodyFields, max_tokens: int | None, max_model_len: int) -> int:
    """At most as many as may be written."""
    value = fields.raw("min_tokens")
    if value is None:
        return 0
    if type(value) is not int:
        raise BadField("min_tokens", got=value, want="an integer", code=WRONG_TYPE)
    return integer("min_tokens", value, low=0, high=max_model_len if max_tokens is None else max_tokens)
