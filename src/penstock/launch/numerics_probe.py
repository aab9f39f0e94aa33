"""Finds the numerics class of a mixed fleet's prefill kernels in a child process.

The process that forks the workers may initialize neither CUDA nor torch, and the class depends on the device and on
their versions.  So a child constructs the kernels, prints their class and ends, while the weights are loaded:
``python -m penstock.launch.numerics_probe FAMILY DTYPE DEVICE``.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from typing import IO

from penstock import sidecar
from penstock.errors import KernelError, PenstockError
from penstock.kernels.ops import Ops
from penstock.kernels.page_export import ExportsPages, export_layout
from penstock.kernels.select import make_ops

PROBE_TIMEOUT_S = 120.0
"""To import torch and initialize CUDA on a busy machine."""

LOOK_S = 0.05

TAIL_BYTES = 64 << 10
"""The most that is read of a child's output."""


class NumericsProbe:
    """The child process."""

    def __init__(self, family: str, dtype: str, device: str) -> None:
        self._family = family
        self._began = time.monotonic()
        # Files, as a pipe that is not read would block the child after 64 KiB.
        self._said, self._complained = tempfile.TemporaryFile(), tempfile.TemporaryFile()  # noqa: SIM115 - closed below
        self._child = subprocess.Popen(
            sidecar.python_command(__name__, family, dtype, device),
            stdin=subprocess.DEVNULL,
            stdout=self._said,
            stderr=self._complained,
            env=sidecar.child_environment(),
        )

    def result(self, keep_watch: Callable[[], None]) -> str:
        """Wait for the numerics class; ``keep_watch`` is called meanwhile.  Raises KernelError."""
        while self._child.poll() is None:
            if time.monotonic() - self._began > PROBE_TIMEOUT_S:
                self.close()
                raise KernelError(
                    f"kernels {self._family} did not report their numerics class within {PROBE_TIMEOUT_S:.0f} s"
                )
            keep_watch()
            time.sleep(LOOK_S)
        said, complained = _tail(self._said), _tail(self._complained)
        if self._child.returncode != 0 or not said.strip():
            lines = complained.strip().splitlines()
            raise KernelError(lines[-1] if lines else f"kernels {self._family} cannot be made")
        return said.strip()

    def close(self) -> None:
        """End the child.  May be called twice, also after ``result``."""
        if self._child.poll() is None:
            self._child.kill()
            self._child.wait()
        self._said.close()
        self._complained.close()


def _tail(file: IO[bytes]) -> str:
    """The last ``TAIL_BYTES`` of a file."""
    file.seek(max(0, file.seek(0, os.SEEK_END) - TAIL_BYTES))
    return file.read(TAIL_BYTES).decode(errors="replace")


def handed_over_layout(ops: Ops, reads: str, writes: str, *, twins: bool) -> str:
    """The layout in which prefill kernels transfer KV pages.  ``twins``: they write copies to host memory.

    Raises KernelError if they cannot write the decode kernels' layout.
    """
    if ops.numerics != reads:
        raise KernelError(f"prefill needs the numerics class {reads}, and these kernels are {ops.numerics}")
    layout = export_layout(writes)
    if layout != export_layout(reads) and not (twins and isinstance(ops, ExportsPages)):
        raise KernelError(f"kernels {reads} cannot write pages for {writes}")
    return layout


def main(family: str, dtype: str, device: str) -> int:
    """The child's entry point."""
    sidecar.end_with_parent()
    try:
        print(make_ops(family=family, compute_dtype=dtype, device=device).numerics)  # noqa: T201 - what it is for
    except PenstockError as error:
        print(error, file=sys.stderr)  # noqa: T201
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:4]))
