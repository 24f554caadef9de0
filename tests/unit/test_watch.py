"""Kernels made in this process follow the globals, helpers and closure values that they were made from."""

from __future__ import annotations

import torch

import tilescale
import tilescale.language as T

AMOUNT = 3.0


def helper(x):
    return x + AMOUNT


@tilescale.jit
def add(n):
    @T.prim_func
    def main(A: T.Tensor((n,), "float32"), B: T.Tensor((n,), "float32")):
        with T.Kernel(1):
            for i in T.Parallel(n):
                B[i] = helper(A[i])

    return main


@tilescale.jit
def eager(A):
    N = T.const("N")
    A: T.Tensor((N,), T.float32)
    B = T.empty((N,), T.float32)
    with T.Kernel(1):
        for i in T.Parallel(N):
            B[i] = helper(A[i])
    return B


def results() -> tuple[float, float]:
    a, b = torch.zeros(4), torch.empty(4)
    add(4)(a, b)
    return b[0].item(), eager(a)[0].item()


def test_a_global_bound_anew_and_a_helper_defined_anew(monkeypatch):
    assert results() == (3.0, 3.0)
    kernel = add(4)
    assert add(4) is kernel
    monkeypatch.setitem(globals(), "AMOUNT", 5.0)
    assert results() == (5.0, 5.0)
    monkeypatch.setitem(globals(), "helper", lambda x: x - AMOUNT)
    assert results() == (-5.0, -5.0)


def test_a_closure_value_bound_anew():
    amount = 1.0

    @tilescale.jit
    def inner(A):
        N = T.const("N")
        A: T.Tensor((N,), T.float32)
        B = T.empty((N,), T.float32)
        with T.Kernel(1):
            for i in T.Parallel(N):
                B[i] = A[i] + amount
        return B

    assert inner(torch.zeros(2))[0] == 1
    amount = 2.0
    assert inner(torch.zeros(2))[0] == 2
