"""The text of one answer while its tokens arrive: UTF-8, stop strings, logprobs and echo in one place.

The pieces joined depend on the tokens only, never on how they were batched.  What may still turn out to be the
beginning of a stop string, or is part of a character, is held back, and with it the logprobs of its tokens.
Knows nothing about JSON or HTTP.

::

      text     |  already given out  |  held back  | part of a character
      tokens   t0    t1    t2    t3     t4     t5     t6
      given    <------------------>                        t4, t5, t6 wait in ``_waiting``
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence

import msgspec

from penstock.intake.chat import ReplyPlan
from penstock.intake.detokenizer import Utf8Stream
from penstock.intake.replies.parser import ReplyPiece
from penstock.intake.stops import StopScanner
from penstock.intake.vocabulary import TokenTable
from penstock.types import FinishReason, TokenBatch, TokenLogprob
from penstock.wire.ports import AnswerPiece, TokenText

LOWEST_LOGPROB = -9999.0
"""Stands for minus infinity, which JSON does not have (as with OpenAI)."""


class Wanted(msgspec.Struct, frozen=True, kw_only=True):
    """What the client wants to see of one choice."""

    stops: tuple[str, ...] = ()
    stop_token_ids: frozenset[int] = frozenset()  # the last token of an answer that ended by one is not shown
    min_tokens: int = 0  # a stop string that completes within so many tokens does not count
    logprobs: bool = False
    token_ids: bool = False
    special: bool = False  # the text of special tokens is shown
    stop_shown: bool = False  # so is the stop string, or the last token, that ended the answer
    echo: Echo | None = None
    reply: ReplyPlan | None = None  # how reasoning and tool calls are found in the text
    prompt_only: bool = False  # echo with max_tokens 0: the one token that had to be drawn is dropped


class Echo(msgspec.Struct, frozen=True, kw_only=True):
    """The prompt, to be shown before the answer."""

    text: str
    tokens: Sequence[int]


class _Waiting:
    """A token whose logprob is not given out yet.  ``end`` is None until its last character is complete."""

    __slots__ = ("end", "logprob", "start")

    def __init__(self, start: int, logprob: TokenLogprob) -> None:
        self.start = start
        self.end: int | None = None
        self.logprob = logprob


_NONE: frozenset[int] = frozenset()


class ChoiceText:
    """``wire.ports.AnswerText`` for one choice."""

    __slots__ = (
        "_base",
        "_echo",
        "_given",
        "_held",
        "_only_text",
        "_open",
        "_parser",
        "_scanner",
        "_seen",
        "_table",
        "_tokens",
        "_utf8",
        "_visible",
        "_waiting",
        "_wanted",
    )

    def __init__(self, table: TokenTable, wanted: Wanted, *, identity: str = "") -> None:
        """``identity`` is what ids of tool calls are made of."""
        self._table = table
        self._wanted = wanted
        self._utf8 = Utf8Stream()
        self._scanner = StopScanner(wanted.stops, shown=wanted.stop_shown) if wanted.stops else None
        self._visible = wanted.reply.visible if wanted.reply else _NONE
        self._parser = wanted.reply.parser(identity) if wanted.reply else None
        self._only_text = not (
            wanted.logprobs or wanted.token_ids or wanted.special or wanted.reply or wanted.prompt_only
        )
        self._tokens = 0
        self._seen = 0  # characters decoded
        self._given = 0  # of those, given out
        self._held: list[str] = []  # the difference
        self._waiting: deque[_Waiting] | None = None  # with the first: most answers have no log-probabilities
        self._open: list[_Waiting] = []  # of those waiting, the ones whose last character is not complete
        self._echo = wanted.echo
        self._base = len(wanted.echo.text) if wanted.echo else 0

    def push(self, batch: TokenBatch) -> AnswerPiece:
        """The next tokens; see ``wire.ports.AnswerText``."""
        echoed = self._echo_prompt(batch) if self._echo is not None else None
        if self._wanted.prompt_only:
            return self._with_echo(AnswerPiece(tokens=0, finish=FinishReason.LENGTH), echoed)
        cut = None
        used = 0
        last = len(batch.tokens) - 1 if batch.finish is FinishReason.STOP else -1
        for i, token in enumerate(batch.tokens):
            ends = i == last and token in self._wanted.stop_token_ids and not self._wanted.stop_shown
            logprob = batch.logprobs[i] if batch.logprobs is not None and self._wanted.logprobs and not ends else None
            cut = self._take(b"" if ends else self._bytes_of(token), logprob)
            used += 1
            if cut is not None:
                break
        finish = FinishReason.STOP if cut is not None else batch.finish
        if finish is not None and cut is None:
            cut = self._decoded(self._utf8.finish())
            finish = FinishReason.STOP if cut is not None else finish
        text = self._release(cut, last=finish is not None)
        reply = ReplyPiece(text) if self._parser is None else self._parser.push(text, last=finish is not None)
        finish = self._with_calls(finish)
        piece = AnswerPiece(
            text=reply.content,
            reasoning=reply.reasoning,
            calls=reply.calls,
            tokens=self._tokens,
            logprobs=self._release_logprobs(cut, last=finish is not None) if self._wanted.logprobs else (),
            token_ids=batch.tokens[:used] if self._wanted.token_ids else (),
            finish=finish,
        )
        return self._with_echo(piece, echoed)

    def escaped(self, tokens: tuple[int, ...]) -> bytes | None:
        """See ``wire.ports.AnswerText``."""
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
            entry = _Waiting(self._seen, logprob)
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

    def _with_echo(self, piece: AnswerPiece, echoed: tuple[TokenText, ...] | None) -> AnswerPiece:
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
    utf8 = Utf8Stream()
    starts: list[int] = []
    seen = 0
    for token in tokens:
        starts.append(seen)
        seen += len(utf8.push(table.raw(token) if special else table.text_bytes(token)))
    extra = max(0, seen + len(utf8.finish()) - len(text))
    return [min(max(0, start - extra), len(text)) for start in starts]


def text_of(table: TokenTable, tokens: Iterable[int], *, special: bool = False) -> str:
    """The text of a whole prompt that came as token ids, with or without that of special tokens."""
    return b"".join(map(table.raw if special else table.text_bytes, tokens)).decode(errors="replace")
