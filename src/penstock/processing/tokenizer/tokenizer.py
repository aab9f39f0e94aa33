"""Text to token ids with the ``tokenizers`` library, outside the event loop.

The library's ``encode_batch_fast`` works without the interpreter lock; texts above ``INLINE_CHARS`` run on a small
thread pool, so that a prompt of 100,000 tokens delays no other stream.  ``SpecialTokenLayout`` is what the tokenizer
puts around one text or two, found by a probe, so that a text can be cut and still end as the model expects.  Knows
nothing about requests or templates.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

from tokenizers import AddedToken, Tokenizer

from penstock.errors import RequestError
from penstock.processing.chat.control_tokens import ControlTokenGuard
from penstock.processing.tokenizer.loader import load_tokenizer
from penstock.processing.tokenizer.token_bytes import TokenTable

INLINE_CHARS = 2048
"""Up to here encoding takes well under a millisecond, less than the way to a thread and back may take."""

SHORT_CHARS = 64 << 10
"""Longer texts have threads of their own, so that they hold up none but their like."""

LONG_THREADS = 2
_LONGEST_TOKEN_FLOOR = 16

T = TypeVar("T")


class TextTokenizer:
    """One model's tokenizer: encode, decode, and the table of what every token says."""

    def __init__(self, folder: Path, *, config: Mapping[str, Any] | None = None, literals: Iterable[str] = ()) -> None:
        """Reads the vocabulary in ``folder``, which may be a GGUF file; ``config`` is its tokenizer_config.json.

        ``literals`` are the chat template's own strings: an added token among them is a control token like the
        special ones.  Raises ModelError.
        """
        self._tokenizer = load_tokenizer(folder, config or {})
        # A shipped tokenizer.json may say "truncate": nothing is ever truncated here.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._added: dict[int, AddedToken] = dict(self._tokenizer.get_added_tokens_decoder())
        special = frozenset(token for token, added in self._added.items() if added.special)
        decoder = self._tokenizer.decoder
        self.table = TokenTable(
            self._tokenizer, decoder=None if decoder is None else decoder.__getstate__(), special=special
        )
        joined = "\0".join(literals)
        self._control_ids = special | {
            token for token, added in self._added.items() if added.content in joined and _is_word(added.content)
        }
        self.control = ControlTokenGuard(self._added[token].content for token in self._control_ids)
        self._guarded, self._places = self._guarded_tokenizer()
        self._forbidden = self._control_ids - self._places.keys()
        self._short = ThreadPoolExecutor(1, thread_name_prefix="tokenizer-short")
        self._long = ThreadPoolExecutor(LONG_THREADS, thread_name_prefix="tokenizer-long")

    def close(self) -> None:
        """Lets the threads end.  What is being encoded is finished, what waits is forgotten."""
        for pool in (self._short, self._long):
            pool.shutdown(wait=False, cancel_futures=True)

    def min_tokens(self, chars: int, limit: int, most_per_token: int = 1 << 30) -> int | None:
        """A number of tokens, ``limit`` or more, that any text of ``chars`` characters has; None if it may have fewer.

        No text is believed to have more than ``most_per_token`` characters a token.  Only a text that could be refused
        has the vocabulary looked through, once: that takes as long as a start may.
        """
        if -(-chars // _LONGEST_TOKEN_FLOOR) < limit:
            return None
        least = -(-chars // min(self._longest, max(most_per_token, _LONGEST_TOKEN_FLOOR)))
        return least if least >= limit else None

    @cached_property
    def _longest(self) -> int:
        vocabulary = self._tokenizer.get_vocab(with_added_tokens=True)
        return max(_LONGEST_TOKEN_FLOOR, max(map(len, vocabulary), default=0))

    def token_id(self, text: str) -> int | None:
        """The id of the token that is written so."""
        return self._tokenizer.token_to_id(text)

    def special_id(self, text: str) -> int | None:
        """The same, if it is a special token, which no text can become."""
        token = self.token_id(text)
        return token if token in self.table.special else None

    def token_strings(self, tokens: Sequence[int]) -> list[str]:
        """Tokens as the vocabulary writes them."""
        return [self._tokenizer.id_to_token(token) or "" for token in tokens]

    async def run_sized(self, size: int, work: Callable[[], T]) -> T:
        """``work`` on a text of ``size`` characters: here and now when it is short, else on a thread."""
        if size <= INLINE_CHARS:
            return work()
        pool = self._short if size <= SHORT_CHARS else self._long
        return await asyncio.get_running_loop().run_in_executor(pool, work)

    def encode(self, text: str, *, add_special_tokens: bool) -> tuple[int, ...]:
        """All of ``text``; spellings of control tokens in it become those tokens."""
        encoding = self._tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0]
        return tuple(encoding.ids)

    def encode_many(self, texts: Sequence[str]) -> list[tuple[int, ...]]:
        """Each of ``texts``, without special tokens around it."""
        return [tuple(e.ids) for e in self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)]

    def probe(self, text: str, pair: str | None = None) -> list[tuple[int, int | None, int]]:
        """What one or two texts become with special tokens: (token, which text or None, type) for each token."""
        encoding = self._tokenizer.encode(text, pair)
        return list(zip(encoding.ids, encoding.sequence_ids, encoding.type_ids, strict=True))

    def encode_guarded(self, text: str) -> tuple[int, ...]:
        """All of ``text``; only guarded names (``ControlTokenGuard.guarded``) become control tokens.

        Raises RequestError when plain text cannot be written without a control token.
        """
        ids: list[int] = self._guarded.encode_batch_fast([text], add_special_tokens=False)[0].ids
        if not self._forbidden.isdisjoint(ids):
            raise RequestError(
                "A message spells a control token of the model in a way that cannot be told apart from it.",
                param="messages",
                code="control_token_in_text",
            )
        return tuple(self._places.get(token, token) for token in ids)

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of ``tokens`` as the library has it, control tokens written out."""
        return str(self._tokenizer.decode_batch([list(tokens)], skip_special_tokens=False)[0])

    def _guarded_tokenizer(self) -> tuple[Tokenizer, dict[int, int]]:
        """A tokenizer over the same model that knows control tokens by their guarded names only.

        Also returns the true id of every added token, by the id that it has there.
        """
        guarded = Tokenizer(self._tokenizer.model)
        if self._tokenizer.normalizer is not None:
            guarded.normalizer = self._tokenizer.normalizer
        if self._tokenizer.pre_tokenizer is not None:
            guarded.pre_tokenizer = self._tokenizer.pre_tokenizer
        names = {
            token: self.control.guarded_name(added.content) if token in self._control_ids else added.content
            for token, added in self._added.items()
        }
        guarded.add_tokens([_renamed(self._added[token], name) for token, name in sorted(names.items())])
        places = {guarded.token_to_id(name): token for token, name in names.items()}
        return guarded, {place: token for place, token in places.items() if place is not None}


def _is_word(text: str) -> bool:
    """Some vocabularies have added tokens for white space and for marks, which templates and clients write alike."""
    return any(map(str.isalnum, text))


def _renamed(added: AddedToken, name: str) -> AddedToken:
    return AddedToken(
        name,
        single_word=added.single_word,
        lstrip=added.lstrip,
        rstrip=added.rstrip,
        normalized=added.normalized,
        special=added.special,
    )


Probed = Sequence[tuple[int, int | None, int]]
"""(token, which text it is of or None for a special one, its type) for each token of some texts."""

PromptTokens = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class SpecialTokenLayout:
    """What stands before, between and behind."""

    one: tuple[PromptTokens, PromptTokens]
    two: tuple[PromptTokens, PromptTokens, PromptTokens]
    types: bool  # the second text has token type ids of its own
    type_begin: int  # of the tokens between, the first that counts to the second text

    @classmethod
    def of(cls, probe: Callable[..., Probed]) -> SpecialTokenLayout:
        """``probe`` tells what one or two texts become."""
        single, pair = probe("a"), probe("a", "b")
        first, last = _ends(single, 0)
        begin, end = _ends(pair, 0)
        again, behind = _ends(pair, 1)
        ids = [token for token, _, _ in pair]
        kinds = [kind for _, _, kind in pair]
        between = kinds[end:again]
        return cls(
            one=(_tokens(single[:first]), _tokens(single[last:])),
            two=(tuple(ids[:begin]), tuple(ids[end:again]), tuple(ids[behind:])),
            types=kinds[again] > kinds[begin],
            type_begin=next((i for i, kind in enumerate(between) if kind > kinds[begin]), len(between)),
        )

    @property
    def special_counts(self) -> tuple[int, int]:
        """Special tokens around one text, and around two."""
        return sum(map(len, self.one)), sum(map(len, self.two))

    def wrap(self, text: PromptTokens) -> PromptTokens:
        """One text as the model reads it."""
        return (*self.one[0], *text, *self.one[1])

    def wrap_pair(self, first: PromptTokens, second: PromptTokens) -> tuple[PromptTokens, int | None]:
        """Two texts, and where the second begins for models that tell them apart."""
        before, between, behind = self.two
        start = len(before) + len(first) + self.type_begin
        return (*before, *first, *between, *second, *behind), start if self.types else None


def _ends(probed: Probed, text: int) -> tuple[int, int]:
    """Where the tokens of a text begin and end."""
    own = [index for index, (_, which, _) in enumerate(probed) if which == text]
    return own[0], own[-1] + 1


def _tokens(probed: Probed) -> PromptTokens:
    return tuple(token for token, _, _ in probed)
