"""How much memory KV pages get: of the host's, or of a GPU's own, which they share with the model's weights.  Pure."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.config.device import RUNTIME_BYTES, DeviceChoice
from penstock.config.facts import ModelFacts, extra_weight_bytes
from penstock.config.schema import COMPILED_GRAMMARS_BYTES
from penstock.errors import ConfigError

KV_SHARE = 0.10
"""Default share of the available memory for the KV pages of all workers together."""

KV_CONTEXTS = 64
"""Default upper bound of one worker's pages, in contexts of the full length."""


@dataclass(frozen=True, slots=True)
class KvMemoryBudget:
    """The memory that a model and its pages share."""

    model: ModelFacts
    workers: int  # that hold KV pages
    number_bytes: int  # of a weight
    host_bytes: int
    choice: DeviceChoice
    decoded_bytes: int = 0  # set aside for decoded copies of compressed weights

    @property
    def free_bytes(self) -> int:
        """Free memory before anything is loaded."""
        return self.host_bytes if self.choice.gpu is None else self.choice.gpu.free_bytes

    @property
    def location(self) -> str:
        """Name of the machine or GPU, for messages."""
        return "this machine" if self.choice.gpu is None else self.choice.gpu.name

    @property
    def grammars_bytes(self) -> int:
        """The most that compiled grammars take in all workers, in host memory."""
        answers = self.model.pooling is None and self.choice.gpu is None
        return self.workers * COMPILED_GRAMMARS_BYTES if answers else 0

    @property
    def step_bytes(self) -> int:
        """Buffers of a step and the runtime on a GPU.  On the host they are negligible."""
        return 0 if self.choice.gpu is None else self.model.activation_bytes + RUNTIME_BYTES

    def available_bytes(self) -> int:
        """Bytes left for KV pages, and on the host for all else that grows.  Raises ConfigError."""
        model, workers, number_bytes = self.model, self.workers, self.number_bytes
        weights, others = (
            model.parameters * number_bytes,
            extra_weight_bytes(model.extra_weights, workers, number_bytes),
        )
        room = self.free_bytes - weights - others - self.step_bytes - self.decoded_bytes
        if room > 0:
            return room
        parts = [f"{format_size(weights)} for its weights"]
        parts += [f"{format_size(own.bytes(workers, number_bytes))} for {own.name}" for own in model.extra_weights]
        parts += [f"{format_size(self.step_bytes)} to compute"] if self.step_bytes else []
        parts += [f"{format_size(self.decoded_bytes)} for --decoded-weights"] if self.decoded_bytes else []
        smaller = "a smaller model" if not others else "a smaller model, or leave out what is loaded with it"
        raise ConfigError(
            f"{model.name} needs {' and '.join(parts)}, "
            f"{self.location} has {format_size(self.free_bytes)} free: stop something or serve {smaller}"
        )

    def kv_bytes(self, asked: int | None, needed: int) -> tuple[int, str]:
        """(bytes of KV pages in each worker, the source of that figure).  ``needed``: bytes of one full context."""
        room, workers = self.available_bytes(), self.workers
        half = max(room // 4, (room - self.grammars_bytes) // 2) // workers if self.choice.gpu is None else room
        if asked is None:
            share = min(int(room * KV_SHARE) // workers, KV_CONTEXTS * needed)
            budget = max(share, min(half, needed)) if self.choice.gpu is None else room
            return budget, f"each worker's default of {format_size(budget)}"
        source = f"--kv-memory {format_size(asked)}"
        if asked * workers > room:
            raise ConfigError(
                f"{source} for each of {workers} workers is more than the {format_size(room)} free "
                f"besides the weights: use --kv-memory {format_size(half)} or less"
            )
        return asked, source


def format_size(count: int, *, up: bool = False) -> str:
    """The size as ``--kv-memory`` reads it: "512MiB".  ``up``: rounded up."""
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if count >= 10 * size or (count >= size and count % size == 0):
            return f"{-(-count // size) if up else count // size}{unit}"
    return str(count)
