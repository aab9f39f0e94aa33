"""Multi-head latent attention (MLA, arXiv:2405.04434) as data, and which tensors its weights are made of.

``weights.architecture.decoder`` has it as one kind of a layer's first block.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from penstock.kernels.operands import segment_ends
from penstock.weights.architecture.rope import RopeConfig
from penstock.weights.architecture.spec import ModelDetails
from penstock.weights.architecture.tensor_layout import HeadGroups, Matrix, TensorPart, Vector


class MlaConfig(ModelDetails, frozen=True, kw_only=True, tag="Latent"):
    """Attention to one latent vector a token, of which every head makes its own key and value; what is rotated stands
    behind the latent vector and is the same for all heads."""

    heads: int
    rank: int  # numbers of the latent vector
    plain_dim: int  # of a head's query and key, what is not rotated
    value_dim: int  # of a head's value
    rope: RopeConfig
    scale: float  # of the scores
    q_rank: int | None = None  # size of the normed vector that queries are made of; None: of the hidden state
    bias: bool = False  # of the products with the hidden state, and of the output
    eps: float = 1e-6  # of the norms of latent vectors

    window: ClassVar[None] = None
    chunk: ClassVar[None] = None

    @property
    def query_dim(self) -> int:
        """Numbers of a head's query."""
        return self.plain_dim + self.rope.columns


@dataclass(frozen=True, slots=True)
class MlaTensors:
    """The block of one layer: tensors begin with ``tensors``, weights with ``weights``."""

    latent: MlaConfig
    tensors: str
    weights: str
    hidden: int

    def layout(self) -> list[Matrix | Vector]:
        """``q_down`` and ``q_norm`` where queries have a rank, ``q``, ``latent``, ``latent_norm``, ``out``; and in the
        absorbed form ``absorb`` [H rank, plain_dim], which turns a query into one for latent vectors, and ``values``
        [H value_dim, rank], which makes values of them.
        """
        own, hidden = self.latent, self.hidden
        queries, made = own.heads * own.query_dim, own.plain_dim + own.value_dim
        expansion = "self_attn.kv_b_proj.weight", (own.heads * made, own.rank)
        return [
            *self._queries(queries),
            *self._product("latent", "self_attn.kv_a_proj_with_mqa", own.rank + own.rope.columns, hidden),
            self._vector("latent_norm", "self_attn.kv_a_layernorm.weight", own.rank),
            self._matrix("absorb", *expansion, groups=HeadGroups(own.heads, 0, own.plain_dim, turned=True)),
            self._matrix("values", *expansion, groups=HeadGroups(own.heads, own.plain_dim, made)),
            *self._output(own.heads * own.value_dim),
        ]

    def _queries(self, rows: int) -> list[Matrix | Vector]:
        rank = self.latent.q_rank
        if rank is None:
            return [self._matrix("q", "self_attn.q_proj.weight", (rows, self.hidden))]
        return [
            *self._product("q_down", "self_attn.q_a_proj", rank, self.hidden),
            self._vector("q_norm", "self_attn.q_a_layernorm.weight", rank),
            self._matrix("q", "self_attn.q_b_proj.weight", (rows, rank)),
        ]

    def _product(self, weight: str, name: str, rows: int, columns: int) -> list[Matrix | Vector]:
        made: list[Matrix | Vector] = [self._matrix(weight, f"{name}.weight", (rows, columns))]
        if self.latent.bias:
            made.append(self._vector(f"{weight}_bias", f"{name}.bias", rows))
        return made

    def _output(self, columns: int) -> list[Matrix | Vector]:
        part = TensorPart(f"{self.tensors}self_attn.o_proj.weight", (self.hidden, columns))
        ends = segment_ends(columns, self.latent.value_dim)
        made: list[Matrix | Vector] = [Matrix(f"{self.weights}out", (part,), segments=ends)]
        if self.latent.bias:
            made.append(self._vector("out_bias", "self_attn.o_proj.bias", self.hidden))
        return made

    def _matrix(self, weight: str, name: str, shape: tuple[int, int], *, groups: HeadGroups | None = None) -> Matrix:
        return Matrix(self.weights + weight, (TensorPart(self.tensors + name, shape, groups=groups),))

    def _vector(self, weight: str, name: str, size: int) -> Vector:
        return Vector(self.weights + weight, (TensorPart(self.tensors + name, (size,)),))
