"""Kernels compiled for a GPU that is not there: a driver that only names its target, launches that only compile.

For a process of its own, without the interpreter.  ``compile_only``, then any operations: each kernel that they would
launch is printed as a line of JSON, with what it takes.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import tempfile
from typing import Any

import torch
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas
from triton.runtime import JITFunction, driver


class NoGpu:
    """A driver without a device."""

    def __init__(self) -> None:
        self.get_current_target = lambda: GPUTarget("cuda", 90, 32)
        self.get_current_device = lambda: 0
        self.get_current_stream = lambda device: 0


class Compiled:
    """What was compiled, each kernel once; ``about``: what for."""

    def __init__(self) -> None:
        self.about = ""
        self._seen: set[str] = set()

    def launch(self, kernel: JITFunction, grid: Any) -> Any:
        """In place of a launch."""

        def compile_only(*args: Any, **kwargs: Any) -> None:
            built = kernel.run(*args, grid=grid, warmup=True, **kwargs)
            if built.hash not in self._seen:
                self._seen.add(built.hash)
                print(json.dumps({"about": self.about, "name": kernel.fn.__name__, **resources(built)}), flush=True)

        return compile_only


def resources(built: Any) -> dict[str, Any]:
    """Registers and spilled bytes as the assembler says, shared memory as the compiler does."""
    ptx = built.asm["ptx"]
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as source:
        source.write(ptx)
        source.flush()
        command = [get_ptxas(90).path, "-v", "--gpu-name=sm_90a", source.name, "-o", os.devnull]
        said = subprocess.run(command, capture_output=True, text=True, check=False).stderr
    assert "Used" in said, said
    return {
        "registers": int(re.findall(r"Used (\d+) registers", said)[-1]),
        "spilled": int(re.findall(r"(\d+) bytes spill stores", said)[-1]),
        "shared": built.metadata.shared,
        "units": sorted(set(re.findall(r"wgmma\.mma_async\.sync\.aligned\.(m\d+n\d+k\d+)", ptx))),
        "copies_ahead": "cp.async" in ptx,
    }


def compile_only() -> Compiled:
    """For the rest of this process."""
    torch.empty = torch.zeros  # what no kernel fills is read: by a survey of escapes, by indices of experts or tokens
    driver.set_active(NoGpu())
    made = Compiled()

    def launched(kernel: JITFunction, grid: Any) -> Any:
        return made.launch(kernel, grid)

    JITFunction.__getitem__ = launched
    return made
