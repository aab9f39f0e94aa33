"""Hugging Face transformers in fp32, teacher-forced: what every log-probability should be.

And random checkpoints of any family that transformers has, made by it from a ``config.json``.
"""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from penstock.weights.checkpoint_reader import Checkpoint
from tiny_models import write_tokenizer, write_weights
from vision_models import PREPROCESSOR


class Oracle:
    """One model, attention written out ("eager"), weights widened to fp32."""

    def __init__(self, model: Any) -> None:
        self.model = model.eval()

    @classmethod
    def of(cls, folder: Path) -> Oracle:
        """The model in a folder."""
        config = _config(json.loads((folder / "config.json").read_text()))
        return cls(_maker(config).from_pretrained(folder, config=config, dtype=torch.float32))

    def logprobs_TV(
        self, tokens: Sequence[int], images: Sequence[Image.Image] = (), image_token: int = -1
    ) -> NDArray[np.float64]:
        """Log-probability of every token after every position; ``image_token`` stands where the images are."""
        torch.set_num_threads(1)  # models are small, and the kernels' own threads want the cores
        ids = torch.tensor([list(tokens)])
        given = {"mm_token_type_ids": (ids == image_token).int(), **processed(images)} if images else {}
        with torch.inference_mode():
            logits_TV = self.model(input_ids=ids, **given).logits[0]
            return torch.log_softmax(logits_TV.double(), dim=-1).numpy()


def processed(images: Sequence[Image.Image]) -> dict[str, Any]:
    """Images, as transformers prepares them."""
    options = {name: value for name, value in PREPROCESSOR.items() if name != "image_processor_type"}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return dict(Qwen2VLImageProcessorPil(**options)(list(images), return_tensors="pt"))


def write_random_model(folder: Path, config: dict[str, Any], seed: int = 0, kind: Any = None) -> Oracle:
    """A folder that can be served, with weights under which nothing is trivial, and the oracle on the same weights.

    ``kind``: the class of transformers that makes the model, if it is not to be one that writes.
    """
    torch.manual_seed(seed)
    made = _config(config)
    model = (kind or _maker(made)).from_config(made, dtype=torch.float32)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            weight.copy_(_drawn(name, weight))
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):  # all zeros when made
                buffer.copy_(0.1 * torch.randn_like(buffer))
    model.save_pretrained(folder)
    (folder / "config.json").rename(folder / "config.newest.json")
    (folder / "config.json").write_text(json.dumps(config))
    write_tokenizer(folder, config.get("text_config", config)["vocab_size"])
    return Oracle(model)


def rename_tensors(folder: Path, found: str, published: str) -> None:
    """Tensors as the model's makers call them."""
    with Checkpoint(folder) as checkpoint:
        names = [name for name in checkpoint.names if name.startswith(found)]
        tensors = {name.replace(found, published): np.array(checkpoint.array(name)) for name in checkpoint.names}
    assert names, "transformers writes the published names now"
    for path in folder.glob("*.safetensors*"):
        path.unlink()
    write_weights(folder, tensors)


def _maker(config: AutoConfig) -> Any:
    """What has the model: transformers files those that see under another heading."""
    return AutoModelForCausalLM if type(config) in AutoModelForCausalLM._model_mapping else AutoModelForImageTextToText


def _config(config: dict[str, Any]) -> AutoConfig:
    values = {name: value for name, value in config.items() if name not in ("model_type", "auto_map")}
    return CONFIG_MAPPING[config["model_type"]].from_dict(values, attn_implementation="eager")


def _drawn(name: str, weight: torch.Tensor) -> torch.Tensor:
    """Random, of a size under which activations and logits stay at about one to three."""
    noise = torch.randn_like(weight)
    if weight.ndim == 1:  # norms are ones (or zeros) when made, biases zeros
        return weight + 0.2 * noise
    gain = 2.5 if re.search("embed|head|wte", name) else 1.5 if re.search("q_proj|k_proj|qkv|c_attn", name) else 1.0
    inputs = weight[0].numel() if weight.ndim > 3 else weight.shape[-1]  # of a convolution, or of one of a stack
    return noise * gain / inputs**0.5
