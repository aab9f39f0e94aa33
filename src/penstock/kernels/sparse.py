"""Sparse attention as data: which blocks of keys a token reads where it does not read all of them.

::

    blocks of 64   | sinks | ......... candidates ......... | window, up to the token's own |
    read           |  all  | those that its queries like best |            all              |

A query likes a block as much as the best of the block's four pages: its product with the mean of that page's keys.  Of
the query heads that share keys the one that likes it most counts, so they read the same blocks.  Of blocks that are
liked equally the earlier one is taken.

The choice is each token's own.  It follows from the token's queries, its position and the keys before it, and blocks
are cut by absolute position: so it is the same however a prompt is cut, whoever computes it, whether the token was
written by a client or by the model (law 1).  That is also why the tokens of an answer are treated like those of a
prompt: what is an answer today is the next turn's prompt.

After MInference (arXiv:2407.02490), Quest (arXiv:2406.10774) and StreamingLLM (arXiv:2309.17453).  Knows no kernel.
"""

from __future__ import annotations

from dataclasses import dataclass

BLOCK_KEYS = 64
"""Keys of a block: what attention reduces at a time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sparse:
    """How much is read.  ``start`` is a position, everything else counts blocks of 64 keys."""

    sinks: int  # at the beginning
    window: int  # up to the token's own, which is one of them
    chosen: int
    start: int  # positions before it read everything

    def __post_init__(self) -> None:
        for name in ("sinks", "window", "chosen"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.start < 0:
            raise ValueError(f"start must be at least 0, got {self.start}")

    @property
    def name(self) -> str:
        """For people, and part of the name of what computes so."""
        return f"sparse{self.sinks}.{self.window}.{self.chosen}.{self.start}"

    @property
    def keys(self) -> int:
        """That a token reads at most, where it does not read all."""
        return (self.sinks + self.window + self.chosen) * BLOCK_KEYS

    def thins(self, position: int) -> bool:
        """Are there blocks that this position leaves out?"""
        return position >= self.start and position // BLOCK_KEYS >= self.sinks + self.window + self.chosen

    def candidates(self, position: int) -> range:
        """Blocks that a position chooses among: complete ones, before its window."""
        return range(self.sinks, position // BLOCK_KEYS - self.window + 1)
