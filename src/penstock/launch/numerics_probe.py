"""Which numerics classes a mixed fleet mixes: that of the kernels which read prompts is asked of a process of its own.

The process that forks the workers may begin neither CUDA nor torch, and what their classes are called follows from the
device and from versions that only they know.  So a child makes the kernels, says their name and ends, while the weights
are loaded.  ``python -m penstock.launch.numerics_probe FAMILY DTYPE DEVICE`` is that child.
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
"""For torch to be imported and CUDA to begin, on a machine with other work."""

LOOK_S = 0.05

TAIL_BYTES = 64 << 10
"""Of what a child says; no more is read."""


class NumericsProbe:
    """A child that was asked."""

    def __init__(self, family: str, dtype: str, device: str) -> None:
        self._family = family
        self._began = time.monotonic()
        # Files: nobody reads while the child writes, and a pipe would be full after 64 KiB.
        self._said, self._complained = tempfile.TemporaryFile(), tempfile.TemporaryFile()  # noqa: SIM115 - closed below
        self._child = subprocess.Popen(
            sidecar.python_command(__name__, family, dtype, device),
            stdin=subprocess.DEVNULL,
            stdout=self._said,
            stderr=self._complained,
            env=sidecar.child_environment(),
        )

    def result(self, keep_watch: Callable[[], None]) -> str:
        """The class.  ``keep_watch`` is called meanwhile.  Raises KernelError."""
        while self._child.poll() is None:
            if time.monotonic() - self._began > PROBE_TIMEOUT_S:
                self.close()
                raise KernelError(
                    f"kernels {self._family} did not say their numerics class within {PROBE_TIMEOUT_S:.0f} s"
                )
            keep_watch()
            time.sleep(LOOK_S)
        said, complained = _tail(self._said), _tail(self._complained)
        if self._child.returncode != 0 or not said.strip():
            lines = complained.strip().splitlines()
            raise KernelError(lines[-1] if lines else f"kernels {self._family} cannot be made")
        return said.strip()

    def close(self) -> None:
        """Nobody wants the answer any more.  May be called twice, and after the answer."""
        if self._child.poll() is None:
            self._child.kill()
            self._child.wait()
        self._said.close()
        self._complained.close()


def _tail(file: IO[bytes]) -> str:
    """The last that was written."""
    file.seek(max(0, file.seek(0, os.SEEK_END) - TAIL_BYTES))
    return file.read(TAIL_BYTES).decode(errors="replace")


def handed_over_layout(ops: Ops, reads: str, writes: str, *, twins: bool) -> str:
    """The layout of the pages that a reader's kernels hand over; ``twins``: of others than those that they compute in.
    Raises KernelError if they cannot."""
    if ops.numerics != reads:
        raise KernelError(f"prompts should be read in the numerics class {reads}, and these kernels are {ops.numerics}")
    layout = export_layout(writes)
    if layout != export_layout(reads) and not (twins and isinstance(ops, ExportsPages)):
        raise KernelError(f"kernels {reads} cannot write pages for {writes}")
    return layout


def main(family: str, dtype: str, device: str) -> int:
    """The child's."""
    sidecar.end_with_parent()
    try:
        print(make_ops(family=family, compute_dtype=dtype, device=device).numerics)  # noqa: T201 - what it is for
    except PenstockError as error:
        print(error, file=sys.stderr)  # noqa: T201
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:4]))
