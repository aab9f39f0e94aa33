"""The ``prompt`` of a completion, and other fields of its form: a string, token ids, or a list of either.

Knows nothing about how text becomes tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from penstock.config.limits import Limits
from penstock.errors import BadField, PromptTooLong
from penstock.intake.fields import WRONG_TYPE, array, token_ids
from penstock.intake.sampling_fields import ModelFacts

Prompt = str | tuple[int, ...]
"""Text still to be encoded, or token ids that were checked."""

ParseIds = Callable[[str, Sequence[Any]], tuple[int, ...]]
"""From a field's name and an array to token ids that were checked."""

_WANT = "a string, an array of strings, an array of token ids, or an array of such arrays"


def parse_prompts(value: object, limits: Limits, facts: ModelFacts, *, keep: int | None = None) -> list[Prompt]:
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


def parse_token_prompt(where: str, ids: Sequence[Any], facts: ModelFacts) -> tuple[int, ...]:
    """Token ids that exist, and at least one of them."""
    if not ids:
        raise BadField(where, got="an empty array", want="at least one token id", code="empty_array")
    if len(ids) > facts.max_model_len:  # before each id is looked at
        raise PromptTooLong(prompt_tokens=len(ids), max_tokens=1, limit=facts.max_model_len, param="prompt")
    return token_ids(where, ids, vocabulary=facts.vocabulary)
