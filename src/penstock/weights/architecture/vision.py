"""A reader of images before a decoder: what it is, as data, and which tensors its weights are made of.

The kind of Qwen2-VL (arXiv:2409.12191) and Qwen2.5-VL (arXiv:2502.13923): square patches of the image in rows, rotated
by their place in two directions, and ``merge`` x ``merge`` neighbors made one row of the decoder's width.
``engine.models.vision`` computes it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from penstock.kernels.operands import Activation
from penstock.weights.architecture.decoder import DecoderConfig
from penstock.weights.architecture.spec import ModelDetails
from penstock.weights.architecture.tensor_layout import Matrix, TensorPart, Vector


class VisionConfig(ModelDetails, frozen=True, kw_only=True, tag="Vision"):
    """An encoder without a cache: every patch sees the whole image, or, in layers with windows, its own window."""

    layers: int
    width: int
    heads: int
    intermediate: int
    out: int  # the decoder's hidden size
    patch: int  # pixels a side
    merge: int  # patches a side of what becomes one token
    frames: int  # of a film in one patch; an image fills all of them alike
    norm: Literal["rms", "layer"]
    eps: float = 1e-6
    theta: float = 10_000.0
    activation: Activation
    alpha: float = 1.0  # of silu: "quick_gelu" is 1.702
    gated: bool = False
    window: int | None = None  # tokens a side
    full_layers: tuple[int, ...] = ()  # that see the whole image all the same

    @property
    def head_dim(self) -> int:
        """Columns of a head: a multiple of 4, half of them turned by the row, half by the column."""
        return self.width // self.heads

    @property
    def patch_numbers(self) -> int:
        """Inputs of one patch."""
        return 3 * self.frames * self.patch**2

    @property
    def token_side(self) -> int:
        """Pixels a side of what becomes one token."""
        return self.patch * self.merge

    def windowed(self, layer: int) -> bool:
        """Whether this layer attends within windows only."""
        return self.window is not None and layer not in self.full_layers


class VisionDecoderConfig(DecoderConfig, frozen=True, kw_only=True, tag="SeeingDecoder"):
    """A decoder whose prompts may have rows of images."""

    vision: VisionConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class VisionTensorNames:
    """A family's tensor names of the vision encoder."""

    prefix: str = "visual."
    inward: tuple[str, ...] = ("mlp.fc1",)
    down: str = "mlp.fc2"


def vision_layout(vision: VisionConfig, names: VisionTensorNames) -> list[Matrix | Vector]:
    """Weights ``vision.patches``, of layer i the matrices ``vision.i.qkv``, ``vision.i.out``, ``vision.i.inward`` and
    ``vision.i.down`` with biases ``vision.i.qkv_bias``, ..., the norms ``vision.i.attention_norm`` and
    ``vision.i.mlp_norm``, then ``vision.norm``, ``vision.merge`` and ``vision.merged``.

    All sums are plain: a reader of images stands whole on every device.
    """
    width, inner, joined = vision.width, vision.intermediate, vision.width * vision.merge**2
    kernel = (width, 3, vision.frames, vision.patch, vision.patch)
    patches = TensorPart(f"{names.prefix}patch_embed.proj.weight", kernel, flat=True)
    weights: list[Matrix | Vector] = [Matrix("vision.patches", (patches,))]
    for index in range(vision.layers):
        place = _VisionTensors(f"{names.prefix}blocks.{index}.", f"vision.{index}.")
        weights += [
            *place.norm(vision, "attention_norm", "norm1"),
            *place.linear("qkv", ("attn.qkv",), 3 * width, width),
            *place.linear("out", ("attn.proj",), width, width),
            *place.norm(vision, "mlp_norm", "norm2"),
            *place.linear("inward", names.inward, inner, width),
            *place.linear("down", (names.down,), width, inner),
        ]
    place = _VisionTensors(f"{names.prefix}merger.", "vision.")
    return [
        *weights,
        *place.norm(vision, "norm", "ln_q"),
        *place.linear("merge", ("mlp.0",), joined, joined),
        *place.linear("merged", ("mlp.2",), vision.out, joined),
    ]


@dataclass(frozen=True, slots=True)
class _VisionTensors:
    """Weights that begin with ``weights``, of tensors that begin with ``tensors``."""

    tensors: str
    weights: str

    def linear(self, weight: str, names: tuple[str, ...], rows: int, columns: int) -> list[Matrix | Vector]:
        """A product and its bias; each of ``names`` has ``rows`` rows."""
        matrices = tuple(TensorPart(f"{self.tensors}{name}.weight", (rows, columns)) for name in names)
        biases = tuple(TensorPart(f"{self.tensors}{name}.bias", (rows,)) for name in names)
        return [Matrix(self.weights + weight, matrices), Vector(f"{self.weights}{weight}_bias", biases)]

    def norm(self, vision: VisionConfig, weight: str, name: str) -> list[Matrix | Vector]:
        """A norm of the encoder's kind."""
        kinds = (("", "weight"),) if vision.norm == "rms" else (("", "weight"), ("_bias", "bias"))
        return [
            Vector(f"{self.weights}{weight}{more}", (TensorPart(f"{self.tensors}{name}.{tensor}", (vision.width,)),))
            for more, tensor in kinds
        ]
