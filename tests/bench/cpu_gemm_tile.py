"""One thread, one matrix product of 1024³ as a whole kernel: blocks × (copy tiles in, T.gemm's emitter, copy
out), beside torch.mm.

    python tests/bench/cpu_gemm_tile.py [--dtype float32] [--size 1024] [--tiles 128,128,64 …]

Prints GFLOP/s of the kernel and of torch.mm on one thread, interleaved, and the measured FMA peak of this
core. Times are the thread's own processor time, so that other work on the machine disturbs less.
"""

from __future__ import annotations

import argparse
import ctypes
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from tests.unit.cpu.harness import make_func, row_major
from tilescale.compiler.cpu import codegen
from tilescale.compiler.cpu.convert import storage_dtype
from tilescale.compiler.cpu.copy import emit_copy, emit_fill
from tilescale.compiler.cpu.expr import fma, lit, loop, seq
from tilescale.compiler.cpu.gemm import emit_gemm
from tilescale.compiler.cpu.tile import Tile, imm
from tilescale.compiler.tvm_compat import tirx


def kernel(size: int, tile: tuple[int, int, int], dtype: str) -> Any:
    """The blocked product [size, size]² as one function (a, b, c, arena)."""
    bm, bn, bk = tile

    def body(cx: Any, a: Any, b: Any, c: Any) -> Any:
        sa = row_major(cx.scratch(bm * bk, storage_dtype(dtype)), dtype, (bm, bk))
        sb = row_major(cx.scratch(bk * bn, storage_dtype(dtype)), dtype, (bk, bn))
        sc = row_major(cx.scratch(bm * bn, "float32"), "float32", (bm, bn))

        def block(by: Any, bx: Any) -> Any:
            def step(ko: Any, clear: bool) -> Any:
                ga = Tile(a, dtype, (bm, bk), (size, 1), by * (bm * size) + ko * bk)
                gb = Tile(b, dtype, (bk, bn), (size, 1), ko * (bk * size) + bx * bn)
                return seq([emit_copy(ga, sa), emit_copy(gb, sb), emit_gemm(cx, sa, sb, sc, clear=clear)])

            gc = Tile(c, "float32", (bm, bn), (size, 1), by * (bm * size) + bx * bn)
            rest = loop("ko", size // bk, lambda ko: step(ko, False))
            return seq([emit_fill(sc, lit(0, "float32")), rest, emit_copy(sc, gc)])

        return loop("by", size // bm, lambda by: loop("bx", size // bn, lambda bx: block(by, bx)))

    return make_func([dtype, dtype, "float32"], [size * size] * 3, body)


def peak(rounds: int) -> Any:
    """FMAs on registers alone: 16 independent chains of one vector each, 16 a round."""
    lanes = codegen.host_cpu().lanes("float32")

    def body(cx: Any, x: Any) -> Any:
        regs = tirx.decl_buffer((16 * lanes,), "float32", "r", layout=None, scope="local", data_alignment=64)
        at = [[tirx.Ramp(imm(i * lanes), imm(1), imm(lanes))] for i in range(16)]
        load = [tirx.BufferStore(regs, tirx.BufferLoad(x, at[i]), at[i]) for i in range(16)]
        c = tirx.Broadcast(lit(0.5, "float32"), imm(lanes))
        steps = [tirx.BufferStore(regs, fma(tirx.BufferLoad(regs, at[i]), c, c), at[i]) for i in range(16)]
        save = [tirx.BufferStore(x, tirx.BufferLoad(regs, at[i]), at[i]) for i in range(16)]
        return seq([tirx.AllocBuffer(regs), *load, loop("n", rounds, lambda n: seq(steps)), *save])

    return make_func(["float32"], [16 * lanes], body)


def timed(call: Callable[[], Any], flop: float) -> float:
    start = time.thread_time()
    call()
    return flop / (time.thread_time() - start) / 1e9


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--size", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--tiles", nargs="*", default=["64,64,32", "128,128,32", "128,128,64", "256,256,64"])
    args = parser.parse_args()
    torch.set_num_threads(1)
    n, dtype = args.size, getattr(torch, args.dtype)
    tiles = [tuple(int(v) for v in t.split(",")) for t in args.tiles]
    a, b = torch.randn(n, n).to(dtype), torch.randn(n, n).to(dtype)
    want = a.double() @ b.double()
    arena = torch.empty(1 << 24, dtype=torch.uint8)
    base = (arena.data_ptr() + 63) & ~63
    with tempfile.TemporaryDirectory() as folder:
        funcs = {f"k{i}": kernel(n, t, args.dtype) for i, t in enumerate(tiles)} | {"peak": peak(1 << 20)}
        start = time.thread_time()
        codegen.build_shared(funcs, Path(folder, "bench.so"))
        print(f"compiled {len(funcs)} functions in {1e3 * (time.thread_time() - start):.0f} ms")
        lib = ctypes.CDLL(str(Path(folder, "bench.so")))
        pointers = [ctypes.c_void_p(t.data_ptr()) for t in (a, b)]
        lanes = codegen.host_cpu().lanes("float32")
        x = torch.zeros(16 * lanes)
        top = max(
            timed(
                lambda: lib.peak(ctypes.c_void_p(x.data_ptr()), ctypes.c_void_p(base)), 2 * 16 * lanes * 2**20
            )
            for _ in range(5)
        )
        out = torch.empty(n, n, dtype=dtype)
        print(f"FMA peak {top:.1f} GFLOP/s")
        for i, tile in enumerate(tiles):
            c = torch.empty(n, n)
            func = getattr(lib, f"k{i}")
            call = lambda: func(*pointers, ctypes.c_void_p(c.data_ptr()), ctypes.c_void_p(base))  # noqa: E731
            ours, theirs = [], []
            for _ in range(args.rounds):
                ours.append(timed(call, 2 * n**3))
                theirs.append(timed(lambda: torch.mm(a, b, out=out), 2 * n**3))
            error = float((c.double() - want).abs().max())
            med, ref = sorted(ours)[len(ours) // 2], sorted(theirs)[len(theirs) // 2]
            print(
                f"{args.dtype} {tile}: {med:.1f} GFLOP/s (best {max(ours):.1f}), torch.mm {ref:.1f} (best {max(theirs):.1f}):"
                f" {med / ref:.2f}×, {100 * med / top:.0f} % of peak, error {error:.1e}"
            )


if __name__ == "__main__":
    main()
