"""Ranks that exchange tensors by ``torch.distributed``: gloo on processors, NCCL on GPUs.

Only what moves bytes is used (all_gather, send, recv), never a reduction: which algorithm a library chooses, and in
what order it adds, cannot reach the bits.  A header of whole numbers goes ahead of each exchange, so ranks that
disagree are found.  Neither library authenticates its peers or encrypts: for one host, or a network that nobody else is
on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TypeVar

import torch
from torch import Tensor
from torch import distributed as dist
from torch.distributed.distributed_c10d import Store

from penstock.errors import GroupError
from penstock.kernels.operands import Array

_GATHER, _EXCHANGE, _SENT = range(3)
_NAMES = ("all_gather", "all_to_all", "send")
_Result = TypeVar("_Result")


def connect_ranks(
    store: Store, rank: int, size: int, *, backend: str = "gloo", timeout_s: float = 60.0, as_numpy: bool = False
) -> DistCollectives:
    """This process is a rank of the group of all processes that meet at a store; once a process.

    An exchange that takes longer than ``timeout_s`` ends the group.  ``as_numpy``: arrays are NumPy's, as the kernels
    of processors have them.  Raises GroupError.
    """
    timeout = timedelta(seconds=timeout_s)
    _checked(lambda: dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timeout))
    device = torch.device("cuda" if backend == "nccl" else "cpu")
    return DistCollectives(tuple(range(size)), device, as_numpy=as_numpy)


class DistCollectives:
    """The ``Collectives`` of one rank; arrays are fp32 tensors of its device, or NumPy's.

    ``members``: the group's ranks among all processes.  Every process makes every group, in the same order.
    """

    def __init__(self, members: Sequence[int], device: torch.device, *, as_numpy: bool = False) -> None:
        self._members = tuple(members)
        self._as_numpy = as_numpy
        self._device = device
        self._group = _checked(lambda: dist.new_group(list(members)))
        self._ended = ""
        self.size = len(members)
        own = dist.get_rank()
        self.rank = self._members.index(own) if own in self._members else -1

    def all_gather(self, own: Array) -> list[Array]:
        """Narrower arrays are filled up to the widest one on their way."""
        data = self._tensor(own)
        headers = self._agree(_GATHER, len(data), data.shape[1])
        widths = [columns for _, _, columns in headers]
        padded = data.new_zeros((len(data), max(widths)))
        padded[:, : data.shape[1]] = data
        found = [torch.empty_like(padded) for _ in widths]
        self._run(lambda: dist.all_gather(found, padded, group=self._group))
        return [self._handed_out(array[:, :width].contiguous()) for array, width in zip(found, widths, strict=True)]

    def all_to_all(self, parts: Sequence[Array]) -> list[Array]:
        """In pairs: gloo has no operation of its own for it."""
        if len(parts) != self.size:
            raise ValueError(f"{len(parts)} arrays for {self.size} ranks")
        self._agree(_EXCHANGE, 0, 0)
        found: list[Tensor] = []
        for peer in range(self.size):
            own = self._tensor(parts[peer])
            if peer == self.rank:
                found.append(own.clone())
            elif self.rank < peer:  # of two ranks the lower one sends first, so neither waits for the other's room
                self._send(own, peer, _EXCHANGE)
                found.append(self._receive(peer, _EXCHANGE))
            else:
                theirs = self._receive(peer, _EXCHANGE)
                self._send(own, peer, _EXCHANGE)
                found.append(theirs)
        return [self._handed_out(array) for array in found]

    def send(self, array: Array, to: int) -> None:
        self._send(self._tensor(array), to, _SENT)

    def recv(self, source: int, shape: tuple[int, ...]) -> Array:
        array = self._receive(source, _SENT)
        if tuple(array.shape) != shape:
            raise self._fail(f"rank {source} sent an array {list(array.shape)}, expected {list(shape)}")
        return self._handed_out(array)

    def _agree(self, operation: int, rows: int, columns: int) -> list[tuple[int, int, int]]:
        """The headers of all ranks, which call the same operation with as many rows."""
        own = torch.tensor([operation, rows, columns], device=self._device)
        found = [torch.empty_like(own) for _ in range(self.size)]
        self._run(lambda: dist.all_gather(found, own, group=self._group))
        headers = [tuple(header.tolist()) for header in found]
        for rank, (theirs, their_rows, _) in enumerate(headers):
            if (theirs, their_rows) != (operation, rows):
                raise self._fail(
                    f"rank {rank} calls {_name(theirs)} of {their_rows} rows, this one {_name(operation)} of {rows}"
                )
        return headers

    def _send(self, data: Tensor, to: int, operation: int) -> None:
        header = torch.tensor([operation, *data.shape], device=self._device)
        if data.dim() != 2:
            raise ValueError(f"arrays have rows and columns, not the shape {list(data.shape)}")
        self._run(lambda: dist.send(header, self._members[to], group=self._group))
        self._run(lambda: dist.send(data, self._members[to], group=self._group))

    def _receive(self, source: int, operation: int) -> Tensor:
        header = torch.empty(3, dtype=torch.int64, device=self._device)
        self._run(lambda: dist.recv(header, self._members[source], group=self._group))
        theirs, rows, columns = header.tolist()
        if theirs != operation or rows < 0 or columns < 0:
            raise self._fail(f"rank {source} calls {_name(theirs)}, not {_name(operation)}")
        data = torch.empty((rows, columns), device=self._device)
        self._run(lambda: dist.recv(data, self._members[source], group=self._group))
        return data

    def _tensor(self, array: Array) -> Tensor:
        return torch.as_tensor(array, dtype=torch.float32, device=self._device).contiguous()

    def _handed_out(self, array: Tensor) -> Array:
        return array.numpy() if self._as_numpy else array

    def _run(self, exchange: Callable[[], object]) -> None:
        if self._ended:
            raise GroupError(self._ended)
        try:
            exchange()
        except RuntimeError as error:
            raise self._fail(f"an exchange failed: {str(error).splitlines()[0]}") from error

    def _fail(self, why: str) -> GroupError:
        """The error of a group that is over.  The others find out when this process has ended."""
        self._ended = self._ended or why
        return GroupError(why)


def _name(operation: int) -> str:
    return _NAMES[operation] if 0 <= operation < len(_NAMES) else f"operation {operation}"


def _checked(begin: Callable[[], _Result]) -> _Result:
    try:
        return begin()
    except RuntimeError as error:
        raise GroupError(f"ranks cannot meet: {str(error).splitlines()[0]}") from error
