"""Bodies of ``/v1/embeddings``, ``/rerank`` and ``/classify`` to checked calls: one rule a field.

Unknown fields are refused as for chats.  Knows nothing about tokenizers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from penstock.config.limits import Limits
from penstock.errors import BadField
from penstock.intake.fields import WRONG_TYPE, Fields, array, integer, refuse_unknown, string, token_ids
from penstock.intake.prompt_fields import Prompt, texts_or_ids
from penstock.intake.sampling_fields import ModelFacts
from penstock.intake.validate import parse_model

Input = Prompt
"""As of a completion; token ids have their special tokens already."""

EMBEDDINGS_FIELDS = frozenset(
    {
        *("model", "input", "encoding_format", "dimensions", "user"),
        *("prompt_name", "input_type", "normalize", "truncate_prompt_tokens"),
    }
)
RERANK_FIELDS = frozenset({"model", "query", "documents", "top_n", "return_documents", "max_tokens_per_doc", "user"})
CLASSIFY_FIELDS = frozenset({"model", "input", "truncate_prompt_tokens", "user"})


class EmbeddingsCall(msgspec.Struct, frozen=True, kw_only=True):
    """A checked body of ``/v1/embeddings``."""

    inputs: list[Input]
    base64: bool
    dimensions: int | None
    normalised: bool | None
    prompt_name: str | None
    cut: int | None  # tokens that a text may have; the rest is cut off.  None: too long a text is refused


class RerankCall(msgspec.Struct, frozen=True, kw_only=True):
    """A checked body of ``/rerank``."""

    query: str
    documents: list[str]
    top: int
    tell_documents: bool
    cut: int | None  # tokens that a document may have


class ClassifyCall(msgspec.Struct, frozen=True, kw_only=True):
    """A checked body of ``/classify``: texts, or pairs of them."""

    inputs: list[Input | tuple[str, str]]
    cut: int | None


def parse_embeddings(body: Mapping[str, Any], limits: Limits, facts: ModelFacts, width: int) -> EmbeddingsCall:
    """``width``: numbers of a whole vector.  Raises RequestError."""
    refuse_unknown(body, EMBEDDINGS_FIELDS, facts.requests)
    fields = Fields(body)
    parse_model(fields, facts, required=True)
    form = fields.raw("encoding_format") or "float"
    if form not in ("float", "base64"):
        raise BadField("encoding_format", got=form, want="'float' or 'base64'")
    normalise = fields.raw("normalize")
    return EmbeddingsCall(
        inputs=parse_inputs(fields.required("input"), limits, facts),
        base64=form == "base64",
        dimensions=fields.integer("dimensions", low=1, high=width),
        normalised=None if normalise is None else fields.boolean("normalize"),
        prompt_name=_prompt_name(fields),
        cut=_cut(fields, facts),
    )


def parse_rerank(body: Mapping[str, Any], limits: Limits, facts: ModelFacts) -> RerankCall:
    """Raises RequestError."""
    refuse_unknown(body, RERANK_FIELDS, facts.requests)
    fields = Fields(body)
    parse_model(fields, facts, required=False)
    query = string("query", fields.required("query"), max_chars=limits.max_body_bytes)
    if not query:
        raise BadField("query", got="", want="a string that is not empty", code="empty_string")
    given = array("documents", fields.required("documents"), max_items=limits.max_inputs, what="documents")
    if not given:
        raise BadField("documents", got="an empty array", want="at least one document", code="empty_array")
    documents = [_document(f"documents[{index}]", item, limits) for index, item in enumerate(given)]
    return RerankCall(
        query=query,
        documents=documents,
        top=fields.integer("top_n", low=1, high=1 << 31) or len(documents),
        tell_documents=fields.boolean("return_documents"),
        cut=fields.integer("max_tokens_per_doc", low=1, high=1 << 31),
    )


def parse_classify(body: Mapping[str, Any], limits: Limits, facts: ModelFacts) -> ClassifyCall:
    """Raises RequestError."""
    refuse_unknown(body, CLASSIFY_FIELDS, facts.requests)
    fields = Fields(body)
    parse_model(fields, facts, required=False)
    value = fields.required("input")
    cut = _cut(fields, facts)
    if isinstance(value, dict):
        return ClassifyCall(inputs=[_pair("input", value, limits)], cut=cut)
    if isinstance(value, list) and any(isinstance(item, dict) for item in value):
        items = array("input", value, max_items=limits.max_inputs, what="inputs")
        return ClassifyCall(inputs=[_pair(f"input[{i}]", item, limits) for i, item in enumerate(items)], cut=cut)
    return ClassifyCall(inputs=[*parse_inputs(value, limits, facts)], cut=cut)


def parse_inputs(value: object, limits: Limits, facts: ModelFacts) -> list[Input]:
    """At least one input, of any length: what is too long may be cut."""

    def parse_ids(where: str, ids: Sequence[Any]) -> tuple[int, ...]:
        return _ids(where, ids, facts)

    return texts_or_ids("input", value, limits.max_inputs, parse_ids)


def _ids(where: str, ids: Sequence[Any], facts: ModelFacts) -> tuple[int, ...]:
    if not ids:
        raise BadField(where, got="an empty array", want="at least one token id", code="empty_array")
    return token_ids(where, ids, vocabulary=facts.vocabulary)


def _pair(where: str, item: Any, limits: Limits) -> tuple[str, str]:
    if not isinstance(item, dict) or set(item) != {"text", "text_pair"}:
        raise BadField(where, got=item, want="an object with 'text' and 'text_pair'", code=WRONG_TYPE)
    first, second = (string(f"{where}.{key}", item[key], max_chars=limits.max_body_bytes) for key in sorted(item))
    return first, second


def _document(where: str, item: Any, limits: Limits) -> str:
    text = item.get("text") if isinstance(item, dict) and set(item) == {"text"} else item
    if not isinstance(text, str):
        raise BadField(where, got=item, want="a string or an object with 'text'", code=WRONG_TYPE)
    return string(where, text, max_chars=limits.max_body_bytes)


def _prompt_name(fields: Fields) -> str | None:
    """``input_type`` is what others call it."""
    for name in ("prompt_name", "input_type"):
        value = fields.string(name, max_chars=256)
        if value is not None:
            return value
    return None


def _cut(fields: Fields, facts: ModelFacts) -> int | None:
    """``truncate_prompt_tokens``: so many, or -1 for what the model reads."""
    value = fields.raw("truncate_prompt_tokens")
    if value == -1 and type(value) is int:
        return facts.max_model_len
    if value is None:
        return None
    return integer("truncate_prompt_tokens", value, low=1, high=facts.max_model_len)
