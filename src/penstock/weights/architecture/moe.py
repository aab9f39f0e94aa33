"""A feed-forward block of routed experts as data, and which tensors its weights are made of.

``weights.architecture.decoder`` has it as one kind of a layer's second block.
"""

from __future__ import annotations

from dataclasses import dataclass

from penstock.kernels.operands import COLUMN_UNIT, SILU, Gate, Routing, segment_ends
from penstock.weights.architecture.spec import ModelDetails
from penstock.weights.architecture.tensor_layout import Matrix, TensorPart, Vector


class MoeConfig(ModelDetails, frozen=True, kw_only=True, tag="Moe"):
    """Each token's sum over the experts that its router chooses, and over the shared one if there is one."""

    routing: Routing
    intermediate: int  # of one expert
    gate: Gate = SILU  # of experts and the shared one
    router_bias: bool = False  # of the router's logits
    choice_bias: bool = False  # of its scores, for the choice only
    bias: bool = False  # of the experts' matrices
    weighs_input: bool = False  # a token is multiplied by its weight before an expert, else after it
    shared: int | None = None  # intermediate size of what every token passes


class GatedSharedMoeConfig(MoeConfig, frozen=True, kw_only=True, tag="GatedSharedMoe"):
    """``MoeConfig`` whose shared expert is multiplied by a logistic function of one number per token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MoeTensorNames:
    """A family's tensor names without the layer's prefix; ``{}`` is an expert's number.

    ``stacked``: one tensor holds all experts, inputs first, and ``gate_up`` is one name.
    """

    router: str = "mlp.gate"
    choice_bias: str = "mlp.gate.e_score_correction_bias"
    gate_up: tuple[str, ...] = ("mlp.experts.{}.gate_proj.weight", "mlp.experts.{}.up_proj.weight")
    gate_up_bias: str = ""
    down: str = "mlp.experts.{}.down_proj.weight"
    down_bias: str = ""
    stacked: bool = False
    shared_gate_up: tuple[str, str] = ("mlp.shared_experts.gate_proj.weight", "mlp.shared_experts.up_proj.weight")
    shared_down: str = "mlp.shared_experts.down_proj.weight"
    shared_gate: str = ""


@dataclass(frozen=True, slots=True)
class MoeTensors:
    """The block of one layer: tensors begin with ``tensors``, weights with ``weights``."""

    moe: MoeConfig
    names: MoeTensorNames
    tensors: str
    weights: str
    hidden: int

    def layout(self) -> list[Matrix | Vector]:
        """As far as the block has them: ``router`` with ``router_bias`` and ``choice_bias``, ``experts.E.gate_up`` and
        ``experts.E.down``, each with a bias ``experts.E.gate_up_bias``, ..., ``shared_gate_up``, ``shared_down`` and
        ``shared_gate``.
        """
        moe, names = self.moe, self.names
        experts = moe.routing.experts
        weights = [self._matrix("router", self._part(f"{names.router}.weight", experts, self.hidden))]
        if moe.router_bias:
            weights.append(self._vector("router_bias", self._part(f"{names.router}.bias", experts)))
        if moe.choice_bias:
            weights.append(self._vector("choice_bias", self._part(names.choice_bias, experts)))
        for expert in range(experts):
            weights += self._expert(expert)
        if moe.shared is not None:
            gate_up = (self._part(name, moe.shared, self.hidden) for name in names.shared_gate_up)
            weights.append(self._matrix("shared_gate_up", *gate_up))
            down = self._part(names.shared_down, self.hidden, moe.shared)
            weights.append(self._matrix("shared_down", down, segments=segment_ends(moe.shared, COLUMN_UNIT)))
        if isinstance(moe, GatedSharedMoeConfig):
            weights.append(self._matrix("shared_gate", self._part(names.shared_gate, 1, self.hidden)))
        return weights

    def _expert(self, expert: int) -> list[Matrix | Vector]:
        moe, names, inner = self.moe, self.names, self.moe.intermediate
        rows = 2 * inner // len(names.gate_up)
        gate_up = (self._of_expert(name, expert, rows, self.hidden) for name in names.gate_up)
        down = self._of_expert(names.down, expert, self.hidden, inner)
        weights = [
            self._matrix(f"experts.{expert}.gate_up", *gate_up),
            self._matrix(f"experts.{expert}.down", down, segments=segment_ends(inner, COLUMN_UNIT)),
        ]
        if moe.bias:
            biases = (("gate_up_bias", names.gate_up_bias, 2 * inner), ("down_bias", names.down_bias, self.hidden))
            for weight, name, size in biases:
                part = TensorPart(self.tensors + name, (moe.routing.experts, size), index=expert)
                weights.append(self._vector(f"experts.{expert}.{weight}", part))
        return weights

    def _of_expert(self, name: str, expert: int, n: int, k: int) -> TensorPart:
        if not self.names.stacked:
            return self._part(name.format(expert), n, k)
        return TensorPart(self.tensors + name, (self.moe.routing.experts, k, n), index=expert, transposed=True)

    def _part(self, name: str, *shape: int) -> TensorPart:
        return TensorPart(self.tensors + name, shape)

    def _matrix(self, weight: str, *parts: TensorPart, segments: tuple[int, ...] | None = None) -> Matrix | Vector:
        return Matrix(self.weights + weight, parts, segments)

    def _vector(self, weight: str, part: TensorPart) -> Matrix | Vector:
        return Vector(self.weights + weight, (part,))
