"""What ``resolve`` decides from: the machine (``launch.machine``, ``launch.gpu_probe``), the model, and what is loaded
with it (``launch.draft_model``), as plain numbers.
"""

from __future__ import annotations

from collections.abc import Sequence

from penstock.config.base import Config
from penstock.config.schema import PoolingConfig
from penstock.kv_spec import FULL_ATTENTION, KvSpec, max_pages, tokens_that_fit
from penstock.types import PAGE_TOKENS


class GpuFacts(Config, frozen=True, kw_only=True):
    """One GPU."""

    name: str
    count: int = 1  # of GPUs on this host; the first one is used
    capability: tuple[int, int]  # compute capability, as (9, 0)
    total_bytes: int
    free_bytes: int  # to a process that has its CUDA context already


class GpuReport(Config, frozen=True, kw_only=True):
    """A usable GPU, or the reason why there is none."""

    gpu: GpuFacts | None = None
    reason: str = "no GPU was looked for"
    remedy: str = ""  # what would make one usable; empty: nothing


class PhysicalCore(Config, frozen=True, kw_only=True):
    """One physical core."""

    cpus: tuple[int, ...]  # its logical processors that this process may use
    numa_node: int = 0


class ExtraWeights(Config, frozen=True, kw_only=True):
    """Weights loaded with the model: a draft head, a draft model or LoRA adapters.  Bytes are of bf16."""

    name: str  # as "draft head"
    shared_bytes: int  # once per host, in the process that forks the workers, or per device
    worker_bytes: int = 0  # in each worker, on top of that
    why: str  # the arithmetic in words

    def bytes(self, workers: int, number_bytes: int = 2) -> int:
        """Total bytes for ``workers`` workers and numbers of ``number_bytes``."""
        return (self.shared_bytes + workers * self.worker_bytes) * number_bytes // 2


def extra_weight_bytes(weights: Sequence[ExtraWeights], workers: int, number_bytes: int = 2) -> int:
    """Total bytes of all of them."""
    return sum(each.bytes(workers, number_bytes) for each in weights)


class MachineFacts(Config, frozen=True, kw_only=True):
    """This machine, within the limits of the container."""

    cpus: tuple[int, ...]  # logical processors that this process may use
    cores: int  # physical cores among them, within the container's quota
    topology: tuple[PhysicalCore, ...] = ()  # empty: each logical processor is a core, all on one NUMA node
    memory_bytes: int  # available without swapping
    kernel_families: tuple[str, ...]  # that this build and processor can run, best first
    decoding_families: tuple[str, ...] = ()  # those that compute from compressed weights, decoding in registers
    can_encrypt_pages: bool = False  # the library for that is installed and recent enough
    gpu: GpuReport = GpuReport()

    @property
    def physical_cores(self) -> tuple[PhysicalCore, ...]:
        """The topology, or one core per logical processor where it is unknown."""
        return self.topology or tuple(PhysicalCore(cpus=(cpu,)) for cpu in self.cpus)


class ModelFacts(Config, frozen=True, kw_only=True):
    """The model's sizes and capabilities, as far as memory and limits depend on them."""

    name: str
    max_positions: int
    parameters: int
    multimodal: bool = False  # takes images or audio
    auto_dtype: str  # compute type that suits the stored weights, "bf16" or "fp32"
    page_bytes_bf16: int  # of one KV page of 16 tokens of a group of layers, with 2-byte elements
    page_bytes_fp8: int = 0  # the same of codes (fp8_e4m3)
    reaches: tuple[KvSpec, ...] = (FULL_ATTENTION,)  # of each such group
    pooling: PoolingConfig | None = None  # None: a generative model
    extra_weights: tuple[ExtraWeights, ...] = ()
    activation_bytes: int = 0  # buffers of its largest step on a GPU
    layers: int = 0
    hidden: int = 0
    token_numbers: int = 0  # of its weights that one token is multiplied with
    tensor_ways: tuple[int, ...] = ()  # numbers of tensor ranks that can divide it, one aside
    why_not_divided: str = ""  # where there are none

    @property
    def recurrent(self) -> bool:
        """Whether some layers keep a state that changes with every token."""
        return any(reach.state_interval is not None for reach in self.reaches)


class KvPageSize(Config, frozen=True, kw_only=True):
    """KV pages that a context takes."""

    page_bytes: int
    reaches: tuple[KvSpec, ...]  # of each group of layers
    chunk_tokens: int  # the most tokens of one request in one step

    def pages_for(self, tokens: int) -> int:
        """The most pages that one context of ``tokens`` tokens takes at any time."""
        return max_pages(self.reaches, tokens, ahead=self.chunk_tokens, page_tokens=PAGE_TOKENS)

    def tokens_in(self, pages: int, longest: int) -> int:
        """Tokens, up to ``longest``, of the longest context that ``pages`` pages hold."""
        return tokens_that_fit(self.reaches, pages, longest, ahead=self.chunk_tokens, page_tokens=PAGE_TOKENS)
