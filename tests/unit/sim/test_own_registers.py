"""Registers that their executor alone can touch: the clocks, which compare executors, leave them out. What nobody
has written is still found there, and so is what engines do beside the executor."""

from __future__ import annotations

from typing import Any

import numpy as np

import tilescale.language as T
from tilescale.compiler.passes.pipeline import tile_level
from tilescale.compiler.sim.prepare import prepare


def tracked(kernel: Any) -> dict[str, bool]:
    return {
        b.name: b.tracked for b in prepare(tile_level(kernel)).buffers if not b.scope.startswith("global")
    }


def test_whose_registers_they_are():
    @T.prim_func
    def kernel(A: T.Tensor((64,), "int32"), B: T.Tensor((64,), "int32")):
        with T.Kernel(1, threads=64):
            met = T.alloc_shared((64,), "int32")
            alone = T.alloc_fragment((64,), "int32")
            T.copy(A, alone)
            T.copy(alone, met)
            with T.Scale("warp") as (w, n):
                seen = T.alloc_var("int32", 0)
                with T.Scale("thread") as (t, m):
                    mine = T.alloc_var("int32", 0)
                    for i in T.serial(3):
                        mine += met[w * 32 + t] + i
                    B[w * 32 + t] = mine
                seen += w

    assert tracked(kernel) == {"met": True, "alone": False, "seen": False, "mine": False}
    a = np.arange(64, dtype=np.int32)
    report = kernel.check(ranks=1, args={"A": a, "B": np.zeros(64, np.int32)}, seeds=3)
    assert report, report


def test_unwritten_registers_are_found_in_threads_too():
    @T.prim_func
    def kernel(B: T.Tensor((64,), "int32")):
        with T.Kernel(1, threads=64):
            with T.Scale("thread") as (t, n):
                mine = T.alloc_local((2,), "int32")
                mine[0] = t
                B[t] = mine[1]

    assert not any(tracked(kernel).values())
    found = str(kernel.check(ranks=1, args={"B": np.zeros(64, np.int32)}, seeds=2))
    assert "mine[1] is read, and nothing has written it" in found, found


def test_registers_that_others_name_are_tracked():
    @T.prim_func
    def viewed(B: T.Tensor((64,), "int32")):
        with T.Kernel(1, threads=64):
            with T.Scale("thread") as (t, n):
                mine = T.alloc_local((1,), "float32")
                bits = T.view(mine, (1,), "int32")
                mine[0] = 1.0
                B[t] = bits[0]

    assert tracked(viewed) == {"mine": True, "bits": True}

    @T.prim_func
    def named_below(B: T.Tensor((64,), "int32")):
        with T.Kernel(1, threads=64):
            outer = T.alloc_fragment((1,), "int32")
            T.clear(outer)
            with T.Scale("thread") as (t, n):
                B[t] = outer[0]

    assert tracked(named_below) == {"outer": True}
