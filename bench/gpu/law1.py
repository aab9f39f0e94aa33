"""Law 1 for whole steps: one prompt, one answer, however it is cut, in whatever company, captured or not."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import numpy as np
from bench.gpu.driving import Driver
from bench.gpu.figures import Check
from bench.gpu.models import Made
from numpy.typing import NDArray

from penstock.kernels.ops import DirectProgram, Ops


@dataclass(frozen=True, slots=True)
class Sizes:
    """Of prompts and answers; ``chunks``: tokens of a prompt's pieces; ``company``: others in the batches."""

    length: int
    answer: int
    chunks: tuple[int, ...]
    company: tuple[int, ...]

    @classmethod
    def of(cls, *, dry: bool) -> Sizes:
        """For real, or dry.  Real prompts are longer than a partition of attention's keys, and so are tables."""
        return cls(10, 3, (4,), (2,)) if dry else cls(700, 6, (16, 37, 300), (1, 2, 16))


def matrix(made: Made, ops: Ops, sizes: Sizes) -> Iterator[Check]:
    """Every way of computing an answer against the plainest: the prompt as one step, one operation after another."""

    def answer(chunk: int, others: int, *, direct: bool = False) -> list[int]:
        driver = Driver(made, ops, 1 + others, sizes.length + sizes.answer)
        if direct:
            driver.program = DirectProgram(ops, made.model, driver.kv)
        return _written(driver, sizes, chunk, others)

    plain = answer(sizes.length, 0, direct=True)
    ways: dict[str, Callable[[], list[int]]] = {"the program of a step": lambda: answer(sizes.length, 0)}
    ways |= {f"chunks of {chunk}": partial(answer, chunk, 0) for chunk in sizes.chunks}
    ways |= {f"with {others} others": partial(answer, sizes.length, others) for others in sizes.company}
    for name, way in ways.items():
        try:
            got = way()
            found = "the same tokens" if got == plain else f"{got} instead of {plain}"
            yield Check(f"{made.name}: {name}", got == plain, found)
        except Exception as error:  # noqa: BLE001 - the finding
            yield Check(f"{made.name}: {name}", passed=False, found=f"{type(error).__name__}: {error}"[:200])


def _written(driver: Driver, sizes: Sizes, chunk: int, company: int) -> list[int]:
    """An answer of the first sequence; the others read other prompts and write beside it."""
    texts: NDArray[np.int32] = driver.texts(1 + company, sizes.length)
    first = [driver.read(texts[s], s, chunk) for s in range(1 + company)]
    found, tokens = [first[0]], np.array(first, np.int32)
    for step in range(sizes.answer - 1):
        batch, picks = driver.answers(1 + company, sizes.length + step)
        batch.tokens_T[:] = tokens
        picks.seeds_F[:] = 0
        picks.temperatures_F[:] = 1.0
        driver.program.run(batch, 0, [], picks)
        tokens = picks.tokens_F.copy()
        found.append(int(tokens[0]))
    return found
