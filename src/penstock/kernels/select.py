"""Which backend computes: a name given by configuration, or the best that this machine has.

Imports torch only when ``reference`` or another device is asked for.
"""

from __future__ import annotations

from penstock.errors import KernelError
from penstock.kernels.ops import Ops

REFERENCE = "reference"


def available_families() -> tuple[str, ...]:
    """Names that ``make_ops`` accepts for the CPU, best first.  Raises KernelError when the extension is not built."""
    return (*_native_families(), REFERENCE)


def make_ops(*, family: str | None = None, compute_dtype: str = "bf16", device: str = "cpu", threads: int = 1) -> Ops:
    """The backend with this name, or the best one.

    ``family``: None, or one of ``available_families()``.  ``device``: "cpu", or a torch device such as "cuda" (which
    the reference serves).  ``threads``: threads of one operation, the calling one included.
    Raises KernelError, which names what is available, when it cannot run.
    """
    if family == REFERENCE or (family is None and device != "cpu"):
        return _reference(compute_dtype, device)
    if device != "cpu":
        raise KernelError(f"kernel family {family!r} runs on the CPU only; for {device} take 'reference' or none")
    known = _native_families()
    if family is not None and family not in known:
        raise KernelError(
            f"kernel family {family!r} cannot run on this processor or is not in this build; "
            f"available: {', '.join((*known, REFERENCE))}"
        )
    from penstock.kernels.native import NativeOps

    return NativeOps(family or known[0], compute_dtype, threads=threads)


def _native_families() -> tuple[str, ...]:
    try:
        from penstock.kernels.native import families
    except ImportError as error:
        raise KernelError(
            f"the kernel extension is not built ({error}); build it with 'pip install .' or with cmake in place"
        ) from error
    return families()


def _reference(compute_dtype: str, device: str) -> Ops:
    try:
        from penstock.kernels.reference import ReferenceOps
    except ImportError as error:
        raise KernelError(f"the reference kernels need torch, which is not installed ({error})") from error
    return ReferenceOps(compute_dtype=compute_dtype, device=device)
