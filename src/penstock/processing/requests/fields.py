"""Parsers for one kind of value each, and the words of every refusal.

JSON's ``null`` counts as absent, as with OpenAI.  Every refusal names field, value and limit.  Knows nothing about the
fields' meaning.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from difflib import get_close_matches
from functools import cache
from typing import Annotated, Any

import msgspec

from penstock.config.schema import RequestConfig
from penstock.errors import BadField, RequestError

WRONG_TYPE = "invalid_type"

_WEIGHED_AT_A_TIME = 1024
"""Values before others get a turn: some 0.2 ms."""
_STRICT = RequestConfig()


class BodyFields:
    """One JSON object, asked field by field."""

    def __init__(self, body: Mapping[str, Any]) -> None:
        self._body = body

    def raw(self, name: str) -> Any:
        """The value as it came; None when it is absent or null."""
        return self._body.get(name)

    def required(self, name: str) -> Any:
        """The value of a field that must be there."""
        value = self._body.get(name)
        if value is None:
            raise RequestError(f"Missing required parameter: '{name}'.", param=name, code="missing_required_parameter")
        return value

    def boolean(self, name: str, *, default: bool = False) -> bool:
        value = self._body.get(name)
        return default if value is None else boolean(name, value)

    def integer(self, name: str, *, low: int, high: int) -> int | None:
        value = self._body.get(name)
        return None if value is None else integer(name, value, low=low, high=high)

    def number(self, name: str, *, low: float, high: float, default: float) -> float:
        value = self._body.get(name)
        return default if value is None else number(name, value, low=low, high=high)

    def string(self, name: str, *, max_chars: int) -> str | None:
        value = self._body.get(name)
        return None if value is None else string(name, value, max_chars=max_chars)


def boolean(name: str, value: object) -> bool:
    """``true`` or ``false``, nothing that looks like them."""
    if not isinstance(value, bool):
        raise BadField(name, got=value, want="a boolean", code=WRONG_TYPE)
    return value


def integer(name: str, value: object, *, low: int, high: int) -> int:
    """A whole number from ``low`` to ``high``, written without a point."""
    if type(value) is not int:
        raise BadField(name, got=value, want="an integer", code=WRONG_TYPE)
    if value < low:
        raise BadField(name, got=value, want=f"an integer >= {low}", code="integer_below_min_value")
    if value > high:
        raise BadField(name, got=value, want=f"an integer <= {high}", code="integer_above_max_value")
    return value


def number(name: str, value: object, *, low: float, high: float) -> float:
    """A number from ``low`` to ``high``."""
    if type(value) is not int and type(value) is not float:
        raise BadField(name, got=value, want="a number", code=WRONG_TYPE)
    if value < low:
        raise BadField(name, got=value, want=f"a number >= {low:g}", code="decimal_below_min_value")
    if value > high:
        raise BadField(name, got=value, want=f"a number <= {high:g}", code="decimal_above_max_value")
    return float(value)


def string(name: str, value: object, *, max_chars: int) -> str:
    """A string of at most ``max_chars`` characters."""
    if not isinstance(value, str):
        raise BadField(name, got=value, want="a string", code=WRONG_TYPE)
    if len(value) > max_chars:
        raise BadField(
            name,
            got=f"a string of {len(value)} characters",
            want=f"a string of at most {max_chars} characters",
            code="string_above_max_length",
        )
    return value


def array(name: str, value: object, *, max_items: int, what: str) -> Sequence[Any]:
    """A list of at most ``max_items`` items."""
    if not isinstance(value, list):
        raise BadField(name, got=value, want=f"an array of {what}", code=WRONG_TYPE)
    if len(value) > max_items:
        raise BadField(
            name,
            got=f"an array of {len(value)}",
            want=f"an array of at most {max_items} {what}",
            code="array_above_max_length",
        )
    return value


def mapping(name: str, value: object) -> Mapping[str, Any]:
    """An object."""
    if not isinstance(value, dict):
        raise BadField(name, got=value, want="an object", code=WRONG_TYPE)
    return value


def token_ids(name: str, value: Sequence[Any], *, vocabulary: int) -> tuple[int, ...]:
    """Ids of tokens that exist.  ``value`` is a list of a length that was checked."""
    try:
        ids: tuple[int, ...] = msgspec.convert(value, _ids_below(vocabulary))
    except msgspec.ValidationError as error:
        for item in value:
            if type(item) is not int:
                raise BadField(name, got=item, want="an integer token id", code=WRONG_TYPE) from error
            if not 0 <= item < vocabulary:
                raise BadField(name, got=item, want=f"token ids from 0 to {vocabulary - 1}") from error
        raise
    return ids


@cache
def _ids_below(vocabulary: int) -> Any:
    """A type that is checked three times as fast as a loop in Python could: 100,000 ids in a millisecond."""
    return tuple[Annotated[int, msgspec.Meta(ge=0, lt=vocabulary)], ...]


FOREIGN_FIELDS = {
    "repeat_penalty": "repetition_penalty",
    "n_predict": "max_tokens",
    "num_predict": "max_tokens",
    "max_new_tokens": "max_tokens",
    "max_output_tokens": "max_tokens",
    "max_gen_toks": "max_tokens",
    "num_ctx": "--max-model-len of penstock serve",
    "n_ctx": "--max-model-len of penstock serve",
    "random_seed": "seed",
    "stop_sequences": "stop",
    "format": "response_format",
    "json_schema": "response_format",
    "grammar": "structured_outputs.grammar",
    "regex": "structured_outputs.regex",
    "ebnf": "structured_outputs.grammar",
    "enable_thinking": "chat_template_kwargs.enable_thinking",
    "add_bos_token": "add_special_tokens",
    "cache_prompt": "always so",
    "keep_alive": "a catalogue's (docs/catalogue.md)",
}
"""Fields of other servers, and what they are called here."""


def refuse_unknown(body: Mapping[str, Any], known: Collection[str], config: RequestConfig = _STRICT) -> None:
    """As OpenAI words it, and what may have been meant; nothing where unknown fields are passed over."""
    unknown = [name for name in body if name not in known]
    if unknown and config.unknown_fields == "refuse":
        plural = "s" if len(unknown) > 1 else ""
        names = [name[:64] for name in unknown[:16]]
        hints = "; ".join(hint for name in names if (hint := _hint(name, known)))
        also = f" ({hints})" if hints else ""
        raise RequestError(f"Unrecognized request argument{plural} supplied: {', '.join(names)}{also}")


def _hint(name: str, known: Collection[str]) -> str:
    meant = FOREIGN_FIELDS.get(name)
    if meant is not None and (meant in known or not meant.isidentifier()):
        return f"{name}: here {meant}"
    near = get_close_matches(name, known, n=1, cutoff=0.75)
    return f"{name}: did you mean {near[0]}?" if near else ""


def refuse_large(body: Mapping[str, Any], used: Collection[str], most: int) -> None:
    """Fields that are not ``used`` may not be large either: they are kept as long as the request is prepared."""
    for name in body:
        if name not in used and (chars := weight(body[name], most)) > most:
            raise BadField(
                name[:64],
                got=f"{chars} characters or more",
                want=f"at most {most} characters, in a field that changes nothing here (max_ignored_chars)",
                code="string_above_max_length",
            )


def weight(value: Any, most: int) -> int:
    """Characters in all texts and keys within ``value``, and one for each value: about what it takes when it is written
    out.  Looks no further once there are more than ``most``."""
    return max(weights(value, most))


def weights(value: Any, most: int) -> Iterator[int]:
    """The same as it grows, once every thousand values or so; the last is the weight."""
    waiting, chars, seen = [value], 0, 0
    while waiting and chars <= most:
        item = waiting.pop()
        chars += 1
        seen += 1
        if seen % _WEIGHED_AT_A_TIME == 0:
            yield chars
        if isinstance(item, str):
            chars += len(item)
        elif isinstance(item, dict):
            chars += sum(map(len, item))
            waiting.extend(item.values())
        elif isinstance(item, list | tuple):
            if len(item) > most - chars:
                yield chars + len(item)
                return
            waiting.extend(item)
    yield chars


def unsupported(name: str, why: str) -> RequestError:
    """A field or value that OpenAI has and this server does not."""
    return RequestError(f"Unsupported value for '{name}': {why}", param=name, code="unsupported_value")
