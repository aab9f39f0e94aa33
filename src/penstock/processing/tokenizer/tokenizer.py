"""Text to token ids with the ``tokenizers`` library, outside the event loop.

The library's ``encode_batch_fast`` works without the interpreter lock; texts above ``INLINE_CHARS`` run on a small
thread pool, so that a prompt of 100,000 tokens delays no other stream.  ``SpecialTokenLayout`` is what the tokenizer
puts around one text or two, found by a probe, so that a text can be cut and still end as the model expects.

A client's text may spell a control token (``<|end|>``), whole or in parts that only the template joins.  Before
rendering, ``ControlTokenGuard.mark`` puts invisible marks around such spellings; after rendering, unmarked text is the
template's own.  ``guarded`` then gives the template's control tokens random names, for a tokenizer that knows only
those names.  Text without such spellings takes the plain path and gets no marks.  ``WordMatcher`` finds many words in
a long text by one trie, in searches of ``PIECE`` characters: a regular expression holds the interpreter's lock for a
whole search, and shorter ones let other threads run.
"""

from __future__ import annotations

import asyncio
import re
import secrets
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

from tokenizers import AddedToken, Tokenizer

from penstock.errors import RequestError
from penstock.processing.tokenizer.loader import load_tokenizer
from penstock.processing.tokenizer.token_bytes import TokenTable

PIECE = 1 << 15

Trie = dict[str, "Trie"]
"""Characters to what may follow them; the empty string marks the end of a word."""


class WordMatcher:
    """Where ``words``, each within ``before`` and ``after``, lie in a text; the longest word at a place counts."""

    def __init__(self, words: Collection[str], *, before: str = "", after: str = "", or_else: str = "") -> None:
        """``or_else`` is an expression for what else is looked for; its matches are at most as long as the words'.

        A match's group ``word`` is the word, or None for ``or_else``.
        """
        alternatives = [f"{re.escape(before)}(?P<word>{trie_pattern(words)}){re.escape(after)}"]
        self._pattern = re.compile("|".join([*alternatives, or_else] if or_else else alternatives))
        self._longest = len(before) + len(after) + max(map(len, words), default=0)

    def matches(self, text: str) -> Iterator[re.Match[str]]:
        """In order, none within another."""
        at, end = 0, PIECE
        while at < len(text):
            match = self._pattern.search(text, at, end + self._longest)
            if match is not None and match.start() < end:  # one beyond could be cut off by the window
                yield match
                at = match.end()
            else:
                at = end
            end = max(end, at) if at < end else at + PIECE

    def found_in(self, text: str) -> bool:
        """Whether ``text`` has a match."""
        return next(self.matches(text), None) is not None


def trie_pattern(words: Collection[str]) -> str:
    """An expression that matches the longest of ``words``; nothing when there are none."""
    trie: Trie = {}
    for word in words:
        node = trie
        for char in word:
            node = node.setdefault(char, {})
        node[""] = {}
    return _pattern_of(trie) if words else "(?!)"


def _pattern_of(node: Trie) -> str:
    branches = [re.escape(char) + _pattern_of(below) for char, below in sorted(node.items()) if char]
    if not branches:
        return ""
    joined = branches[0] if len(branches) == 1 and "" not in node else f"(?:{'|'.join(branches)})"
    return f"{joined}?" if "" in node else joined


_SPACE = " \t\r\n\f\v"


class ControlTokenGuard:
    """The spellings of one tokenizer's control tokens, and the secret marks of this process."""

    def __init__(self, spellings: Iterable[str]) -> None:
        self.spellings = tuple(sorted(set(spellings), key=lambda word: (-len(word), word)))
        nonce = secrets.token_hex(8)
        # Noncharacters (Unicode 23.7) with a nonce: no client can write a mark or a guarded name.
        self._open, self._close = f"\ufdd0{nonce}\ufdd1", f"\ufdd2{nonce}\ufdd3"
        self._guard = (f"\ufdd4{nonce}\ufdd5", f"\ufdd6{nonce}\ufdd7")
        words = trie_pattern(self.spellings)
        marks = f"{re.escape(self._open)}|{re.escape(self._close)}"
        self._words = WordMatcher(self.spellings)
        self._rendered = WordMatcher(
            self.spellings, before=self._open, after=self._close, or_else=f"(?P<own>{words})|{marks}"
        )
        self._beginnings = frozenset(word[:i] for word in self.spellings for i in range(1, len(word)))
        self._ends = frozenset(word[i:] for word in self.spellings for i in range(1, len(word)))
        self._longest_part = max(map(len, self.spellings), default=1) - 1

    def guarded_name(self, spelling: str) -> str:
        """The name that the guarded tokenizer knows this control token by."""
        return f"{self._guard[0]}{spelling}{self._guard[1]}"

    def suspicious(self, value: Any) -> bool:
        """Whether any text in ``value`` (strings, lists, dicts, keys) has a control token, or part of one at an end."""
        if isinstance(value, str):
            return any(self._partial(value)) or self._words.found_in(value)
        if isinstance(value, dict):
            return any(self.suspicious(key) or self.suspicious(item) for key, item in value.items())
        if isinstance(value, list | tuple):
            return any(map(self.suspicious, value))
        return False

    def mark(self, value: Any) -> Any:
        """A copy of ``value`` with marks around control tokens, and where a part of one meets the template's text."""
        if isinstance(value, str):
            return self._mark_text(value)
        if isinstance(value, dict):
            return {self.mark(key): self.mark(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self.mark(item) for item in value]
        return value

    def guarded(self, rendered: str) -> str:
        """``rendered`` without marks, and with the template's own control tokens under their guarded names."""
        pieces: list[str] = []
        at = 0
        for match in self._rendered.matches(rendered):
            own = match["own"]
            pieces += rendered[at : match.start()], (match["word"] or "") if own is None else self.guarded_name(own)
            at = match.end()
        return "".join((*pieces, rendered[at:]))

    def unmarked_chars(self, rendered: str) -> int:
        """Characters of ``rendered`` without marks."""
        marks = (self._open, self._close)
        return len(rendered) - sum(rendered.count(mark) * len(mark) for mark in marks)

    def _partial(self, text: str) -> tuple[bool, bool]:
        core = text.strip(_SPACE)
        reach = range(1, min(self._longest_part, len(core)) + 1)
        return any(core[:i] in self._ends for i in reach), any(core[-i:] in self._beginnings for i in reach)

    def _mark_text(self, text: str) -> str:
        begins, ends = self._partial(text)
        if begins or ends:
            # Inside the white space, so that templates that trim still trim.
            left = len(text) - len(text.lstrip(_SPACE))
            right = len(text.rstrip(_SPACE))
            core = self._wrapped(text[left:right])
            core = f"{self._open if begins else ''}{core}{self._close if ends else ''}"
            return f"{text[:left]}{core}{text[right:]}"
        return self._wrapped(text)

    def _wrapped(self, text: str) -> str:
        pieces: list[str] = []
        at = 0
        for match in self._words.matches(text):
            pieces += text[at : match.start()], self._open, match[0], self._close
            at = match.end()
        return "".join((*pieces, text[at:]))


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
                "A message spells a control token of the model in a way that cannot be distinguished from it.",
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
