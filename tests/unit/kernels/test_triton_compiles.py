"""Without a GPU the interpreter says that the kernels are right; here the compiler says that a GPU could run them.

The kernels of rows, attention and sampling are compiled for an H200 (sm_90) with the shapes of models as they are, in a
process of its own, as kernels are either interpreted or compiled.  What the compiler takes and the interpreter does
not mind (types that differ between branches, too much shared memory) is found here.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SHARED_BYTES = 227 * 1024
"""Of one program on an H200."""

HERE = Path(__file__).parent


@pytest.mark.long
@pytest.mark.timeout(900)
def test_kernels_compile_for_an_h200() -> None:
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    env["PYTHONPATH"] = os.pathsep.join(sys.path)
    command = [sys.executable, str(HERE / "triton_attention_canary.py")]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    kernels = [json.loads(line) for line in done.stdout.splitlines()]
    assert {
        "attend",
        "join",
        "_rope_and_write",
        "_latent_write",
        "_normed_groups",
        "floors",
        "offers",
        "best",
        "conv_kernel",
        "keep_kernel",
        "delta_kernel",
    } <= {kernel["name"] for kernel in kernels}
    assert {"conv_kernel", "keep_kernel", "delta_kernel"} <= {kernel["name"] for kernel in kernels}
    assert all(kernel["shared"] <= SHARED_BYTES for kernel in kernels), kernels
    for kept in ("", ", codes"):
        units = {
            how: [
                kernel["units"]
                for kernel in kernels
                if kernel["name"] == "attend" and kernel["about"] == f"bf16, {how}{kept}"
            ]
            for how in ("partitions in turn", "partitions apart")
        }
        assert units["partitions in turn"] == units["partitions apart"], "one instruction for both, so one rounding"
        assert all(units["partitions apart"]), "attention on the matrix units"
