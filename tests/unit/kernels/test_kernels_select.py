"""Choosing a backend, memory for results and weights, and threads over a fork."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.metadata import version

import numpy as np
import pytest
from kernel_cases import INTERPRETED, TRITONS, make, normal

from penstock.errors import KernelError
from penstock.kernels import _native, select
from penstock.kernels.native.backend import NativeOps, families
from penstock.kernels.native.memory import StepBuffers, WeightArena
from penstock.kernels.select import TRITON, TRITON_INTERPRETER, available_families, make_ops


def test_the_best_family_is_taken() -> None:
    ops = make_ops(compute_dtype="bf16")
    assert ops.numerics == f"cpp-{families()[0]}-{_native.VERSION}-bf16"
    assert available_families()[-2:] == ("portable", "reference")


@pytest.mark.parametrize("family", available_families())
def test_a_named_family_is_honoured(family: str) -> None:
    ops = make_ops(family=family, compute_dtype="fp32")
    assert ops.compute_dtype == "fp32"
    assert ops.numerics.startswith("torch-2-cpu" if family == "reference" else f"cpp-{family}-")
    assert ops.kv_layout.endswith("-fp32")


def test_what_cannot_run_is_refused_by_name() -> None:
    with pytest.raises(KernelError, match=r"'neon' cannot run .* portable, reference"):
        make_ops(family="neon", compute_dtype="bf16")
    with pytest.raises(KernelError, match="compute type 'int4'"):
        make_ops(compute_dtype="int4")
    with pytest.raises(KernelError, match="on the CPU only"):
        make_ops(family="portable", compute_dtype="bf16", device="cuda")


def test_triton_runs_where_it_is_asked_to() -> None:
    ops = make(*TRITONS[0])
    assert ops.numerics.startswith("triton-")
    assert ops.numerics.endswith("-bf16")
    assert ("interpreter" in ops.numerics) == INTERPRETED
    assert f"-torch{version('torch')}" in ops.numerics, "what has no kernel is torch's"
    with pytest.raises(KernelError, match=r"'triton' runs on a CUDA device, .* not on 'cpu'"):
        make_ops(family=TRITON)
    with pytest.raises(KernelError, match="'triton-interpreter' runs on the device 'cpu', not on 'cuda'"):
        make_ops(family=TRITON_INTERPRETER, device="cuda")
    other, device = (TRITON, "cuda") if INTERPRETED else (TRITON_INTERPRETER, "cpu")
    with pytest.raises(KernelError, match=r"cannot run in this process: .* (un)?set TRITON_INTERPRET"):
        make_ops(family=other, device=device)


def test_triton_that_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(select, "find_spec", lambda name: None if name == "triton" else object())
    with pytest.raises(KernelError, match=r"needs triton, not installed; install 'penstock\[gpu\]'"):
        make_ops(family=TRITON, device="cuda")


def test_serving_imports_no_torch() -> None:
    code = """
import sys
from penstock.kernels.select import make_ops
make_ops(compute_dtype="bf16")
assert "torch" not in sys.modules and "triton" not in sys.modules
"""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    subprocess.run([sys.executable, "-c", code], check=True, env=env)


def test_a_living_result_is_never_overwritten() -> None:
    buffers = StepBuffers()
    first = buffers.empty((300, 400), np.float32)
    first[:] = 1
    view = first[3:5]
    address = first.ctypes.data
    second = buffers.empty((300, 400), np.float32)
    second[:] = 2
    assert (first == 1).all()
    del first
    assert buffers.empty((300, 400), np.float32).ctypes.data != address  # a view of it is alive
    del view
    assert buffers.empty((300, 400), np.float32).ctypes.data == address


def test_weights_share_regions_and_are_aligned() -> None:
    arena = WeightArena()
    parts = [arena.cells(count) for count in (1, 1000, 17, 5 << 20, 3)]
    assert [len(part) for part in parts] == [1, 1000, 17, 5 << 20, 3]
    assert all(part.ctypes.data % 64 == 0 and not part[:100].any() for part in parts)
    for i, part in enumerate(parts):
        part[:] = i
    assert [int(part[-1]) for part in parts] == [0, 1, 2, 3, 4]


def test_a_forked_child_makes_its_own_threads() -> None:
    """Both before and after the parent's pool exists.  In a process of its own: this one has threads already."""
    code = """
import os, sys
import numpy as np
from penstock.kernels.native.backend import NativeOps
ops = NativeOps(sys.argv[1], "fp32", threads=3)
weight = ops.pack_linear(np.ones((512, 512), np.float32))
def child():
    pid = os.fork()
    if pid == 0:
        ok = (ops.linear(np.ones((64, 512), np.float32), weight) == 512).all()
        threads = len(os.listdir("/proc/self/task"))
        os._exit(0 if ok and threads == 3 else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
assert len(os.listdir("/proc/self/task")) == 1
child()
assert (ops.linear(np.ones((64, 512), np.float32), weight) == 512).all()
child()
"""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OPENBLAS_NUM_THREADS": "1"}
    subprocess.run([sys.executable, "-c", code, families()[0]], check=True, timeout=60, env=env)


def test_changing_the_number_of_threads() -> None:
    ops = NativeOps(families()[0], "fp32")
    weight, x = ops.pack_linear(normal(1, 600, 600)), normal(2, 90, 600)
    answers = []
    for threads in (1, 4, 2, 3, 1, 2):
        _native.set_threads(threads)
        answers += [ops.linear(x, weight) for _ in range(20)]
    _native.set_threads(1)
    for answer in answers[1:]:
        np.testing.assert_array_equal(answer, answers[0])
