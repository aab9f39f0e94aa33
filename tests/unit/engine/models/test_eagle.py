"""A head computes what its paper says: against the plain formula in torch, fp32."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812

from penstock.engine.models.eagle import build_head
from penstock.kernels.operands import StepBatch
from penstock.kernels.ops import DirectProgram
from penstock.kernels.sampling import GumbelRows
from penstock.kernels.select import make_ops
from penstock.weights.eagle import inspect_draft_head, load_draft_head
from penstock.weights.inspect import inspect_model
from penstock.weights.load import load_model
from tiny_heads import head_config, head_tensors, write_head
from tiny_models import llama_config, random_tensors, write_model

MODEL = llama_config(tie_word_embeddings=True)
CONFIG = head_config(MODEL)
TOKENS = 21


def oracle(tokens: list[int], taps: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
    """(what the layer says of every position, logits), where position i reads taps[i] and tokens[i]."""
    own = {
        name: torch.from_numpy(value.astype(np.float32)) for name, value in head_tensors(CONFIG, dtype="fp32").items()
    }
    embed = torch.from_numpy(random_tensors(MODEL, dtype="fp32")["model.embed_tokens.weight"])

    def norm(x: torch.Tensor, name: str) -> torch.Tensor:
        return F.rms_norm(x, (64,), own[f"{name}.weight"], 1e-5)

    def rotated(x: torch.Tensor) -> torch.Tensor:
        angles = torch.outer(torch.arange(len(tokens)).float(), 10000.0 ** (-torch.arange(0, 16, 2).float() / 16))
        cos, sin = torch.cat((angles.cos(),) * 2, -1), torch.cat((angles.sin(),) * 2, -1)
        return x * cos + torch.cat((-x[..., 8:], x[..., :8]), -1) * sin

    feature = torch.from_numpy(taps) @ own["fc.weight"].T
    x = torch.cat((norm(embed[tokens], "midlayer.input_layernorm"), norm(feature, "midlayer.hidden_norm")), -1)
    q, k, v = (
        (x @ own[f"midlayer.self_attn.{name}_proj.weight"].T).view(len(tokens), -1, 16).transpose(0, 1)
        for name in "qkv"
    )
    k, v = (rotated(k).repeat_interleave(2, 0), v.repeat_interleave(2, 0))
    scores = rotated(q) @ k.transpose(1, 2) / math.sqrt(16)
    ahead = torch.ones(len(tokens), len(tokens)).triu(1).bool()
    mixed = (scores.masked_fill(ahead, -math.inf).softmax(-1) @ v).transpose(0, 1).reshape(len(tokens), -1)
    said = feature + mixed @ own["midlayer.self_attn.o_proj.weight"].T
    y = norm(said, "midlayer.post_attention_layernorm")
    gate, up = (y @ own[f"midlayer.mlp.{name}_proj.weight"].T for name in ("gate", "up"))
    said = said + (F.silu(gate) * up) @ own["midlayer.mlp.down_proj.weight"].T
    return said, norm(said, "norm") @ embed.T


@pytest.mark.parametrize("recorded", [True, False])
def test_a_head_is_the_formula(tmp_path: Path, recorded: bool) -> None:
    write_model(tmp_path / "model", MODEL, dtype="fp32")
    write_head(tmp_path / "head", CONFIG, head_tensors(CONFIG, dtype="fp32"))
    ops = make_ops(compute_dtype="fp32")
    spec = inspect_model(tmp_path / "model")
    model = load_model(tmp_path / "model", spec, ops)
    loaded = load_draft_head(tmp_path / "head", inspect_draft_head(tmp_path / "head", spec), model.weights_hash, ops)
    head = build_head(loaded, model, ops, 64)
    rng = np.random.default_rng(3)
    tokens = rng.integers(0, 128, TOKENS).astype(np.int32)
    taps = rng.standard_normal((TOKENS, 3 * 64)).astype(np.float32)
    said, logits = oracle(tokens.tolist(), taps)
    kv = ops.new_kv(head.kv, pages=2)
    program = ops.record(head.first, kv) if recorded else DirectProgram(ops, head.first, kv)
    picks = GumbelRows.empty(TOKENS)
    for begin, end in ((0, 9), (9, TOKENS)):  # what was read in one step is there in the next
        count = end - begin
        batch = StepBatch(
            tokens[begin:end],
            np.arange(begin, end, dtype=np.int32),
            np.array([0, count], np.int32),
            np.array([[1, 0]], np.int32),
            np.arange(count, dtype=np.int32),
            features_TW=taps[begin:end],
        )
        picks = GumbelRows.empty(count)
        program.run(batch, 0, [], picks)
        np.testing.assert_allclose(ops.to_numpy(program.hidden()), said[begin:end].numpy(), rtol=2e-4, atol=2e-4)
        assert picks.tokens_F.tolist() == logits[begin:end].argmax(-1).tolist()
