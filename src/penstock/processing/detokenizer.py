"""Output tokens to text as they arrive: UTF-8, stop strings, logprobs and echo in one place.

The deltas joined depend on the tokens only, never on how they were batched.  Text that may be the start of a stop
string or part of a character is held back, and so are the logprobs of its tokens::

      text     |  already given out  |  held back  | part of a character
      tokens   t0    t1    t2    t3     t4     t5     t6
      given    <------------------>                        t4, t5, t6 wait in ``_waiting``

A character is given out when its last byte is there; invalid bytes become U+FFFD, as Unicode 16 has it (section 3.9,
"maximal subparts").  Every stop string has its Knuth-Morris-Pratt automaton (SIAM J. Comput. 6(2), 1977), so the work
is linear in the text: the first stop string to be complete counts, the longest of those complete at one character.
Knows nothing about JSON or HTTP.
"""

from __future__ import annotations

import codecs
from collections import deque
from collections.abc import Iterable, Sequence

import msgspec

from penstock.interfaces import OutputDelta, TokenText
from penstock.processing.chat.render import OutputParserFactory
from penstock.processing.parsers.parser import OutputParser, ParsedDelta, joined_deltas
from penstock.processing.tokenizer.token_bytes import TokenTable
from penstock.types import FinishReason, TokenBatch, TokenLogprob

_Utf8Decoder = codecs.getincrementaldecoder("utf-8")


class Utf8Decoder:
    """UTF-8 that comes in pieces.  The work is linear in the bytes."""

    __slots__ = ("_decoder", "pending")

    def __init__(self) -> None:
        self._decoder = _Utf8Decoder(errors="replace")
        self.pending = False  # part of a character is held back

    def push(self, raw: bytes) -> str:
        """The characters that ``raw`` completes."""
        if not self.pending and raw.isascii():
            return raw.decode("ascii")
        text = self._decoder.decode(raw)
        self.pending = bool(self._decoder.getstate()[0])
        return text

    def finish(self) -> str:
        """What is held back, as U+FFFD; nothing will follow."""
        self.pending = False
        return self._decoder.decode(b"", True)


def _borders(word: str) -> list[int]:
    """For each prefix of ``word``, the length of its longest proper prefix that is also its suffix."""
    borders = [0] * len(word)
    k = 0
    for i in range(1, len(word)):
        while k and word[i] != word[k]:
            k = borders[k - 1]
        if word[i] == word[k]:
            k += 1
        borders[i] = k
    return borders


class StopStringScanner:
    """Reads a text once and says where it must be cut."""

    def __init__(self, stops: Sequence[str], *, shown: bool = False) -> None:
        """``stops`` are not empty strings.  ``shown``: the one that is found belongs to the text."""
        self._shown = shown
        self._words = tuple(dict.fromkeys(stops))
        self._borders = [_borders(word) for word in self._words]
        self._matched = [0] * len(self._words)
        self._first = frozenset(word[0] for word in self._words)
        self._seen = 0
        self.found: str | None = None  # the stop string that ended the text

    @property
    def held(self) -> int:
        """How many of the last characters may be the beginning of a stop string, and must not be shown yet."""
        return 0 if self._shown else max(self._matched, default=0)

    def passes(self, text: str) -> bool:
        """Read on, if no stop string can begin or go on in ``text``; else nothing is read."""
        if any(self._matched) or not self._first.isdisjoint(text):
            return False
        self._seen += len(text)
        return True

    def feed(self, text: str, *, counts: bool = True) -> int | None:
        """Read on.  Returns where the text ends, in characters from the very start: where the first complete stop
        string begins, or, if it is shown, ends.

        A stop string that completes while ``counts`` is false is passed over.  Not to be called after a find.
        """
        if self.passes(text):
            return None
        for char in text:
            self._seen += 1
            longest = ""
            for i, word in enumerate(self._words):
                if self._step(i, word, char) and len(word) > len(longest):
                    longest = word
            if longest and counts:
                self.found = longest
                return self._seen if self._shown else self._seen - len(longest)
        return None

    def _step(self, i: int, word: str, char: str) -> bool:
        matched = self._matched[i]
        borders = self._borders[i]
        while matched and word[matched] != char:
            matched = borders[matched - 1]
        if word[matched] == char:
            matched += 1
        complete = matched == len(word)
        self._matched[i] = borders[-1] if complete else matched
        return complete


LOWEST_LOGPROB = -9999.0
"""Stands for minus infinity, which JSON does not have (as with OpenAI)."""


class OutputOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What the client wants to see of one choice."""

    stops: tuple[str, ...] = ()
    stop_token_ids: frozenset[int] = frozenset()  # the last token of an answer that ended by one is not shown
    min_tokens: int = 0  # a stop string within the first ``min_tokens`` does not count
    logprobs: bool = False
    token_ids: bool = False
    special: bool = False  # the text of special tokens is shown
    stop_shown: bool = False  # so is the stop string, or the last token, that ended the answer
    echo: PromptEcho | None = None
    reply: OutputParserFactory | None = None  # how reasoning and tool calls are found in the text
    prompt_only: bool = False  # echo with max_tokens 0: the one token that had to be drawn is dropped


class PromptEcho(msgspec.Struct, frozen=True, kw_only=True):
    """The prompt, to be shown before the answer."""

    text: str
    tokens: Sequence[int]


class _PendingLogprob:
    """A token whose logprob is not given out yet.  ``end`` is None until its last character is complete."""

    __slots__ = ("end", "logprob", "start")

    def __init__(self, start: int, logprob: TokenLogprob) -> None:
        self.start = start
        self.end: int | None = None
        self.logprob = logprob


_NONE: frozenset[int] = frozenset()


class IncrementalDetokenizer:
    """``OutputDetokenizer`` of one choice."""

    __slots__ = (
        "_base",
        "_echo",
        "_given",
        "_held",
        "_only_text",
        "_open",
        "_parser",
        "_reasoning_tokens",
        "_scanner",
        "_seen",
        "_table",
        "_tokens",
        "_utf8",
        "_visible",
        "_waiting",
        "_wanted",
    )

    def __init__(self, table: TokenTable, wanted: OutputOptions, *, identity: str = "") -> None:
        """``identity`` is what ids of tool calls are made of."""
        self._table = table
        self._wanted = wanted
        self._utf8 = Utf8Decoder()
        self._scanner = StopStringScanner(wanted.stops, shown=wanted.stop_shown) if wanted.stops else None
        self._visible = wanted.reply.visible if wanted.reply else _NONE
        self._parser = wanted.reply.parser(identity) if wanted.reply else None
        self._only_text = not (
            wanted.logprobs or wanted.token_ids or wanted.special or wanted.reply or wanted.prompt_only
        )
        self._tokens = 0
        self._reasoning_tokens = 0
        self._seen = 0  # characters decoded
        self._given = 0  # of those, given out
        self._held: list[str] = []  # the difference
        self._waiting: deque[_PendingLogprob] | None = None  # with the first: most answers have no log-probabilities
        self._open: list[_PendingLogprob] = []  # of those waiting, the ones whose last character is not complete
        self._echo = wanted.echo
        self._base = len(wanted.echo.text) if wanted.echo else 0

    def push(self, batch: TokenBatch) -> OutputDelta:
        echoed = self._echo_prompt(batch) if self._echo is not None else None
        if self._wanted.prompt_only:
            return self._with_echo(OutputDelta(tokens=0, finish=FinishReason.LENGTH), echoed)
        cut = None
        used = 0
        parts: list[ParsedDelta] = []  # of each token, since which of them are reasoning must not depend on the batch
        last = len(batch.tokens) - 1 if batch.finish is FinishReason.STOP else -1
        for i, token in enumerate(batch.tokens):
            ends = i == last and token in self._wanted.stop_token_ids and not self._wanted.stop_shown
            logprob = batch.logprobs[i] if batch.logprobs is not None and self._wanted.logprobs and not ends else None
            cut = self._take(b"" if ends else self._bytes_of(token), logprob)
            used += 1
            if cut is not None:
                break
            if self._parser is not None:
                parts.append(self._parsed(self._parser, self._release(None, last=False), last=False))
                if self._parser.done:
                    break
        parses_last = cut is not None  # its token is not parsed yet
        finish = FinishReason.STOP if cut is not None else batch.finish
        if self._parser is not None and self._parser.done:
            finish = None  # what follows does not count, its end included
        if finish is not None and cut is None:
            cut = self._decoded(self._utf8.finish())
            finish = FinishReason.STOP if cut is not None else finish
        text = self._release(cut, last=finish is not None)
        if self._parser is None:
            reply = ParsedDelta(text)
        else:
            if text or finish is not None:
                parts.append(self._parsed(self._parser, text, last=finish is not None, whole_token=parses_last))
            reply = joined_deltas(parts)
        finish = self._with_calls(finish)
        piece = OutputDelta(
            text=reply.content,
            reasoning=reply.reasoning,
            calls=reply.calls,
            parts=_output_parts(reply.parts, self._tokens) if reply.parts else (),
            tokens=self._tokens,
            logprobs=self._release_logprobs(cut, last=finish is not None) if self._wanted.logprobs else (),
            token_ids=batch.tokens[:used] if self._wanted.token_ids else (),
            reasoning_tokens=self._reasoning_tokens,
            stop_text=self._scanner.found if self._scanner is not None and finish is FinishReason.STOP else None,
            finish=finish,
        )
        return self._with_echo(piece, echoed)

    def _parsed(self, parser: OutputParser, text: str, *, last: bool, whole_token: bool = True) -> ParsedDelta:
        """What ``text`` says; the token it comes from counts as reasoning if that is where it begins or ends."""
        before = parser.in_reasoning
        part = parser.push(text, last=last)
        if whole_token and (before or part.reasoning or parser.in_reasoning):
            self._reasoning_tokens += 1
        return part

    def escaped(self, tokens: tuple[int, ...]) -> bytes | None:
        if not self._only_text or self._echo is not None or self._utf8.pending:
            return None
        table = self._table
        if len(tokens) == 1 and self._scanner is None:
            known = table.escapes.get(tokens[0])
            if known is not None:
                self._tokens += 1
                return known
        shown: list[str] = []
        written: list[bytes] = []
        for token in tokens:
            plain = table.plain(token)
            if plain is None:
                return None
            shown.append(plain[0])
            written.append(plain[1])
        if self._scanner is not None:
            text = "".join(shown)
            if not self._scanner.passes(text):
                return None
            self._seen += len(text)
            self._given = self._seen
        self._tokens += len(tokens)
        return b"".join(written)

    def _bytes_of(self, token: int) -> bytes:
        visible = self._wanted.special or token in self._visible
        return self._table.raw(token) if visible else self._table.text_bytes(token)

    def _with_calls(self, finish: FinishReason | None) -> FinishReason | None:
        """An answer that stopped with calls stopped because of them; one that was cut off was cut off."""
        called = self._parser is not None and (
            self._parser.done if finish is None else finish is FinishReason.STOP and self._parser.calls > 0
        )
        return FinishReason.TOOL_CALLS if called else finish

    def _take(self, raw: bytes, logprob: TokenLogprob | None) -> int | None:
        """One token.  Returns where the text must be cut when it completes a stop string."""
        self._tokens += 1
        if logprob is not None:
            entry = _PendingLogprob(self._seen, logprob)
            if self._waiting is None:
                self._waiting = deque()
            self._waiting.append(entry)
            self._open.append(entry)
        cut = self._decoded(self._utf8.push(raw)) if raw else None
        if self._open and not self._utf8.pending:
            for entry in self._open:
                entry.end = self._seen
            self._open.clear()
        return cut

    def _decoded(self, text: str) -> int | None:
        if not text:
            return None
        self._seen += len(text)
        self._held.append(text)
        if self._scanner is None:
            return None
        return self._scanner.feed(text, counts=self._tokens > self._wanted.min_tokens)

    def _release(self, cut: int | None, *, last: bool) -> str:
        """The text that can be given out now."""
        if cut is not None:
            end = cut
        elif last or self._scanner is None:
            end = self._seen
        else:
            end = self._seen - self._scanner.held
        if end <= self._given:
            return ""
        held = "".join(self._held)
        text = held[: end - self._given]
        rest = held[end - self._given :]
        self._held = [rest] if rest else []
        self._given = end
        return text

    def _release_logprobs(self, cut: int | None, *, last: bool) -> tuple[TokenText, ...]:
        """Logprobs of tokens that are out for good: no cut to come can touch them."""
        released: list[TokenText] = []
        while self._waiting:
            entry = self._waiting[0]
            end = self._seen if entry.end is None and last else entry.end
            if end is None or (end > self._given and not last):
                break
            self._waiting.popleft()
            if cut is None or entry.start < cut or end <= cut:
                released.append(token_text(self._table, entry.logprob, self._base + entry.start))
        return tuple(released)

    def _with_echo(self, piece: OutputDelta, echoed: tuple[TokenText, ...] | None) -> OutputDelta:
        if echoed is None or self._echo is None:
            return piece
        text, self._echo = self._echo.text, None
        return msgspec.structs.replace(piece, text=text + piece.text, logprobs=echoed + piece.logprobs)

    def _echo_prompt(self, batch: TokenBatch) -> tuple[TokenText, ...]:
        echo = self._echo
        if echo is None or not self._wanted.logprobs or not echo.tokens:
            return ()
        offsets = prompt_offsets(self._table, echo.tokens, echo.text, special=self._wanted.special)
        first = _shown_token(self._table, echo.tokens[0], None, offsets[0])
        given = batch.prompt_logprobs or ()
        rest = (token_text(self._table, logprob, offset) for logprob, offset in zip(given, offsets[1:], strict=False))
        return (first, *rest)


def token_text(table: TokenTable, logprob: TokenLogprob, offset: int) -> TokenText:
    """A reported token as a client sees it."""
    top = tuple(_shown_token(table, token, value, offset) for token, value in logprob.top)
    return _shown_token(table, logprob.token, logprob.logprob, offset, top)


def _shown_token(
    table: TokenTable, token: int, logprob: float | None, offset: int, top: tuple[TokenText, ...] = ()
) -> TokenText:
    shown, partial = table.shown(token)
    value = None if logprob is None else max(logprob, LOWEST_LOGPROB)
    return TokenText(raw=table.raw(token), shown=shown, partial=partial, offset=offset, logprob=value, top=top)


def prompt_offsets(table: TokenTable, tokens: Sequence[int], text: str, *, special: bool = False) -> list[int]:
    """Where each prompt token begins in ``text``, in characters.

    Tokens may say more than the text at its start (a blank that the tokenizer put there); they begin at 0 then.
    """
    utf8 = Utf8Decoder()
    starts: list[int] = []
    seen = 0
    for token in tokens:
        starts.append(seen)
        seen += len(utf8.push(table.raw(token) if special else table.text_bytes(token)))
    extra = max(0, seen + len(utf8.finish()) - len(text))
    return [min(max(0, start - extra), len(text)) for start in starts]


def decode_prompt(table: TokenTable, tokens: Iterable[int], *, special: bool = False) -> str:
    """The text of a whole prompt that came as token ids, with or without that of special tokens."""
    return b"".join(map(table.raw if special else table.text_bytes, tokens)).decode(errors="replace")


def _output_parts(parts: Sequence[ParsedDelta], tokens: int) -> tuple[OutputDelta, ...]:
    return tuple(
        OutputDelta(text=part.content, reasoning=part.reasoning, calls=part.calls, tokens=tokens) for part in parts
    )
