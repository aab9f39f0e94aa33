"""SentencePiece's tokenizer.model (Llama 2, Mistral, Gemma, T5) as a tokenizer of the ``tokenizers`` library.

BPE pieces become merges in the order of their scores; Unigram models keep their scores.  When the model says so, a
blank is put before a text, and before what follows a control token: SentencePiece encodes these apart.  A
tokenizer_config.json with ``"legacy": false`` wants it at the very start only, and not before another blank, as
transformers has it.

Knows nothing about chat templates.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from penstock.errors import ModelError
from penstock.intake.vocabularies.spm_file import Kind, Method, SpmModel, parse_model

BLANK = "▁"


def read_sentencepiece(path: Path, config: Mapping[str, Any]) -> tuple[Tokenizer, dict[int, AddedToken]]:
    """A tokenizer and its control and user-defined pieces, still to be added.  Raises ModelError."""
    model = parse_model(path.read_bytes(), where=str(path))
    if model.suffix_blanks or model.method not in (Method.BPE, Method.UNIGRAM):
        kind = "blanks behind words" if model.suffix_blanks else f"the method {model.method.name}"
        raise ModelError(f"{path} uses {kind}. SentencePiece models by BPE or Unigram with blanks before words work.")
    tokenizer = Tokenizer(_bpe(model, path) if model.method is Method.BPE else _unigram(model))
    prefix = model.dummy_prefix and config.get("add_prefix_space") is not False
    first_only = config.get("legacy") is False
    tokenizer.normalizer = _normalizer(model, prefix=prefix and not first_only)
    if prefix and first_only:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(replacement=BLANK, prepend_scheme="first", split=False)
    steps: list[Any] = [decoders.Replace(BLANK, " "), decoders.ByteFallback(), decoders.Fuse()]
    if prefix:
        steps.append(decoders.Strip(content=" ", left=1))
    tokenizer.decoder = decoders.Sequence(steps)
    return tokenizer, _added(model, prefix=prefix)


def _added(model: SpmModel, *, prefix: bool) -> dict[int, AddedToken]:
    """Unknown and control pieces are special, user-defined ones are text that is never cut.

    Those made of blanks are found once blanks are written as such (``normalized``), which a prefix would disturb.
    """
    added: dict[int, AddedToken] = {}
    for index, piece in enumerate(model.pieces):
        if piece.kind is Kind.USER_DEFINED:
            added[index] = AddedToken(piece.text, normalized=BLANK in piece.text and not prefix, special=False)
        elif piece.kind in (Kind.CONTROL, Kind.UNKNOWN):
            added[index] = AddedToken(piece.text, normalized=False, special=True)
    return added


def _bpe(model: SpmModel, path: Path) -> models.BPE:
    vocabulary = {piece.text: index for index, piece in enumerate(model.pieces)}
    if len(vocabulary) != len(model.pieces):
        raise ModelError(f"{path} has two pieces that are written alike.")
    joinable = {piece.text: piece.score for piece in model.pieces if piece.kind is Kind.NORMAL}
    merges: list[tuple[str, str]] = []
    for text in sorted(joinable, key=joinable.__getitem__, reverse=True):
        for i in range(1, len(text)):
            left = text[:i]
            if left in joinable and (right := text[i:]) in joinable:
                merges.append((left, right))
    unknown = next((piece.text for piece in model.pieces if piece.kind is Kind.UNKNOWN), None)
    return models.BPE(vocabulary, merges, unk_token=unknown, fuse_unk=True, byte_fallback=model.byte_fallback)


def _unigram(model: SpmModel) -> models.Unigram:
    pieces = [(piece.text, piece.score) for piece in model.pieces]
    unknown = next((i for i, piece in enumerate(model.pieces) if piece.kind is Kind.UNKNOWN), None)
    return models.Unigram(pieces, unk_id=unknown, byte_fallback=model.byte_fallback)


def _normalizer(model: SpmModel, *, prefix: bool) -> normalizers.Sequence:
    steps: list[Any] = []
    if model.charsmap:
        steps.append(normalizers.Precompiled(model.charsmap))
    if model.squeeze_blanks:
        steps += [normalizers.Strip(left=True, right=True), normalizers.Replace(Regex(" {2,}"), " ")]
    if prefix:
        steps.append(normalizers.Prepend(BLANK))
    return normalizers.Sequence([*steps, normalizers.Replace(" ", BLANK)])
