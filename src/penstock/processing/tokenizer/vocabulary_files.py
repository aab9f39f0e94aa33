"""Vocabulary files other than tokenizer.json, as tokenizers of the ``tokenizers`` library.

tiktoken's files (Kimi, Llama 3 as Meta publishes it, GPT) and Mistral's tekken.json list byte strings by rank; of two
neighbors the pair with the lowest rank is joined first (openai/tiktoken).  As merges that is every cut of a byte
string into two listed ones, by rank.  How a text is split into words is part of the models' own code: the patterns
stand here under the names of those classes.  GPT-2's pair is vocab.json and merges.txt (encoder.json and vocab.bpe as
OpenAI named them).

SentencePiece's tokenizer.model (Llama 2, Mistral, Gemma, T5) is a protocol buffer, of which only the fields that
encoding needs are read (google/sentencepiece, ``sentencepiece_model.proto``), sizes first.  BPE pieces become merges
in the order of their scores; Unigram models keep their scores.  A blank goes before a text and before what follows a
control token, where the model says so; with ``"legacy": false`` at the very start only, and not before another blank,
as in transformers.
"""

from __future__ import annotations

import base64
import binascii
import json
import struct
from collections.abc import Iterable, Iterator, Mapping
from enum import IntEnum
from pathlib import Path
from typing import Any

import msgspec
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from penstock.errors import ModelError
from penstock.processing.tokenizer.token_bytes import byte_level_alphabet

MAX_TOKENS = 1 << 20
MAX_TOKEN_BYTES = 1 << 10
FILLER = "<|reserved_token_{}|>"

_TAIL = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_SHORT = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
CL100K = rf"{_SHORT}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}|{_TAIL}"


def _cased(letters_out: str, tail: str) -> str:
    """Words cut where small letters are followed by capitals; ``letters_out`` is taken out of the classes."""
    upper = rf"[\p{{Lu}}\p{{Lt}}\p{{Lm}}\p{{Lo}}\p{{M}}{letters_out}]"
    lower = rf"[\p{{Ll}}\p{{Lm}}\p{{Lo}}\p{{M}}{letters_out}]"
    head = r"[^\r\n\p{L}\p{N}]?"
    return rf"{head}{upper}*{lower}+{_SHORT}?|{head}{upper}+{lower}*{_SHORT}?|\p{{N}}{{1,3}}|{tail}"


O200K = _cased("", _TAIL.replace(r"[\r\n]*", r"[\r\n/]*", 1))
KIMI = r"[\p{Han}]+|" + _cased(r"&&[^\p{Han}]", _TAIL)

_BY_FILE = {"cl100k_base.tiktoken": CL100K, "o200k_base.tiktoken": O200K, "o200k_harmony.tiktoken": O200K}
_BY_CLASS = {
    "TikTokenTokenizer": KIMI,
    "ChatGLM4Tokenizer": CL100K,
    "LlamaTokenizer": CL100K,
    "PreTrainedTokenizerFast": CL100K,
}
"""``tokenizer_class`` of tokenizer_config.json, the last two for Llama 3."""

_TEKKEN_SPECIAL = (
    *("<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]"),
    *("[/TOOL_RESULTS]", "[TOOL_CALLS]", "[IMG]", "<pad>", "[IMG_BREAK]", "[IMG_END]", "[PREFIX]", "[MIDDLE]"),
    *("[SUFFIX]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[TOOL_CONTENT]"),
)
"""The control tokens of a tekken.json that lists none (mistral-common, before v11)."""

_ALPHABET = {byte: char for char, byte in byte_level_alphabet().items()}
_TO_ALPHABET = {byte: _ALPHABET[byte] for byte in range(256)}


def is_tiktoken(path: Path) -> bool:
    """Whether the file begins with a line of base64 and a rank."""
    with path.open("rb") as file:
        line = file.readline(MAX_TOKEN_BYTES * 2)
    fields = line.split()
    if len(fields) != 2 or not fields[1].isdigit():
        return False
    try:
        base64.b64decode(fields[0], validate=True)
    except binascii.Error:
        return False
    return True


def read_tiktoken(path: Path, config: Mapping[str, Any], tokens: Mapping[int, AddedToken]) -> Tokenizer:
    """A tokenizer out of a tiktoken file; ``tokens`` come after it.  Raises ModelError."""
    pattern = _BY_FILE.get(path.name) or _BY_CLASS.get(str(config.get("tokenizer_class")))
    if pattern is None:
        raise ModelError(
            f"{path} does not say how words are cut, and tokenizer_config.json's tokenizer_class "
            f"{config.get('tokenizer_class')!r} is not one of {', '.join(_BY_CLASS)}. A tokenizer.json would work."
        )
    with path.open("rb") as file:
        pairs = [_tiktoken_line(path, number, line) for number, line in enumerate(file, 1) if line.strip()]
    vocabulary = {_written(token): rank for token, rank in pairs}
    if sorted(vocabulary.values()) != list(range(len(pairs))):
        raise ModelError(f"{path}: the ranks are not all the numbers from 0 to {len(pairs) - 1}, each once.")
    return _tokenizer(vocabulary, vocabulary, pattern)


def read_tekken(path: Path) -> tuple[Tokenizer, dict[int, AddedToken]]:
    """A tokenizer out of a tekken.json, its control tokens already in.  Raises ModelError."""
    try:
        data = json.loads(path.read_bytes())
        settings = data["config"]
        specials, size, pattern = (
            settings["default_num_special_tokens"],
            settings["default_vocab_size"],
            settings["pattern"],
        )
        entries = data["vocab"][: max(0, size - specials)]
        words = {_written(base64.b64decode(entry["token_bytes"], validate=True)): entry["rank"] for entry in entries}
        listed = data.get("special_tokens") or [
            {"rank": rank, "token_str": text} for rank, text in enumerate(_TEKKEN_SPECIAL)
        ]
        names = {entry["rank"]: entry["token_str"] for entry in listed}
    except (ValueError, KeyError, TypeError) as error:
        raise ModelError(f"{path} is no tekken.json: {type(error).__name__}: {error}") from error
    if sorted(words.values()) != list(range(len(entries))) or len(words) + specials > MAX_TOKENS:
        raise ModelError(f"{path}: the ranks are not all the numbers from 0 to {len(entries) - 1}, each once.")
    controls = [str(names.get(rank, f"<SPECIAL_{rank}>")) for rank in range(specials)]
    if len(set(controls) | words.keys()) != specials + len(words) or max(names, default=0) >= specials:
        raise ModelError(f"{path}: a control token is written like another token, or has a rank above {specials - 1}.")
    vocabulary = {name: rank for rank, name in enumerate(controls)}
    vocabulary |= {word: rank + specials for word, rank in words.items()}
    tokenizer = _tokenizer(vocabulary, words, pattern)
    return tokenizer, {rank: AddedToken(name, normalized=False, special=True) for rank, name in enumerate(controls)}


def _tiktoken_line(path: Path, number: int, line: bytes) -> tuple[bytes, int]:
    fields = line.split()
    try:
        token, rank = base64.b64decode(fields[0], validate=True), int(fields[1])
    except (binascii.Error, ValueError, IndexError) as error:
        raise ModelError(f"{path}, line {number}: expected a token in base64 and its rank.") from error
    if number > MAX_TOKENS or len(token) > MAX_TOKEN_BYTES:
        raise ModelError(
            f"{path}, line {number}: at most {MAX_TOKENS} tokens of at most {MAX_TOKEN_BYTES} bytes are read."
        )
    return token, rank


def _written(token: bytes) -> str:
    """Bytes in GPT-2's alphabet."""
    return token.decode("latin-1").translate(_TO_ALPHABET)


def _merges(words: Iterable[str], known: Mapping[str, int]) -> list[tuple[str, str]]:
    """Every cut of a word into two known ones, in the order of the words."""
    merges: list[tuple[str, str]] = []
    for word in words:
        for i in range(1, len(word)):
            left = word[:i]
            if left in known and (right := word[i:]) in known:
                merges.append((left, right))
    return merges


def _tokenizer(vocabulary: dict[str, int], words: Mapping[str, int], pattern: str) -> Tokenizer:
    missing = [char for char in _ALPHABET.values() if char not in words]
    if missing:
        raise ModelError(
            f"The vocabulary lacks {len(missing)} of the 256 single bytes; some texts would have no tokens."
        )
    merges = _merges(sorted(words, key=words.__getitem__), words)
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, ignore_merges=True))
    try:
        split = pre_tokenizers.Split(Regex(pattern), "isolated")
    except Exception as error:  # the library raises bare Exception
        raise ModelError(f"The tokenizer's pattern is none that the tokenizers library can read: {error}") from error
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


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


MAX_PIECES = 1 << 20
_MAX_VARINT_BYTES = 10


class PieceKind(IntEnum):
    """What a piece is for."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


class SegmentationMethod(IntEnum):
    """How pieces are chosen."""

    UNIGRAM = 1
    BPE = 2
    WORD = 3
    CHAR = 4


class VocabularyPiece(msgspec.Struct, frozen=True):
    """One entry of the vocabulary; its id is its place."""

    text: str
    score: float
    kind: PieceKind


class SentencePieceModel(msgspec.Struct, frozen=True, kw_only=True):
    """What a model file says, with the defaults of the format."""

    pieces: tuple[VocabularyPiece, ...]
    method: SegmentationMethod
    byte_fallback: bool
    suffix_blanks: bool  # blanks stand behind words
    charsmap: bytes  # normalization rules, compiled; empty for none
    dummy_prefix: bool  # a blank is put before a text
    squeeze_blanks: bool  # blanks at the ends go, several become one


def parse_sentencepiece(raw: bytes, *, where: str) -> SentencePieceModel:
    """Raises ModelError for anything that is no such file."""
    pieces: list[VocabularyPiece] = []
    trainer: dict[int, int | bytes] = {}
    normalizer: dict[int, int | bytes] = {}
    try:
        for number, value in _fields(raw):
            if number == 1 and isinstance(value, bytes):
                pieces.append(_piece(value))
            elif number == 2 and isinstance(value, bytes):
                trainer = dict(_fields(value))
            elif number == 3 and isinstance(value, bytes):
                normalizer = dict(_fields(value))
            if len(pieces) > MAX_PIECES:
                raise ValueError(f"more than {MAX_PIECES} pieces")
        charsmap = normalizer.get(2, b"")
        if not pieces or not isinstance(charsmap, bytes):
            raise ValueError("no pieces")
        return SentencePieceModel(
            pieces=tuple(pieces),
            method=SegmentationMethod(int(trainer.get(3, SegmentationMethod.UNIGRAM))),
            byte_fallback=bool(trainer.get(35, False)),
            suffix_blanks=bool(trainer.get(24, False)),
            charsmap=charsmap,
            dummy_prefix=bool(normalizer.get(3, True)),
            squeeze_blanks=bool(normalizer.get(4, True)),
        )
    except (ValueError, struct.error, IndexError) as error:
        raise ModelError(f"{where} is no SentencePiece model: {error}") from error


def _piece(raw: bytes) -> VocabularyPiece:
    fields = dict(_fields(raw))
    text, score = fields.get(1, b""), fields.get(2, b"\0\0\0\0")
    if not isinstance(text, bytes) or not isinstance(score, bytes) or len(score) != 4:
        raise ValueError("a piece with a wrong type")
    return VocabularyPiece(
        text.decode(), struct.unpack("<f", score)[0], PieceKind(int(fields.get(3, PieceKind.NORMAL)))
    )


def _fields(raw: bytes) -> Iterator[tuple[int, int | bytes]]:
    """Number and value of every field: an integer, or the bytes of anything else."""
    at = 0
    while at < len(raw):
        key, at = _varint(raw, at)
        wire = key & 7
        if wire == 0:
            value, at = _varint(raw, at)
            yield key >> 3, value
            continue
        size = {1: 8, 5: 4}.get(wire)
        if wire == 2:
            size, at = _varint(raw, at)
        if size is None or at + size > len(raw):
            raise ValueError("the file ends within a field" if size is not None else f"wire type {wire}")
        yield key >> 3, raw[at : at + size]
        at += size


def _varint(raw: bytes, at: int) -> tuple[int, int]:
    value = 0
    for i in range(_MAX_VARINT_BYTES):
        byte = raw[at + i]
        value |= (byte & 0x7F) << (7 * i)
        if byte < 0x80:
            return value, at + i + 1
    raise ValueError("a number without end")


BLANK = "▁"


def read_sentencepiece(path: Path, config: Mapping[str, Any]) -> tuple[Tokenizer, dict[int, AddedToken]]:
    """A tokenizer and its control and user-defined pieces, still to be added.  Raises ModelError."""
    model = parse_sentencepiece(path.read_bytes(), where=str(path))
    if model.suffix_blanks or model.method not in (SegmentationMethod.BPE, SegmentationMethod.UNIGRAM):
        kind = "blanks behind words" if model.suffix_blanks else f"the method {model.method.name}"
        raise ModelError(f"{path} uses {kind}. SentencePiece models by BPE or Unigram with blanks before words work.")
    tokenizer = Tokenizer(_bpe(model, path) if model.method is SegmentationMethod.BPE else _unigram(model))
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


def _added(model: SentencePieceModel, *, prefix: bool) -> dict[int, AddedToken]:
    """Unknown and control pieces are special, user-defined ones are text that is never cut.

    Those made of blanks are found once blanks are written as such (``normalized``), which a prefix would disturb.
    """
    added: dict[int, AddedToken] = {}
    for index, piece in enumerate(model.pieces):
        if piece.kind is PieceKind.USER_DEFINED:
            added[index] = AddedToken(piece.text, normalized=BLANK in piece.text and not prefix, special=False)
        elif piece.kind in (PieceKind.CONTROL, PieceKind.UNKNOWN):
            added[index] = AddedToken(piece.text, normalized=False, special=True)
    return added


def _bpe(model: SentencePieceModel, path: Path) -> models.BPE:
    vocabulary = {piece.text: index for index, piece in enumerate(model.pieces)}
    if len(vocabulary) != len(model.pieces):
        raise ModelError(f"{path} has two pieces that are written alike.")
    joinable = {piece.text: piece.score for piece in model.pieces if piece.kind is PieceKind.NORMAL}
    merges: list[tuple[str, str]] = []
    for text in sorted(joinable, key=joinable.__getitem__, reverse=True):
        for i in range(1, len(text)):
            left = text[:i]
            if left in joinable and (right := text[i:]) in joinable:
                merges.append((left, right))
    unknown = next((piece.text for piece in model.pieces if piece.kind is PieceKind.UNKNOWN), None)
    return models.BPE(vocabulary, merges, unk_token=unknown, fuse_unk=True, byte_fallback=model.byte_fallback)


def _unigram(model: SentencePieceModel) -> models.Unigram:
    pieces = [(piece.text, piece.score) for piece in model.pieces]
    unknown = next((i for i, piece in enumerate(model.pieces) if piece.kind is PieceKind.UNKNOWN), None)
    return models.Unigram(pieces, unk_id=unknown, byte_fallback=model.byte_fallback)


def _normalizer(model: SentencePieceModel, *, prefix: bool) -> normalizers.Sequence:
    steps: list[Any] = []
    if model.charsmap:
        steps.append(normalizers.Precompiled(model.charsmap))
    if model.squeeze_blanks:
        steps += [normalizers.Strip(left=True, right=True), normalizers.Replace(Regex(" {2,}"), " ")]
    if prefix:
        steps.append(normalizers.Prepend(BLANK))
    return normalizers.Sequence([*steps, normalizers.Replace(" ", BLANK)])
