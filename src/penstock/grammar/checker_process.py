"""The process that tries grammars before requests may use them: ``python -m penstock.grammar.checker_process``.

Reads limits, a vocabulary and then grammars from standard input, and writes a verdict for each, in frames of four
bytes of length and one msgpack struct.  The cost of a grammar cannot be predicted, so the kernel enforces the limits:
CPU time by an interval timer whose signal ends the process, memory by an address space limit.  It ends with its
standard input.  Imports no NumPy, so that it is up in 0.1 s.
"""

from __future__ import annotations

import os
import resource
import signal
import struct
import sys
from collections.abc import Callable
from pathlib import Path
from random import Random

import msgspec
from llguidance import LLTokenizer

from penstock.grammar.matcher import CompiledGrammar, GrammarMatcher, GrammarVocabulary, short_error, token_trie
from penstock.grammar.sources import from_ebnf
from penstock.types import Grammar, GrammarKind

MAX_BYTES = 256 << 20
"""Of one frame: a vocabulary of a million tokens fits."""

OUT_OF_MEMORY = 17
"""Exit status of a checker whose interpreter got no more memory."""

_HEAD = struct.Struct("<I")


class CheckLimits(msgspec.Struct, frozen=True, kw_only=True):
    """What one check may cost."""

    cpu_s: float
    memory_bytes: int  # beyond what the process needs for the vocabulary


class GrammarVerdict(msgspec.Struct, frozen=True, kw_only=True):
    """The verdict on one grammar."""

    refused: str | None = None  # why
    grammar: Grammar | None = None  # when not refused: the grammar as workers are to have it


def encode_frame(content: bytes) -> bytes:
    """A whole frame."""
    return _HEAD.pack(len(content)) + content


def read_frame(read: Callable[[int], bytes]) -> bytes | None:
    """The next frame's content; None at the end.  ``read`` gives as many bytes as asked for, fewer only at the end."""
    head = read(_HEAD.size)
    if len(head) < _HEAD.size:
        return None
    (size,) = _HEAD.unpack(head)
    if size > MAX_BYTES:
        return None
    content = read(size)
    return content if len(content) == size else None


WALK_TOKENS = 64
"""How far a grammar is walked along: what chokes on its first tokens is refused, not begun."""


def run_checker() -> None:
    """Until standard input ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the server, which closes our input
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    source, answers = sys.stdin.buffer, sys.stdout.buffer
    first, second = read_frame(source.read), read_frame(source.read)
    if first is None or second is None:
        return
    limits = msgspec.msgpack.decode(first, type=CheckLimits)
    vocabulary = msgspec.msgpack.decode(second, type=GrammarVocabulary)
    trie = token_trie(vocabulary)
    _bound_memory(limits.memory_bytes)
    decoder = msgspec.msgpack.Decoder(Grammar)
    while (frame := read_frame(source.read)) is not None:
        signal.setitimer(signal.ITIMER_PROF, limits.cpu_s)
        try:
            verdict = check_grammar(decoder.decode(frame), trie, vocabulary.end_tokens)
        except MemoryError:
            os._exit(OUT_OF_MEMORY)
        signal.setitimer(signal.ITIMER_PROF, 0)
        answers.write(encode_frame(msgspec.msgpack.encode(verdict)))
        answers.flush()


def check_grammar(grammar: Grammar, trie: LLTokenizer, end_tokens: tuple[int, ...]) -> GrammarVerdict:
    """Compiles it and walks along it for a while.  Raises MemoryError."""
    try:
        if grammar.kind is GrammarKind.EBNF:
            grammar = msgspec.structs.replace(grammar, kind=GrammarKind.LARK, text=from_ebnf(grammar.text))
        compiled = CompiledGrammar(grammar, trie)
    except RecursionError:
        return GrammarVerdict(refused="nested too deeply")
    except MemoryError:
        raise
    except ValueError as error:
        return GrammarVerdict(refused=short_error(str(error)))
    except Exception as error:  # noqa: BLE001 - the next grammar is not to wait for a new process
        return GrammarVerdict(refused=f"it cannot be compiled ({type(error).__name__})")
    if compiled.failure:
        return GrammarVerdict(refused=compiled.failure)
    failure = random_walk(compiled.matcher(), end_tokens)
    return GrammarVerdict(refused=failure) if failure else GrammarVerdict(grammar=grammar)


def random_walk(matcher: GrammarMatcher, end_tokens: tuple[int, ...]) -> str | None:
    """Take tokens at random, always the same ones, until the answer may only end; the reason if that cannot be."""
    chance = Random(0)  # noqa: S311 - any walk will do
    for _ in range(WALK_TOKENS):
        mask = bytearray(matcher.mask())
        if matcher.failure:
            return matcher.failure
        ends = False
        for end in end_tokens:
            ends = ends or bool(mask[end // 8] & 1 << end % 8)
            mask[end // 8] &= ~(1 << end % 8)
        token = _any_bit(mask, chance)
        if token is None and ends:
            return None
        if token is None:
            return "it leads to a place from which no token of this model can go on"
        if not matcher.accept_tokens([token]):
            return matcher.failure
    return None


def _any_bit(mask: bytearray, chance: Random) -> int | None:
    start = chance.randrange(len(mask))
    for begin, part in ((start, mask[start:]), (0, mask[:start])):
        rest = part.lstrip(b"\0")
        if rest:
            at = begin + len(part) - len(rest)
            return at * 8 + chance.choice([bit for bit in range(8) if mask[at] & 1 << bit])
    return None


def _bound_memory(more: int) -> None:
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
    bound = pages * resource.getpagesize() + more
    resource.setrlimit(resource.RLIMIT_AS, (bound, bound))


if __name__ == "__main__":
    run_checker()
