"""A step that a graph could capture, tried without a GPU: whoever looks at a tensor's numbers fails.

On a device a look is a copy to the host that the host waits for, and a result whose size follows from numbers is a look
as well; neither can be captured.  Numbers of the host cannot go there either: a graph would copy what the memory once
held.  The interpreter itself reads memory by address, so it passes.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

LOOKS = ("item", "tolist", "cpu", "numpy", "nonzero", "__bool__", "__int__", "__float__", "__index__", "__array__")
BRINGS = ("tensor", "as_tensor", "from_numpy")
BY_NUMBERS = {
    "aten::_local_scalar_dense",
    "aten::nonzero",
    "aten::masked_select",
    "aten::bincount",
    "aten::_unique2",
    "aten::unique_dim",
    "aten::repeat_interleave",
}


class WaitedError(AssertionError):
    """Somebody looked, or brought numbers along."""


class _Sizes(TorchDispatchMode):
    """Refuses what has a size by numbers."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name
        chosen = args[1] if name in ("aten::index", "aten::index_put_", "aten::_index_put_impl_") else ()
        if name in BY_NUMBERS or any(own is not None and own.dtype == torch.bool for own in chosen):
            raise WaitedError(f"{name} looks at numbers")
        return func(*args, **(kwargs or {}))


@contextmanager
def nobody_waits() -> Iterator[None]:
    """Inside, a look raises ``WaitedError``."""

    def refuse(name: str) -> Callable[..., Any]:
        def refused(*args: Any, **kwargs: Any) -> Any:
            raise WaitedError(f"{name} in a step")

        return refused

    with pytest.MonkeyPatch.context() as patch, _Sizes():
        for name in LOOKS:
            patch.setattr(Tensor, name, refuse(name))
        for name in BRINGS:
            patch.setattr(torch, name, refuse(name))
        yield


class Trapped:
    """A ``graphs.GraphRunner`` that runs what would be captured, and nobody may wait.  ``runs``: how often."""

    def __init__(self) -> None:
        self.runs = 0

    def run(self, key: Hashable, work: Callable[[], tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
        """See ``GraphRunner.run``."""
        self.runs += 1
        with nobody_waits():
            return work()
