"""Tiny random models that see, written as Hugging Face folders without transformers or torch, and images for them."""

from __future__ import annotations

import base64
import io
import json
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers

from penstock.weights.config_json import ConfigFields
from penstock.weights.families.registry import BUILT_IN
from penstock.weights.inspect import CONFIG
from tiny_models import DTYPES, write_weights

VOCAB = 160
SPECIAL = ("<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|image_pad|>", "<|vision_end|>")
IMAGE_TOKEN = VOCAB - len(SPECIAL) + 3

TEMPLATE = """\
{% for message in messages %}<|im_start|> {{ message['role'] }} {% if message['content'] is string %}\
{{ message['content'] }}{% else %}{% for content in message['content'] %}{% if content['type'] == 'image' %}\
<|vision_start|><|image_pad|><|vision_end|>{% elif 'text' in content %} {{ content['text'] }} {% endif %}{% endfor %}\
{% endif %}<|im_end|>{% endfor %}{% if add_generation_prompt %}<|im_start|> assistant{% endif %}"""

PREPROCESSOR = {
    "image_processor_type": "Qwen2VLImageProcessor",
    "min_pixels": 3136,
    "max_pixels": 12845056,
    "patch_size": 14,
    "temporal_patch_size": 2,
    "merge_size": 2,
    "image_mean": [0.48145466, 0.4578275, 0.40821073],
    "image_std": [0.26862954, 0.26130258, 0.27577711],
}

_PLAIN = {"depth": 3, "embed_dim": 64, "hidden_size": 64, "mlp_ratio": 2, "num_heads": 4, "in_chans": 3}
_WINDOWED = {
    "depth": 3,
    "hidden_size": 64,
    "intermediate_size": 80,
    "out_hidden_size": 64,
    "num_heads": 4,
    "in_chans": 3,
    "window_size": 56,
    "fullatt_block_indexes": [1],
}
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen2_vl": ("Qwen2VLForConditionalGeneration", _PLAIN),
    "qwen2_5_vl": ("Qwen2_5_VLForConditionalGeneration", _WINDOWED),
}


def vision_config(kind: str = "qwen2_vl") -> dict[str, Any]:
    """A ``config.json`` as the first releases wrote it, three layers on either side."""
    architecture, vision = KINDS[kind]
    return {
        "architectures": [architecture],
        "model_type": kind,
        "vocab_size": VOCAB,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "hidden_act": "silu",
        "max_position_embeddings": 1024,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
        "rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]},
        "tie_word_embeddings": False,
        "use_sliding_window": False,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "image_token_id": IMAGE_TOKEN,
        "video_token_id": VOCAB - 2,
        "vision_start_token_id": IMAGE_TOKEN - 1,
        "vision_end_token_id": IMAGE_TOKEN + 1,
        "vision_config": {**vision, "patch_size": 14, "spatial_merge_size": 2, "temporal_patch_size": 2},
    }


def write_vision_model(folder: Path, kind: str = "qwen2_vl", *, seed: int = 0, dtype: str = "fp32") -> Path:
    """A folder that can be served: weights under which nothing is trivial, a word-level tokenizer, a chat template."""
    folder.mkdir(parents=True, exist_ok=True)
    config = vision_config(kind)
    (folder / CONFIG).write_text(json.dumps(config))
    (folder / "preprocessor_config.json").write_text(json.dumps(PREPROCESSOR))
    family = BUILT_IN[config["architectures"][0]]
    rng = np.random.default_rng(seed)
    shapes = family.layout(family.parse(ConfigFields(config, CONFIG))).shapes
    write_weights(folder, {name: _drawn(rng, name, shape).astype(DTYPES[dtype]) for name, shape in shapes.items()})
    words = {f"t{index}": index for index in range(VOCAB - len(SPECIAL))}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="t2"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens([AddedToken(word, special=True, normalized=False) for word in SPECIAL])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"chat_template": TEMPLATE, "eos_token": "<|im_end|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


def _drawn(rng: np.random.Generator, name: str, shape: tuple[int, ...]) -> np.ndarray[Any, Any]:
    noise = rng.standard_normal(shape)
    if len(shape) == 1:
        return 0.1 * noise if name.endswith("bias") else 1.0 + 0.2 * noise
    gain = 2.5 if "embed_tokens" in name or "lm_head" in name else 1.5 if "q_proj" in name or "qkv" in name else 1.0
    return noise * gain / np.prod(shape[1:]) ** 0.5


def picture(width: int, height: int, seed: int = 0) -> Image.Image:
    """Coloured patches of a few pixels each: no two images have one twice."""
    coarse = np.random.default_rng(seed).integers(0, 256, (height // 9 + 1, width // 9 + 1, 3), np.uint8)
    return Image.fromarray(coarse.repeat(9, axis=0).repeat(9, axis=1)[:height, :width])


def encoded(image: Image.Image, form: str = "PNG", **options: Any) -> bytes:
    """The bytes of a file."""
    file = io.BytesIO()
    image.save(file, form, **options)
    return file.getvalue()


def data_url(raw: bytes, form: str = "png") -> str:
    """As a chat has it."""
    return f"data:image/{form};base64,{base64.b64encode(raw).decode()}"


def image_part(width: int, height: int, seed: int = 0) -> dict[str, Any]:
    """A part of a message."""
    return {"type": "image_url", "image_url": {"url": data_url(encoded(picture(width, height, seed)))}}
