"""Tokenizers made on the spot: the byte-level kind of Llama 3, and the SentencePiece kind of Llama 2."""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

CORPUS = [
    "Once upon a time there was a little fox. The fox was lost in the forest.",
    "Il était une fois un renard; 从前有一只小狐狸。 Жила-была лиса 🦊🦊 и ёж.",
    "The quick brown fox jumps over the lazy dog, and the dog sleeps on.",
]
SPECIAL = ["<s>", "</s>", "<|user|>", "<|end|>"]


def byte_level() -> Tokenizer:
    """BPE over bytes in GPT-2's alphabet."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=420,
        special_tokens=[AddedToken(word, special=True, normalized=False) for word in SPECIAL],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_tokens([AddedToken("<think>", special=False, normalized=False)])
    return tokenizer


def sentence_piece() -> Tokenizer:
    """BPE over characters with ``▁`` for blanks and a token for every byte, as converted Llama 2 tokenizers are."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    letters = sorted({char for text in CORPUS[::2] for char in text.replace(" ", "▁")})
    merges = [("▁", "t"), ("h", "e"), ("▁t", "he"), ("o", "x"), ("f", "ox"), ("▁", "fox"), ("▁", "▁")]
    pieces += letters + [a + b for a, b in merges] + ["[INST]", "[/INST]"]
    vocabulary = {piece: i for i, piece in enumerate(dict.fromkeys(pieces))}
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens([AddedToken(word, normalized=False) for word in ("<unk>", "<s>", "</s>")])
    tokenizer.add_special_tokens([AddedToken(word, normalized=False) for word in ("[INST]", "[/INST]")])
    return tokenizer


def save(tokenizer: Tokenizer, folder: Path, **config: object) -> Path:
    """A model folder around a tokenizer, as far as the intake reads one."""
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "config.json").write_text(json.dumps({"vocab_size": tokenizer.get_vocab_size(), "eos_token_id": 1}))
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder
