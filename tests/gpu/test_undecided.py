"""The target "auto" on a GPU: the tensors of the first call decide, and both kinds run."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

import tilescale
import tilescale.language as T
from tilescale.kernel import Kernel


@tilescale.jit(out_idx=-1)
def twice(n):
    @T.prim_func
    def main(A: T.Tensor((n,), "float32"), B: T.Tensor((n,), "float32")):
        with T.Kernel(T.ceildiv(n, 128), threads=128) as b:
            for i in T.Parallel(128):
                B[b * 128 + i] = A[b * 128 + i] * 2

    return main


@pytest.fixture(autouse=True)
def no_target(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("TILESCALE_TARGET", raising=False)
    twice.kernels.clear()


@pytest.mark.parametrize("order", [("cuda", "cpu"), ("cpu", "cuda")])
def test_both_kinds_of_tensors(order: tuple[str, str]):
    kernel = twice(1000)
    for device in (*order, *order):
        got = kernel(torch.ones(1000, device=device))
        assert got.device.type == device and (got == 2).all()
    assert kernel.target == order[0]


def test_the_machine_decides_where_nobody_else_does():
    assert "__global__" in twice(512).get_kernel_source()
    assert twice(512).target == "cuda" and twice(512).resources["threads"] == 128

    @tilescale.jit(out_idx=-1)
    def numbers(n):
        @T.prim_func
        def main(B: T.Tensor((n,), "int32")):
            with T.Kernel(1, threads=128):
                for i in T.Parallel(n):
                    B[i] = i

        return main

    assert numbers(64)().device.type == "cuda"


def test_a_call_costs_what_one_of_a_named_target_costs():
    """The kernel object is that of its target from the first call on."""
    a = torch.ones(512, device="cuda")
    kernel, named = twice(512), tilescale.compile(twice.get_tir(512), out_idx=-1, target="cuda")
    kernel(a), named(a)
    assert type(kernel) is type(named) is Kernel and "_lock" not in kernel.__dict__


def test_a_look_at_the_machine_leaves_forks_their_gpu():
    """A factory's call makes no CUDA context and does not open the driver; a fork behind it still has its
    GPU."""
    code = (
        "import os, sys; sys.path.insert(0, os.getcwd())\n"
        "from tests.gpu.test_undecided import twice\n"
        "kernel = twice(512)\n"
        "pid = os.fork()\n"
        "if pid == 0:\n"
        "    import torch\n"
        "    os._exit(0 if (kernel(torch.ones(512, device='cuda')) == 2).all() else 1)\n"
        "sys.exit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))\n"
    )
    environ = {k: v for k, v in os.environ.items() if k != "TILESCALE_TARGET"}
    assert subprocess.run([sys.executable, "-c", code], env=environ, timeout=300).returncode == 0
