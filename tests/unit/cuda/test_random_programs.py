"""Programs drawn at random (shapes that divide nothing, any mix of tiles, dtypes and threads) on the emulated
GPU and the simulator."""

from __future__ import annotations

import numpy as np
import pytest

import tilescale.language as T
from tests.unit.cuda.emulated import agree, data, empty

DTYPES = ["float32", "float16", "bfloat16", "int32"]


def draw_program(seed):
    draw = np.random.default_rng(seed)
    m, n = (int(draw.integers(1, 70)) for _ in range(2))
    threads = int(draw.choice([32, 64, 96, 128, 192]))
    dtype = str(draw.choice(DTYPES))
    scopes = [str(draw.choice(["fragment", "fragment", "shared"])) for _ in range(3)]
    steps = [
        str(draw.choice(["scale", "mix", "shift", "rows", "cols", "transpose", "copy", "scan", "bin"]))
        for _ in range(5)
    ]
    floats = dtype != "int32"

    def tile(scope, shape, kind):
        return T.alloc_fragment(shape, kind) if scope == "fragment" else T.alloc_shared(shape, kind)

    @T.prim_func
    def program(
        A: T.Tensor((m, n), dtype),
        B: T.Tensor((m, n), dtype),
        C: T.Tensor((m, n), "float32"),
        H: T.Tensor((4,), "int32"),
    ):
        with T.Kernel(1, threads=threads):
            x, y, z = (
                tile(scopes[0], (m, n), dtype),
                tile(scopes[1], (m, n), dtype),
                tile(scopes[2], (m, n), "float32"),
            )
            r, c = T.alloc_fragment((m,), dtype), tile(scopes[2], (n,), dtype)
            turned = tile(scopes[1], (n, m), dtype)
            T.copy(A, x)
            T.fill(y, 1)
            T.clear(z)
            T.fill(r, 1)
            T.fill(c, 2)
            for step in steps:
                if step == "scale":
                    for i, j in T.Parallel(m, n):
                        x[i, j] = x[i, j] * 2 - y[i, j]
                elif step == "mix":
                    for i, j in T.Parallel(m, n):
                        if (i + j) % 3 == 0:
                            y[i, j] = x[i, j] + r[i] + c[j]
                        else:
                            z[i, j] += T.cast(x[i, j], "float32")
                elif step == "shift":
                    for i, j in T.Parallel(m, n):
                        z[i, j] = (
                            z[i, j] + T.if_then_else(j > 0, T.cast(x[i, j - 1], "float32"), 0.0)
                            if n > 1
                            else z[i, j] + 1
                        )
                elif step == "rows":
                    T.reduce_max(x, r, dim=1)
                    for i, j in T.Parallel(m, n):
                        x[i, j] = x[i, j] - r[i]
                elif step == "cols":
                    T.reduce_sum(y, c, dim=0)
                elif step == "transpose":
                    for j, i in T.Parallel(n, m):
                        turned[j, i] = x[i, j]
                    for i, j in T.Parallel(m, n):
                        y[i, j] = turned[j, i]
                elif step == "copy":
                    T.copy(z, y)
                elif step == "scan" and not floats:
                    T.cumsum(y, dim=1)
                elif step == "bin":
                    for i, j in T.Parallel(m, n):
                        T.atomic_add(H[(i + j) % 4], 1)
            T.copy(y, B)
            T.copy(x, A)
            T.copy(z, C)

    args = {
        "A": data((m, n), dtype, seed, 0.5),
        "B": empty((m, n), dtype),
        "C": empty((m, n), "float32"),
        "H": empty((4,), "int32"),
    }
    return program, args


@pytest.mark.parametrize("seed", range(24))
def test_random_programs(seed):
    agree(*draw_program(seed))
