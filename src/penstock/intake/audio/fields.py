"""The form of a transcription, as OpenAI has it: every field checked, with the words of every refusal."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from typing import Any

import msgspec

from penstock.config.limits import Limits
from penstock.errors import BadField, RequestError, UnknownModel
from penstock.intake.fields import Fields, refuse_unknown, string, unsupported
from penstock.intake.sampling_fields import ModelFacts, parse_seed, parse_temperature
from penstock.wire.ports import Form

FORMS = ("json", "text", "verbose_json", "srt", "vtt")

TRANSCRIPTION_FIELDS = frozenset(
    {
        *("file", "model", "language", "prompt", "response_format", "temperature", "stream", "seed", "cache_salt"),
        *("timestamp_granularities[]", "include[]", "chunking_strategy"),
    }
)
MAX_SALT_CHARS = 256


class Asked(msgspec.Struct, frozen=True, kw_only=True):
    """A checked form."""

    raw: bytes  # the file
    language: str | None  # None: it is to be heard
    prompt: str
    form: str  # of the answer
    temperature: float
    seed: int
    stream: bool
    cache_salt: str


def parse_form(form: Form, limits: Limits, facts: ModelFacts, languages: Collection[str]) -> Asked:
    """Raises RequestError.  ``languages``: that can be named; of one alone none need be."""
    refuse_unknown({**form.fields, **form.files}, TRANSCRIPTION_FIELDS, facts.requests)
    single = {name: _single(name, values) for name, values in form.fields.items() if not name.endswith("[]")}
    _parse_model(single.get("model"), facts.name)
    if "file" not in form.files:
        raise RequestError(
            "Missing required parameter: 'file', as a part with a file name.",
            param="file",
            code="missing_required_parameter",
        )
    answer, stream = single.get("response_format", "json"), _boolean("stream", single.get("stream"))
    if answer not in FORMS:
        raise BadField("response_format", got=answer, want=f"one of {', '.join(FORMS)}")
    if stream and answer not in ("json", "text"):
        raise unsupported("response_format", f"{answer} cannot be streamed; json and text can.")
    _refuse_others(form, single)
    numbers = Fields({"temperature": _number(single.get("temperature", "0")), "seed": _whole(single.get("seed"))})
    return Asked(
        raw=form.files["file"],
        language=_language(single.get("language"), languages),
        prompt=string("prompt", single.get("prompt", ""), max_chars=limits.max_audio_prompt_chars),
        form=answer,
        temperature=parse_temperature(numbers, facts.sampling),
        seed=parse_seed(numbers),
        stream=stream,
        cache_salt=string("cache_salt", single.get("cache_salt", ""), max_chars=MAX_SALT_CHARS),
    )


def _single(name: str, values: Sequence[str]) -> str:
    if len(values) > 1:
        raise BadField(name, got=f"{len(values)} values", want="one value")
    return values[0]


def _parse_model(given: str | None, model: str) -> None:
    if given is None:
        raise RequestError("Missing required parameter: 'model'.", param="model", code="missing_required_parameter")
    if given != model:
        raise UnknownModel(given[:128], model)


def _language(given: str | None, languages: Collection[str]) -> str | None:
    if not given:
        return next(iter(languages)) if len(languages) == 1 else None
    if given.lower() not in languages:
        raise BadField("language", got=given, want=f"one of {', '.join(sorted(languages))}")
    return given.lower()


def _refuse_others(form: Form, single: dict[str, str]) -> None:
    """What OpenAI has and this server does not; what asks for nothing passes."""
    for wanted in form.fields.get("timestamp_granularities[]", ()):
        if wanted != "segment":
            raise unsupported("timestamp_granularities[]", "times are told of whole segments only ('segment').")
    if form.fields.get("include[]"):
        raise unsupported("include[]", "nothing can be included; verbose_json tells avg_logprob of every segment.")
    if single.get("chunking_strategy", "auto") != "auto":
        raise unsupported("chunking_strategy", "long sounds are cut at quiet places ('auto').")


def _boolean(name: str, given: str | None) -> bool:
    if given is None:
        return False
    if given.lower() not in ("true", "false"):
        raise BadField(name, got=given, want="true or false", code="invalid_type")
    return given.lower() == "true"


def _number(given: str) -> Any:
    """The number that a text says; the text itself where it says none, to be refused."""
    try:
        number = float(given)
    except ValueError:
        return given
    return number if math.isfinite(number) else given


def _whole(given: str | None) -> Any:
    return int(given) if given is not None and given.removeprefix("-").isdecimal() and len(given) < 21 else given
