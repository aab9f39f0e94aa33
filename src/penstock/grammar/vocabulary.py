"""What a grammar must know of a model's tokens: the bytes of each, and which ones end an answer.

Plain data, so that it can be sent to another process.  Knows no tokenizer.
"""

from __future__ import annotations

import msgspec
from llguidance import LLTokenizer


class Vocabulary(msgspec.Struct, frozen=True, kw_only=True):
    """The tokens of one model by id, one entry a row of its logits; empty where a row stands for no text."""

    tokens: list[bytes]
    special: tuple[int, ...]  # control tokens: never text
    end_tokens: tuple[int, ...]  # allowed where a grammar is complete, and nowhere else


class _Tokens:
    """What ``LLTokenizer`` asks of a tokenizer."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.tokens = vocabulary.tokens
        self.eos_token_id = vocabulary.end_tokens[0]
        self.special_token_ids = sorted({*vocabulary.special, *vocabulary.end_tokens})

    def __call__(self, text: str) -> list[int]:
        """Only asked for where a text is forced to be spelled in one way, which is switched off (``sources``)."""
        raise NotImplementedError("text is not tokenized here")


def token_trie(vocabulary: Vocabulary) -> LLTokenizer:
    """The tokens as the matcher wants them; takes 0.6 s for 200,000.  Needs at least one end token."""
    return LLTokenizer(
        _Tokens(vocabulary),  # type: ignore[arg-type]  # the library looks at these attributes only
        n_vocab=len(vocabulary.tokens),
        eos_token=list(vocabulary.end_tokens),
    )
