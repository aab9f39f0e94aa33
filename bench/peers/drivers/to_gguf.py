"""From a Hugging Face folder (Llama, bf16) to a BF16 gguf.  Runs with llama.cpp's ``gguf`` package and NumPy alone.

Norms become fp32, as llama.cpp's own converter makes them, and the rows of q and k are put into the order that
llama.cpp's rotary embedding wants: pairs beside each other instead of half a head apart.

    python to_gguf.py CHECKPOINT OUT.gguf
"""

from __future__ import annotations

import json
import mmap
import sys
from pathlib import Path
from typing import Any

import gguf
import numpy as np

NAMES = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
    "input_layernorm.weight": "attn_norm.weight",
    "self_attn.q_proj.weight": "attn_q.weight",
    "self_attn.k_proj.weight": "attn_k.weight",
    "self_attn.v_proj.weight": "attn_v.weight",
    "self_attn.o_proj.weight": "attn_output.weight",
    "post_attention_layernorm.weight": "ffn_norm.weight",
    "mlp.gate_proj.weight": "ffn_gate.weight",
    "mlp.up_proj.weight": "ffn_up.weight",
    "mlp.down_proj.weight": "ffn_down.weight",
}
NORMAL, CONTROL = 1, 3


def own_name(name: str) -> str:
    """llama.cpp's name of a Hugging Face tensor."""
    if name in NAMES:
        return NAMES[name]
    layer, _, rest = name.removeprefix("model.layers.").partition(".")
    return f"blk.{layer}.{NAMES[rest]}"


def paired(weight_NK: np.ndarray[Any, Any], heads: int) -> np.ndarray[Any, Any]:
    """Rows as llama.cpp keeps those of q and k: row i and row i + dim/2 of each head, one after the other."""
    rows, columns = weight_NK.shape
    return weight_NK.reshape(heads, 2, rows // heads // 2, columns).swapaxes(1, 2).reshape(rows, columns)


def add_settings(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    """The metadata of a Llama."""
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_rope_dimension_count(config.get("head_dim", config["hidden_size"] // config["num_attention_heads"]))
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])


def add_form(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    """What llama.cpp's tools want to know beside it."""
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_BF16)


def add_tokenizer(writer: gguf.GGUFWriter, folder: Path, config: dict[str, Any]) -> None:
    read = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    entries = sorted(read["model"]["vocab"], key=read["model"]["vocab"].__getitem__)
    specials = [token["content"] for token in sorted(read["added_tokens"], key=lambda token: token["id"])]
    tokens = [*entries, *(token for token in specials if token not in read["model"]["vocab"])]
    cut = "llama-bpe" if "Split" in json.dumps(read["pre_tokenizer"]) else "gpt-2"
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(cut)
    writer.add_token_list(tokens)
    writer.add_token_types([CONTROL if token in specials else NORMAL for token in tokens])
    writer.add_token_merges([pair if isinstance(pair, str) else " ".join(pair) for pair in read["model"]["merges"]])
    writer.add_bos_token_id(config["bos_token_id"])
    writer.add_eos_token_id(config["eos_token_id"])
    writer.add_add_bos_token(False)


def main() -> None:
    folder, out = Path(sys.argv[1]), Path(sys.argv[2])
    config = json.loads((folder / "config.json").read_text())
    writer = gguf.GGUFWriter(str(out), "llama")
    add_settings(writer, config)
    add_form(writer, config)
    add_tokenizer(writer, folder, config)
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    with (folder / "model.safetensors").open("rb") as file:
        view = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        length = int.from_bytes(view[:8], "little")
        header = json.loads(view[8 : 8 + length])
        header.pop("__metadata__", None)
        for name, info in header.items():
            begin, end = (8 + length + offset for offset in info["data_offsets"])
            bits = np.frombuffer(view, np.uint16, (end - begin) // 2, begin).reshape(info["shape"])
            if bits.ndim == 1:
                writer.add_tensor(own_name(name), (bits.astype(np.uint32) << 16).view(np.float32))
                continue
            turned = next((paired(bits, count) for part, count in heads.items() if part in name), bits)
            raw = np.ascontiguousarray(turned).view(np.uint8)
            writer.add_tensor(own_name(name), raw, raw_dtype=gguf.GGMLQuantizationType.BF16)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()


if __name__ == "__main__":
    main()
