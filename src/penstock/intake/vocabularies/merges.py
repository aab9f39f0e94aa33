"""GPT-2's pair of files, vocab.json and merges.txt (encoder.json and vocab.bpe as OpenAI named them).

Knows nothing about chat templates.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from penstock.errors import ModelError
from penstock.intake.vocabularies.ranks import CL100K

PAIRS = (("vocab.json", "merges.txt"), ("encoder.json", "vocab.bpe"))
_END = "<|endoftext|>"
_QWEN = CL100K.replace(r"\p{N}{1,3}", r"\p{N}")
_GPT2 = (None, "GPT2Tokenizer", "GPT2TokenizerFast")
_QWEN2 = ("Qwen2Tokenizer", "Qwen2TokenizerFast")


def read_merges(vocabulary: Path, merges: Path, config: Mapping[str, Any]) -> tuple[Tokenizer, dict[int, AddedToken]]:
    """A tokenizer, and the control token that stands in its vocabulary.  Raises ModelError."""
    kind = config.get("tokenizer_class")
    if kind not in (*_GPT2, *_QWEN2):
        raise ModelError(
            f"{vocabulary} does not say how words are cut, and tokenizer_config.json's tokenizer_class {kind!r} is "
            "none of GPT2Tokenizer and Qwen2Tokenizer. A tokenizer.json would work."
        )
    try:
        tokenizer = Tokenizer(models.BPE.from_file(str(vocabulary), str(merges)))
    except Exception as error:  # the library raises bare Exception
        raise ModelError(f"{vocabulary} and {merges.name} are no vocabulary and its merges: {error}") from error
    tokenizer.decoder = decoders.ByteLevel()
    if kind in _QWEN2:
        tokenizer.normalizer = normalizers.NFC()
        split = pre_tokenizers.Split(Regex(_QWEN), "isolated")
        bytes_only = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, bytes_only])
    else:
        prefix = config.get("add_prefix_space") is True
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=prefix)
    end = tokenizer.token_to_id(_END)
    return tokenizer, {} if end is None else {end: AddedToken(_END, normalized=False, special=True)}
