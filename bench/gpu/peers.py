"""The same shape in transformers, if it is installed: its decode beside ours, in the same run."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import torch
from bench.gpu.models import LLAMA_8B, TINY
from bench.gpu.place import Place


def transformers_step(place: Place, context: int) -> float | None:
    """Seconds of one token at batch 1 over a cache of ``context`` tokens, with SDPA; None where it is not installed."""
    if find_spec("transformers") is None:
        return None
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.cache_utils import DynamicCache

    given: dict[str, Any] = {key: value for key, value in (TINY if place.dry else LLAMA_8B).items() if key != "dtype"}
    given.pop("architectures")
    given.pop("model_type")
    given.pop("torch_dtype")
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device(place.device):
            model = LlamaForCausalLM(LlamaConfig(**given | {"attn_implementation": "sdpa"})).eval()
    finally:
        torch.set_default_dtype(before)
    with torch.inference_mode():
        cache = DynamicCache()
        model(torch.zeros(1, context, dtype=torch.long, device=place.device), past_key_values=cache, use_cache=True)
        token = torch.zeros(1, 1, dtype=torch.long, device=place.device)
        return place.seconds(lambda: model(token, past_key_values=cache, use_cache=True), repeats=20, warm=3)
