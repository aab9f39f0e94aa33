"""An answer that moves while it is written, as a test knows it: its writer's pages, what goes, and what comes."""

from __future__ import annotations

from dataclasses import dataclass, field

from penstock.kernels.operands import KvShape
from penstock.kv.page_memory import KvLayout, KvMemory
from penstock.kv_spec import FULL_ATTENTION, KvSpec, TransferOrder
from penstock.types import PageId

SHAPE = KvShape.plain(layers=2, kv_heads=1, head_dim=4).grouped([FULL_ATTENTION, KvSpec(window=40)])
LAYOUT = KvLayout.for_shape(SHAPE, "bf16")
SIZE = LAYOUT.page_tokens
SLOT = LAYOUT.page_bytes // SIZE
PAGES = 64


def place(token: int, group: int) -> bytes:
    return f"{token}/{group}.".encode().ljust(SLOT, b"-")[:SLOT]


@dataclass
class Coming:
    """What the test knows of the receiver's side of a move."""

    known: int  # tokens
    ahead: int
    pages: list[int]
    pieces: TransferOrder


@dataclass
class Going:
    """The same of the sender's."""

    index: int  # tokens when it was asked for
    pieces: TransferOrder | None = None
    most: int = 0
    offered: int = 0
    told: bool = False


@dataclass
class Writer:
    """The worker that writes: a page table for each group of layers, all blocks kept."""

    memory: KvMemory
    tokens: list[int]
    tables: list[list[int]] = field(default_factory=lambda: [[], []])
    free: list[int] = field(default_factory=lambda: list(range(PAGES)))
    stopped: bool = False

    def write(self, count: int) -> None:
        """So many tokens more; the last one that is known is not in any page yet."""
        for _ in range(count):
            position = len(self.tokens) - 1
            for group, table in enumerate(self.tables):
                if position // SIZE == len(table):
                    table.append(self.free.pop())
                slot = position % SIZE
                self.memory.view(PageId(table[-1]))[slot * SLOT : (slot + 1) * SLOT] = place(
                    self.tokens[position], group
                )
            self.tokens.append(1000 + len(self.tokens))

    @property
    def computed(self) -> int:
        return len(self.tokens) - 1
