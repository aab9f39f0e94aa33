"""What the ``config.json`` of models with experts have in common."""

from __future__ import annotations

from typing import Any

from penstock.kernels.routing import Routing
from penstock.weights.fields import Fields


def parse_routing(config: Fields, *, experts: str, **how: Any) -> Routing:
    """``num_experts_per_tok`` of as many as the field ``experts`` says (or its newer name), chosen as ``how`` says.

    Raises ModelError for a choice that cannot be made.
    """
    try:
        count = config.size(experts if config.has(experts) else "num_local_experts")
        return Routing(experts=count, top_k=config.size("num_experts_per_tok"), **how)
    except ValueError as error:
        raise config.refuse(str(error)) from error


def sparse_layers(config: Fields, layers: int) -> list[bool]:
    """Which layers have experts: every ``decoder_sparse_step``-th, without those that ``mlp_only_layers`` names."""
    step, dense = config.size("decoder_sparse_step", 1), config.get("mlp_only_layers", list, [])
    return [index not in dense and (index + 1) % step == 0 for index in range(layers)]
