"""The control tokens of a model that hears, and what it may not write: out of its tokenizer and generation config."""

from __future__ import annotations

import re
from typing import Any

import msgspec

from penstock.errors import ModelError
from penstock.intake.tokenizer import TextTokenizer
from penstock.weights.config_json import ConfigFields
from penstock.weights.model_files import CONFIG, GENERATION_CONFIG, ModelFiles, load_json

_LANGUAGE = re.compile(r"<\|([a-z]{2,3})\|>")

MULTILINGUAL_FROM = 51_865
"""Models of so many tokens know languages, where nothing else says so (openai/whisper, ``is_multilingual``)."""

ENGLISH = "en"


class Words(msgspec.Struct, frozen=True, kw_only=True):
    """Token ids."""

    start: int
    before: int  # stands in front of what was said before
    plain: int  # asks for a text without times
    tasks: dict[str, int]
    languages: dict[str, int]  # none: the model knows English only, and no tasks
    ends: tuple[int, ...]
    banned: tuple[int, ...]
    banned_first: tuple[int, ...]
    vocabulary: int

    def prompt(self, language: str, task: str) -> tuple[int, ...]:
        """What an answer in this language begins with."""
        if not self.languages:
            return (self.start, self.plain)
        return (self.start, self.languages[language], self.tasks[task], self.plain)

    def all_but_languages(self) -> tuple[int, ...]:
        """What is not drawn where only a language is asked for."""
        kept = set(self.languages.values())
        return tuple(token for token in range(self.vocabulary) if token not in kept)

    def language_of(self, token: int) -> str:
        """The language that a token stands for."""
        return next((name for name, own in self.languages.items() if own == token), ENGLISH)


def read_words(files: ModelFiles, tokenizer: TextTokenizer) -> Words:
    """Raises ModelError where the tokenizer lacks one of them, or a list names what is no token."""
    config = ConfigFields(load_json(files, CONFIG) or {}, files.path_of(CONFIG))
    generation = ConfigFields(load_json(files, GENERATION_CONFIG) or {}, files.path_of(GENERATION_CONFIG))
    vocabulary = config.positive_int("vocab_size")
    several = generation.get("is_multilingual", bool, vocabulary >= MULTILINGUAL_FROM)

    def token(name: str) -> int:
        found = tokenizer.special_id(name)
        if found is None or found >= vocabulary:
            raise ModelError(
                f"{config.where}: the tokenizer beside it has no special token {name}, which is asked with"
            )
        return found

    tokens = sorted(own for own in tokenizer.table.special if own < vocabulary)
    names = zip(tokenizer.token_strings(tokens), tokens, strict=True)
    languages = {found[1]: own for name, own in names if (found := _LANGUAGE.fullmatch(name))} if several else {}
    if several and not languages:
        raise ModelError(f"{config.where}: the tokenizer beside it has no languages, as <|{ENGLISH}|>")
    source = generation if generation.has("eos_token_id") else config
    banned, first = (
        _ids(generation, config, name, vocabulary) for name in ("suppress_tokens", "begin_suppress_tokens")
    )
    return Words(
        start=token("<|startoftranscript|>"),
        before=token("<|startofprev|>"),
        plain=token("<|notimestamps|>"),
        tasks={name: token(f"<|{name}|>") for name in ("transcribe", "translate")} if several else {},
        languages=languages,
        ends=source.token_ids("eos_token_id"),
        banned=banned,
        banned_first=first,
        vocabulary=vocabulary,
    )


def _ids(generation: ConfigFields, config: ConfigFields, name: str, vocabulary: int) -> tuple[int, ...]:
    """The list in the generation config, or, of older releases, in the configuration."""
    source = generation if generation.has(name) else config
    values: list[Any] = source.get(name, list, [])
    if not all(type(own) is int and own < vocabulary for own in values):
        raise source.error(f"{name} must be ids below {vocabulary}, got {values!r:.80}")
    return tuple(own for own in values if own >= 0)
