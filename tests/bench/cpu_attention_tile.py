"""One thread, attention forward (batch 1, 8 heads, 1024 × 64, float32) from the tile emitters, beside
torch's.

python tests/bench/cpu_attention_tile.py [--tiles 64,64 128,128 …]
"""

from __future__ import annotations

import argparse
import ctypes
import math
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from tests.unit.cpu.harness import make_func, row_major
from tilescale.compiler.cpu import codegen
from tilescale.compiler.cpu.copy import emit_copy, emit_fill, for_each
from tilescale.compiler.cpu.expr import lit, loop, seq
from tilescale.compiler.cpu.gemm import emit_gemm
from tilescale.compiler.cpu.reduce import emit_reduce
from tilescale.compiler.cpu.tile import Tile
from tilescale.compiler.cpu.vmath import lower_call
from tilescale.compiler.tvm_compat import tirx

HEADS, LENGTH, DIM = 8, 1024, 64


def kernel(bm: int, bn: int, parts: str = "gers") -> Any:
    """Online softmax over tiles of keys. ``parts`` leaves phases out, to see what each costs: g gemm, e exp,
    r reductions, s scale."""

    def body(cx: Any, q: Any, k: Any, v: Any, o: Any) -> Any:
        def tile(*shape: int) -> Tile:
            return row_major(cx.scratch(math.prod(shape), "float32"), "float32", shape)

        sq, sk, sv, s, acc = tile(bm, DIM), tile(bn, DIM), tile(bn, DIM), tile(bm, bn), tile(bm, DIM)
        top, new, scale, total, part = (tile(bm) for _ in range(5))
        lanes = codegen.host_cpu().lanes("float32")

        def at(t: Tile, *ids: Any) -> Any:
            return tirx.BufferLoad(t.buf, [t.index(*ids)])

        def each(t: Tile, value: Any) -> Any:
            return for_each(t, lambda ids: tirx.BufferStore(t.buf, value(*ids), [t.index(*ids)]), lanes)

        def call(name: str, x: Any) -> Any:
            return lower_call(name, [x], "float32")

        c = lit(1.4426950408889634 / math.sqrt(DIM), "float32")

        def keys(base: Any, j: Any) -> Any:
            at_k = base + j * (bn * DIM)
            steps = [
                emit_copy(Tile(k, "float32", (bn, DIM), (DIM, 1), at_k), sk),
                emit_copy(Tile(v, "float32", (bn, DIM), (DIM, 1), at_k), sv),
            ]
            if "g" in parts:
                steps.append(emit_gemm(cx, sq, sk, s, trans_b=True, clear=True))
            if "r" in parts:
                steps += [each(new, lambda i: at(top, i)), emit_reduce(cx, s, new, 1, "max", False)]
            steps.append(each(scale, lambda i: call("exp2", at(top, i) * c - at(new, i) * c)))
            if "e" in parts:
                steps.append(each(s, lambda i, j: call("__exp2", at(s, i, j) * c - at(new, i) * c)))
            if "r" in parts:
                steps.append(emit_reduce(cx, s, part, 1, "sum"))
            steps.append(each(total, lambda i: at(total, i) * at(scale, i) + at(part, i)))
            if "s" in parts:
                steps.append(each(acc, lambda i, j: at(acc, i, j) * at(scale, i)))
            if "g" in parts:
                steps.append(emit_gemm(cx, s, sv, acc))
            return seq([*steps, each(top, lambda i: at(new, i))])

        def block(h: Any, i: Any) -> Any:
            base = h * (LENGTH * DIM)
            at_q = base + i * (bm * DIM)
            return seq(
                [
                    emit_copy(Tile(q, "float32", (bm, DIM), (DIM, 1), at_q), sq),
                    emit_fill(acc, lit(0, "float32")),
                    emit_fill(total, lit(0, "float32")),
                    emit_fill(top, lit(-1e30, "float32")),
                    loop("j", LENGTH // bn, lambda j: keys(base, j)),
                    each(acc, lambda i, j: at(acc, i, j) / at(total, i)),
                    emit_copy(acc, Tile(o, "float32", (bm, DIM), (DIM, 1), at_q)),
                ]
            )

        return loop("h", HEADS, lambda h: loop("i", LENGTH // bm, lambda i: block(h, i)))

    return make_func(["float32"] * 4, [HEADS * LENGTH * DIM] * 4, body)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--tiles", nargs="*", default=["64,64", "128,64", "128,128"])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument(
        "--parts", action="store_true", help="also time the kernel without some of its phases"
    )
    args = parser.parse_args()
    torch.set_num_threads(1)
    tiles = [tuple(int(v) for v in t.split(",")) for t in args.tiles]
    q, k, v = (torch.randn(1, HEADS, LENGTH, DIM) for _ in range(3))
    want = torch.nn.functional.scaled_dot_product_attention(q.double(), k.double(), v.double())
    arena = torch.empty(1 << 24, dtype=torch.uint8)
    base = ctypes.c_void_p((arena.data_ptr() + 63) & ~63)
    names = {f"k{m}_{n}": (m, n, "gers") for m, n in tiles}
    if args.parts:
        names |= {f"k{m}_{n}_{p}": (m, n, p) for m, n in tiles for p in ("g", "gr", "ge", "")}
    with tempfile.TemporaryDirectory() as folder:
        codegen.build_shared({name: kernel(*how) for name, how in names.items()}, Path(folder, "bench.so"))
        lib = ctypes.CDLL(str(Path(folder, "bench.so")))
        for name in names:
            out = torch.empty_like(q)
            pointers = [ctypes.c_void_p(t.data_ptr()) for t in (q, k, v, out)]
            ours, theirs = [], []
            for _ in range(args.rounds):
                start = time.thread_time()
                getattr(lib, name)(*pointers, base)
                middle = time.thread_time()
                torch.nn.functional.scaled_dot_product_attention(q, k, v)
                theirs.append(time.thread_time() - middle)
                ours.append(middle - start)
            mine, ref = sorted(ours)[len(ours) // 2], sorted(theirs)[len(theirs) // 2]
            error = float((out.double() - want).abs().max())
            print(
                f"{name}: {1e3 * mine:.2f} ms, torch {1e3 * ref:.2f} ms: {ref / mine:.2f}×, error {error:.1e}"
            )


if __name__ == "__main__":
    main()
