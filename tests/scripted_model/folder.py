"""The scripted model's folder: a chat template and a tokenizer in the manner of Qwen 3, tiny random weights."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from shutil import copyfile
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from tiny_models import llama_config, random_tensors, write_weights

from .conversation import BEGIN, END

ROOT = Path(__file__).resolve().parents[2]
TEMPLATE = ROOT / "tests/fixtures/templates/hermes.jinja"
TEXTS = [*sorted((ROOT / "src/penstock/api").glob("*.py")), ROOT / "README.md", ROOT / "docs/serve.md"]
"""What the tokenizer is trained on: code and English, as agents send."""

VOCAB = 4096
CONTEXT = 131_072
CONTROL = ("<|endoftext|>", BEGIN, END)
MARKS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>")


@cache
def agent_tokenizer(vocab: int = VOCAB) -> Tokenizer:
    """BPE over bytes with Qwen 3's control tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab - len(MARKS),
        special_tokens=[AddedToken(word, special=True, normalized=False) for word in CONTROL],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([path.read_text(encoding="utf-8") for path in TEXTS], trainer)
    tokenizer.add_tokens([AddedToken(word, special=False, normalized=False) for word in MARKS])
    return tokenizer


def scripted_config(**changes: Any) -> dict[str, Any]:
    """Of a model whose pages are small, since nobody computes what stands in them."""
    tiny: dict[str, Any] = {
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "max_position_embeddings": CONTEXT,
        "tie_word_embeddings": True,
        "bos_token_id": 0,
        "eos_token_id": 2,
    }
    return llama_config(**(tiny | changes))


def write_agent_model(folder: Path, **changes: Any) -> Path:
    """A folder that can be served, with any ``changes`` of its configuration; its weights are random."""
    config = scripted_config(**changes)
    tokenizer = agent_tokenizer(config["vocab_size"])
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config["vocab_size"] = max(config["vocab_size"], tokenizer.get_vocab_size())
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": END}))
    copyfile(TEMPLATE, folder / "chat_template.jinja")
    write_weights(folder, random_tensors(config))
    return folder
