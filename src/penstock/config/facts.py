"""penstock.config.facts: NEEDS A DOCSTRING."""

from __future__ import annotations

from collections.abc import Sequence

from penstock.config.base import Config
from penstock.config.schema import (
    PoolingConfig,
)
from penstock.kv_spec import FULL_ATTENTION, KvSpec, max_pages, tokens_that_fit
from penstock.types import PAGE_TOKENS


class GpuFacts(Config, frozen=True, kw_only=True):
    """One GPU, as ``launch.gpu`` found it."""

    name: str
    count: int = 1  # of them on this host; the first one is used
    capability: tuple[int, int]  # compute capability, as (9, 0)
    total_bytes: int
    free_bytes: int  # to a process that has its context there already


class GpuReport(Config, frozen=True, kw_only=True):
    """A GPU that can be used, or what keeps one from being used."""

    gpu: GpuFacts | None = None
    reason: str = "no GPU was looked for"
    remedy: str = ""  # what would help, if something would


class PhysicalCore(Config, frozen=True, kw_only=True):
    """One physical core."""

    cpus: tuple[int, ...]  # its logical processors, as far as this process may use them
    numa_node: int = 0  # where its memory is near


# MERGED: What is loaded beside a model's own weights, as bytes: draft heads, draft models, LoRA adapters.
# MERGED:
# MERGED: Pure numbers, for whoever divides memory; what they are made of is ``launch.beside``'s to know.


class ExtraWeights(Config, frozen=True, kw_only=True):
    """One of them.  Bytes are those of numbers of 2 bytes, as bf16 has them."""

    name: str  # as "draft head"
    shared_bytes: int  # once in a process that workers are forked from, or on a device
    worker_bytes: int = 0  # in each worker besides
    why: str  # the arithmetic in words

    def bytes(self, workers: int, number_bytes: int = 2) -> int:
        """All of it, for so many workers and numbers of this size."""
        return (self.shared_bytes + workers * self.worker_bytes) * number_bytes // 2


def extra_weight_bytes(all_of: Sequence[ExtraWeights], workers: int, number_bytes: int = 2) -> int:
    """Of several together."""
    return sum(own.bytes(workers, number_bytes) for own in all_of)


class MachineFacts(Config, frozen=True, kw_only=True):
    """The machine, as ``launch.facts`` found it."""

    cpus: tuple[int, ...]  # logical processors that this process may use
    cores: int  # physical cores among them, within the container's quota
    topology: tuple[PhysicalCore, ...] = ()  # the physical cores; empty: each processor is one, and all are on one node
    memory_bytes: int  # that can be had now without swapping, within the container's limit
    kernel_families: tuple[str, ...]  # that this build and processor can run, best first
    can_encrypt_pages: bool = False  # the library for it is installed, and recent enough
    gpu: GpuReport = GpuReport()


class ModelFacts(Config, frozen=True, kw_only=True):
    """The model, as far as memory and limits go."""

    name: str
    max_positions: int
    parameters: int
    multimodal: bool = False  # it reads images, or sounds
    auto_dtype: str  # compute type that suits the stored weights, "bf16" or "fp32"
    page_bytes_bf16: int  # of one KV page of 16 tokens of a group of layers, with 2-byte elements
    page_bytes_fp8: int = 0  # the same of codes (fp8_e4m3)
    reaches: tuple[KvSpec, ...] = (FULL_ATTENTION,)  # of each such group
    pooling: PoolingConfig | None = None  # None: it writes
    extra_weights: tuple[ExtraWeights, ...] = ()  # what is loaded with it
    activation_bytes: int = 0  # buffers of its largest step on a GPU

    @property
    def recurrent(self) -> bool:
        """Has it layers whose states change with every token?"""
        return any(reach.state_interval is not None for reach in self.reaches)


class KvPageSize(Config, frozen=True, kw_only=True):
    """What a token takes of KV memory."""

    page_bytes: int
    reaches: tuple[KvSpec, ...]  # of each group of layers
    chunk_tokens: int  # tokens of one request that a step computes at most

    def pages_for(self, tokens: int) -> int:
        """Pages that one context of so many tokens takes at most at any time."""
        return max_pages(self.reaches, tokens, ahead=self.chunk_tokens, page_tokens=PAGE_TOKENS)

    def tokens_in(self, pages: int, longest: int) -> int:
        """Tokens, up to ``longest``, of a context that so many pages hold."""
        return tokens_that_fit(self.reaches, pages, longest, ahead=self.chunk_tokens, page_tokens=PAGE_TOKENS)
