"""Hugging Face transformers in fp32, teacher-forced: what every log-probability should be."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import LlamaForCausalLM


class Oracle:
    """One model, attention written out ("eager"), weights widened to fp32."""

    def __init__(self, folder: Path) -> None:
        self.model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()

    def logprobs_TV(self, tokens: Sequence[int]) -> NDArray[np.float64]:
        """Log-probability of every token after every position."""
        with torch.inference_mode():
            logits_TV = self.model(input_ids=torch.tensor([list(tokens)])).logits[0]
            return torch.log_softmax(logits_TV.double(), dim=-1).numpy()
