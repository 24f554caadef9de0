"""The target "auto" on a machine with a GPU, which is pretended here: what decides, and when."""

from __future__ import annotations

import os
import threading
from typing import Any

import numpy as np
import pytest
import torch

import tilescale
import tilescale.language as T
from tilescale import native
from tilescale.cuda import Cuda
from tilescale.devices import device_of, resolve_target
from tilescale.errors import TileError
from tilescale.kernel import Kernel
from tilescale.undecided import Undecided


def factory(**how: Any) -> Any:
    @tilescale.jit(**how)
    def twice(n):
        @T.prim_func
        def main(A: T.Tensor((n,), "float32"), B: T.Tensor((n,), "float32")):
            with T.Kernel(1, threads=32):
                for i in T.Parallel(n):
                    B[i] = A[i] * 2

        return main

    return twice


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A machine with an H100, as far as targets go. Every look for it is noted."""
    looks: list[int] = []

    def capability(device: int = 0) -> tuple[int, int]:
        looks.append(device)
        return 9, 0

    monkeypatch.setattr(Cuda, "may_be_here", lambda self: True)
    monkeypatch.setattr(native, "cuda_capability", capability)
    monkeypatch.setattr("tilescale.cuda.architecture", lambda: "sm_90a")
    monkeypatch.delenv("TILESCALE_TARGET", raising=False)
    return looks


class OnGPU:
    """A tensor of a GPU, by DLPack. Nobody may look into it."""

    shape, dtype = (8,), "float32"

    def __dlpack_device__(self) -> tuple[int, int]:
        return 2, 0

    def __dlpack__(self, **_: Any) -> Any:
        raise BufferError("there is no such memory here")


def test_what_a_tensor_says():
    class Torch:
        is_cuda = True

    assert device_of([]) is device_of([1, 2.0, "x"]) is None
    assert device_of([1, np.zeros(3)]) == device_of([torch.zeros(3)]) == "cpu"
    assert device_of([torch.zeros(3), OnGPU()]) == device_of([Torch()]) == "cuda"


def test_cpu_tensors_first(gpu: list[int]):
    kernel = factory()(8)
    assert isinstance(kernel, Kernel) and type(kernel) is Undecided
    b = torch.zeros(8)
    kernel(torch.ones(8), B=b)
    assert b.tolist() == [2.0] * 8
    assert type(kernel) is Kernel and kernel.target == "cpu" and gpu == []


def test_gpu_tensors_first_and_cpu_tensors_later(gpu: list[int]):
    """The kernel is CUDA's: its launcher refuses here, where there is no GPU. Tensors of the CPU run all the
    same."""
    make = factory(out_idx=-1)
    kernel = make(8)
    with pytest.raises((TileError, BufferError)):
        kernel(OnGPU())
    assert kernel.target == "cuda" and kernel.built_for == "cuda:sm_90a" and make(8) is kernel
    assert kernel(torch.ones(8)).tolist() == [2.0] * 8
    assert kernel(np.ones(8, "float32")).tolist() == [2.0] * 8
    assert kernel.target == "cuda"
    again = kernel.elsewhere("cpu")
    assert again is kernel.elsewhere("cpu") and again.target == "cpu"


@pytest.mark.parametrize(
    "ask",
    [lambda k: k.get_kernel_source(), lambda k: k.resources, lambda k: k.report(), repr, lambda k: k.params],
)
def test_who_asks_before_a_call_gets_the_machines(gpu: list[int], ask: Any):
    kernel = factory()(8)
    ask(kernel)
    assert kernel.target == "cuda" and gpu == [0]
    assert "__global__" in kernel.get_kernel_source()


def test_what_was_said_of_it_stays(gpu: list[int]):
    kernel = factory(out_idx=-1)(8)
    kernel.config, kernel.latency = {"n": 8}, 0.5
    kernel(np.ones(8, "float32"))
    assert (kernel.config, kernel.latency, kernel.target) == ({"n": 8}, 0.5, "cpu")


def test_tracing_decides_nothing(gpu: list[int]):
    kernel = factory()(8)
    assert kernel.has_program and kernel.program().func is not None
    assert type(kernel) is Undecided


def test_without_tensors_the_machine_decides(gpu: list[int], monkeypatch: pytest.MonkeyPatch):
    assert resolve_target("auto") == resolve_target(None, [3]) == "cuda:sm_90a"
    assert resolve_target("auto", [torch.zeros(3)]) == "cpu"
    monkeypatch.setenv("TILESCALE_TARGET", "cpu")
    assert resolve_target("auto") == "cpu"
    assert type(factory()(8)) is Kernel
    assert type(factory(target="cpu")(8)) is Kernel


def test_a_driver_without_a_gpu(gpu: list[int], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(native, "cuda_capability", lambda device=0: None)
    assert resolve_target("auto") == "cpu" and factory()(8).target == "cpu"


def test_a_machine_without_a_driver_compiles_at_once(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("TILESCALE_TARGET", raising=False)
    monkeypatch.setattr(os.path, "exists", lambda path: False)
    assert type(factory()(8)) is Kernel


def test_threads_that_call_first_together(gpu: list[int]):
    kernel, gate, outs = factory()(8), threading.Barrier(4), [np.zeros(8, "float32") for _ in range(4)]

    def call(out: Any) -> None:
        gate.wait()
        kernel(np.ones(8, "float32"), out)

    threads = [threading.Thread(target=call, args=(out,)) for out in outs]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert all((out == 2).all() for out in outs)
