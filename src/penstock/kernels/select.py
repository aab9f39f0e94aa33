"""Which backend computes: a name given by configuration, or the best that this machine has.

Imports torch only when ``reference`` or another device is asked for, triton only for a GPU or its interpreter.
"""

from __future__ import annotations

import os
import sys
from functools import partial
from importlib.util import find_spec

from penstock.errors import KernelError
from penstock.kernels.operands import INT8
from penstock.kernels.ops import Ops

REFERENCE = "reference"
TRITON = "triton"
TRITON_INTERPRETER = "triton-interpreter"
"""The kernels of ``triton`` on a CPU, to test them: a thousand times too slow for anything else."""

INTERPRET = "TRITON_INTERPRET"
"""What Triton reads from the environment when a kernel is decorated, its own included."""


def available_families() -> tuple[str, ...]:
    """Names that ``make_ops`` accepts for the CPU, best first.  Raises KernelError when the extension is not built."""
    return (*_native_families(), REFERENCE)


def decoding_families() -> tuple[str, ...]:
    """Names of the processor's kernel families that compute from compressed weights; none without the extension."""
    try:
        from penstock.kernels import _native
    except ImportError:
        return ()
    return tuple(name for name in _native.families() if _native.CompressedKernels(name).in_registers())


def make_ops(
    *,
    family: str | None = None,
    compute_dtype: str = "bf16",
    device: str = "cpu",
    threads: int = 1,
    kv_dtype: str | None = None,
    activation_dtype: str | None = None,
) -> Ops:
    """The backend with this name, or the best one.

    ``family``: None, one of ``available_families()``, "triton" (a GPU; the best one there, if Triton is installed) or
    "triton-interpreter" (the same kernels on a CPU, for tests; never taken without being named).  ``device``: "cpu", or
    a torch device such as "cuda".  ``threads``: threads of one operation, the calling one included.  ``kv_dtype``: what
    KV pages are in, "fp8_e4m3" or None, which is the compute type.  ``activation_dtype``: what inputs are multiplied
    with quantized weights in, "int8" or None, which is the compute type.
    Raises KernelError, which names what is available, when it cannot run.
    """
    if activation_dtype not in (None, INT8):
        raise KernelError(f"inputs in {activation_dtype!r}: there is {INT8}, or None for the compute type")
    if activation_dtype is not None and (family in (TRITON, TRITON_INTERPRETER) or device != "cpu"):
        raise KernelError(f"inputs in {activation_dtype} are for the CPU's kernels only; leave it out on a GPU")
    if family in (TRITON, TRITON_INTERPRETER):
        return _triton(family, compute_dtype, device, kv_dtype)
    if family is None and device != "cpu":
        make = partial(_triton, TRITON) if find_spec("triton") else _reference
        return make(compute_dtype, device, kv_dtype)
    if family == REFERENCE:
        return _reference(compute_dtype, device, kv_dtype, activation_dtype)
    if device != "cpu":
        raise KernelError(
            f"kernel family {family!r} runs on the CPU only; for {device} take 'triton', 'reference' or none"
        )
    known = _native_families()
    if family is not None and family not in known:
        raise KernelError(
            f"kernel family {family!r} cannot run on this processor or is not in this build; "
            f"available: {', '.join((*known, REFERENCE))}"
        )
    if kv_dtype is not None:
        raise KernelError(
            f"kernel family {family or known[0]!r} keeps KV pages in the compute type; for {kv_dtype} take {TRITON!r} "
            f"on a GPU or {REFERENCE!r}"
        )
    from penstock.kernels.native.backend import NativeOps

    return NativeOps(family or known[0], compute_dtype, threads=threads, activation_dtype=activation_dtype)


def _native_families() -> tuple[str, ...]:
    try:
        from penstock.kernels.native.backend import families
    except ImportError as error:
        raise KernelError(
            f"the kernel extension is not built ({error}); build it with 'pip install .' or with cmake in place"
        ) from error
    return families()


def _reference(compute_dtype: str, device: str, kv_dtype: str | None, activation_dtype: str | None = None) -> Ops:
    try:
        from penstock.kernels.reference.backend import ReferenceOps
    except ImportError as error:
        raise KernelError(f"the reference kernels need torch, which is not installed ({error})") from error
    return ReferenceOps(
        compute_dtype=compute_dtype, device=device, kv_dtype=kv_dtype, activation_dtype=activation_dtype
    )


def _triton(family: str, compute_dtype: str, device: str, kv_dtype: str | None) -> Ops:
    if (device == "cpu") != (family == TRITON_INTERPRETER):
        wanted = "the device 'cpu'" if family == TRITON_INTERPRETER else "a CUDA device, such as 'cuda'"
        raise KernelError(f"kernel family {family!r} runs on {wanted}, not on {device!r}")
    missing = [package for package in ("torch", "triton") if find_spec(package) is None]
    if missing:
        raise KernelError(
            f"kernel family {family!r} needs {' and '.join(missing)}, not installed; install 'penstock[gpu]'"
        )
    _decorate_for(family)
    from penstock.kernels.triton.backend import TritonOps

    return TritonOps(compute_dtype=compute_dtype, device=device, kv_dtype=kv_dtype)


def _decorate_for(family: str) -> None:
    """Kernels are interpreted or compiled by what the environment says when they are decorated: one way a process."""
    interpreted = family == TRITON_INTERPRETER
    if interpreted and "triton" not in sys.modules:
        os.environ[INTERPRET] = "1"
    from triton.language import cdiv
    from triton.runtime import JITFunction

    if isinstance(cdiv, JITFunction) == interpreted:
        have, remedy = ("compiled", f"set {INTERPRET}=1") if interpreted else ("interpreted", f"unset {INTERPRET}")
        raise KernelError(
            f"kernel family {family!r} cannot run in this process: its Triton kernels are {have}; {remedy} before the "
            "process starts"
        )
