"""Green contexts: groups of a GPU's multiprocessors, each with streams whose kernels run there and nowhere else.

The CUDA driver's functions (12.5 and newer: cuda.h, "Green Contexts"), called without a compiler.  A green context is
made from the device's primary one and shares its memory, modules and events; a stream that was created in it confines
what is launched there, whichever context is current.

Knows no torch: a stream is an address.
"""

from __future__ import annotations

import ctypes
from ctypes import byref, c_int, c_ubyte, c_uint, c_void_p
from dataclasses import dataclass
from typing import Any

from penstock.errors import KernelError

_SM = 1  # CU_DEV_RESOURCE_TYPE_SM
_DEFAULT_STREAM = 1  # CU_GREEN_CTX_DEFAULT_STREAM: the only flag there is, and it must be given
_NON_BLOCKING = 1  # CU_STREAM_NON_BLOCKING: the same


class GreenContextError(KernelError):
    """The driver has none, or does not divide this device so."""


class Resource(ctypes.Structure):
    """CUdevResource: 144 bytes by its ABI, of which those behind the count are the driver's own; and some to spare."""

    _fields_ = (
        ("kind", c_int),
        ("_padding", c_ubyte * 92),
        ("multiprocessors", c_uint),
        ("_own", c_ubyte * 44),
        ("_spare", c_ubyte * 112),
    )


@dataclass(frozen=True, slots=True)
class Group:
    """Some of the multiprocessors, and a stream on them."""

    multiprocessors: int
    context: int
    stream: int


class GreenDriver:
    """The driver's functions for one device, which torch has begun already."""

    def __init__(self, driver: Any, device: int = 0) -> None:
        """``driver``: libcuda, or what stands for it."""
        self._driver = driver
        self._device = device

    def multiprocessors(self) -> int:
        """Of the whole device.  Raises GreenContextError."""
        return int(self._whole().multiprocessors)

    def cut(self, least: int, *, first: int, second: int) -> tuple[Group, Group]:
        """``least`` multiprocessors, rounded up as the device wants it, and the others; of both a stream of such a
        priority (lower numbers go first).

        Raises GreenContextError; then nothing was made.
        """
        whole, own, rest, groups = self._whole(), Resource(), Resource(), c_uint(1)
        self._call(
            "cuDevSmResourceSplitByCount",
            byref(own),
            byref(groups),
            byref(whole),
            byref(rest),
            c_uint(0),
            c_uint(least),
        )
        if groups.value != 1 or not own.multiprocessors or rest.kind != _SM or not rest.multiprocessors:
            raise GreenContextError(f"{least} of {whole.multiprocessors} multiprocessors cannot be set apart")
        made = self._group(own, first)
        try:
            return made, self._group(rest, second)
        except GreenContextError:
            self.give_back(made)
            raise

    def give_back(self, group: Group) -> None:
        """Nothing runs there any more.  Raises GreenContextError."""
        self._call("cuStreamDestroy_v2", c_void_p(group.stream))
        self._call("cuGreenCtxDestroy", c_void_p(group.context))

    def _whole(self) -> Resource:
        found = Resource()
        self._call("cuDeviceGetDevResource", c_int(self._device), byref(found), c_int(_SM))
        return found

    def _group(self, resource: Resource, priority: int) -> Group:
        described, context, stream = c_void_p(), c_void_p(), c_void_p()
        self._call("cuDevResourceGenerateDesc", byref(described), byref(resource), c_uint(1))
        self._call("cuGreenCtxCreate", byref(context), described, c_int(self._device), c_uint(_DEFAULT_STREAM))
        try:
            self._call("cuGreenCtxStreamCreate", byref(stream), context, c_uint(_NON_BLOCKING), c_int(priority))
        except GreenContextError:
            self._call("cuGreenCtxDestroy", context)
            raise
        return Group(int(resource.multiprocessors), context.value or 0, stream.value or 0)

    def _call(self, function: str, *arguments: object) -> None:
        own = getattr(self._driver, function, None)
        if own is None:
            raise GreenContextError(f"the CUDA driver has no {function}: 12.5 or newer is needed")
        code = own(*arguments)
        if code != 0:
            raise GreenContextError(f"{function} gave error {code}")


def cuda_driver(library: str = "libcuda.so.1") -> Any:
    """Raises GreenContextError where there is no driver."""
    try:
        return ctypes.CDLL(library)
    except OSError as error:
        raise GreenContextError("there is no CUDA driver") from error
