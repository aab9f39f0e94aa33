"""The ``prompt`` of a completion: a string, token ids, or a list of either.

Knows nothing about how text becomes tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from penstock.config.schema import Limits
from penstock.errors import BadField, PromptTooLong
from penstock.intake.fields import WRONG_TYPE, array, token_ids
from penstock.intake.sampling_fields import ModelFacts

Prompt = str | tuple[int, ...]
"""Text still to be encoded, or token ids that were checked."""

_WANT = "a string, an array of strings, an array of token ids, or an array of such arrays"


def parse_prompts(value: object, limits: Limits, facts: ModelFacts) -> list[Prompt]:
    """At least one prompt.  A flat list of integers is one prompt."""
    if isinstance(value, str):
        return [value]
    if not isinstance(value, list):
        raise BadField("prompt", got=value, want=_WANT, code=WRONG_TYPE)
    if not value:
        raise BadField("prompt", got="an empty array", want=_WANT, code="empty_array")
    if type(value[0]) is int:
        return [parse_token_prompt("prompt", value, facts)]
    items = array("prompt", value, max_items=limits.max_prompts, what="prompts")
    return [_parse_one(f"prompt[{i}]", item, facts) for i, item in enumerate(items)]


def _parse_one(where: str, item: Any, facts: ModelFacts) -> Prompt:
    if isinstance(item, str):
        return item
    if isinstance(item, list):
        return parse_token_prompt(where, item, facts)
    raise BadField(where, got=item, want="a string or an array of token ids", code=WRONG_TYPE)


def parse_token_prompt(where: str, ids: Sequence[Any], facts: ModelFacts) -> tuple[int, ...]:
    """Token ids that exist, and at least one of them."""
    if not ids:
        raise BadField(where, got="an empty array", want="at least one token id", code="empty_array")
    if len(ids) > facts.max_model_len:  # before each id is looked at
        raise PromptTooLong(prompt_tokens=len(ids), max_tokens=1, limit=facts.max_model_len, param="prompt")
    return token_ids(where, ids, vocabulary=facts.vocabulary)
