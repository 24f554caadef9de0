"""Sums kept lane by lane, maxima in chains, and stores by warpgroups that never meet."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest

import tilescale.language as T
from tests.unit.cuda import emulated
from tests.unit.cuda.emulated import agree, data, empty
from tests.unit.cuda.test_attention import arguments, kernel
from tests.unit.cuda.test_hopper import edited, lowered
from tilescale.compiler import emulator
from tilescale.compiler.cuda.printer import print_kernel
from tilescale.compiler.sim import numerics
from tilescale.ops.attention import Tile

ROUNDS = 3


def sums(clear: bool, looks: bool, adds: bool) -> Any:
    """Y = ((F₀·x₀ + …)·F₁ + …)…, each a row sum of X. ``clear``: it begins at zero; ``looks``: every round's
    is stored; ``adds``: one is added in every round by threads."""

    @T.prim_func
    def program(
        X: T.Tensor((ROUNDS, 64, 64), "float32"),
        F: T.Tensor((ROUNDS, 64), "float32"),
        Y: T.Tensor((64,), "float32"),
        Z: T.Tensor((ROUNDS, 64), "float32"),
    ):
        with T.Kernel(1, threads=128):
            x = T.alloc_fragment((64, 64), "float32")
            f, total = (T.alloc_fragment((64,), "float32") for _ in range(2))
            T.fill(total, 0.0 if clear else 2.0)
            for k in T.serial(ROUNDS):
                T.copy(X[k, 0, 0], x)
                T.copy(F[k, 0], f)
                for i in T.Parallel(64):
                    total[i] *= f[i]
                if adds:
                    for i in T.Parallel(64):
                        total[i] += 1.0
                T.reduce_sum(x, total, dim=1, clear=False)
                if looks:
                    T.copy(total, Z[k, 0])
            T.copy(total, Y)

    return program


@pytest.mark.parametrize(
    "clear, looks, adds",
    [(True, False, False), (False, False, False), (True, True, False), (True, False, True)],
)
def test_sums_lane_by_lane(clear: bool, looks: bool, adds: bool):
    """Where the tile begins at zero and is only added to by reductions or multiplied, lanes add up behind the
    loop; elsewhere in it."""
    made = sums(clear, looks, adds)
    text = print_kernel(lowered(made)[0]).text
    loop = text[text.index("for (int k") :]
    depth = re.search(r"\n  \}\n", loop)
    assert depth is not None
    inside, behind = ("shuffle_xor" in part for part in (loop[: depth.start()], loop[depth.start() :]))
    assert (inside, behind) == ((False, True) if clear and not looks and not adds else (True, False)), text
    draw = np.random.default_rng(0)  # small integers: any order of sums is exact
    args = {
        "X": draw.integers(-2, 3, (ROUNDS, 64, 64)).astype("float32"),
        "F": draw.integers(0, 3, (ROUNDS, 64)).astype("float32"),
    }
    got = agree(
        made, {**args, "Y": empty((64,), "float32"), "Z": np.zeros((ROUNDS, 64), "float32")}, exact=True
    )
    assert np.isfinite(got["Y"]).all()


def columns(dtype: str, threads: int, what: str, rows: int = 32) -> Any:
    """Y = the column sums of X, twice, a block of rows a round; ``what`` else is done with them in every round."""

    @T.prim_func
    def program(
        X: T.Tensor((ROUNDS, rows, 64), dtype),
        Y: T.Tensor((64,), "float32"),
        Z: T.Tensor((ROUNDS, 64), "float32"),
    ):
        with T.Kernel(1, threads=threads):
            x, total = T.alloc_fragment((rows, 64), dtype), T.alloc_fragment((64,), "float32")
            T.clear(total)
            for k in T.serial(ROUNDS):
                T.copy(X[k, 0, 0], x)
                T.reduce_sum(x, total, dim=0, clear=False)
                if what == "twice":
                    if k < 2:
                        T.reduce_sum(x, total, dim=0, clear=False)
                if what == "scaled":
                    for i in T.Parallel(64):
                        total[i] *= 2.0
                if what == "stored":
                    T.copy(total, Z[k, 0])
            T.copy(total, Y)

    return program


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
@pytest.mark.parametrize(
    "dtype, threads, what, rows",
    [
        ("float32", 128, "", 32),
        ("float32", 128, "twice", 29),
        ("float8_e4m3fn", 256, "", 128),
        ("float32", 128, "scaled", 32),
        ("float32", 128, "stored", 32),
    ],
)
def test_sums_across_warps(dtype: str, threads: int, what: str, rows: int, arch: str):
    """They are added thread by thread in the loop, where nothing else is done with them there, and go through
    shared memory behind it."""
    made = columns(dtype, threads, what, rows)
    text = print_kernel(emulated.lowered(made, arch).kernel).text
    loop = text[text.index("for (int k") :]
    inside, behind = loop[: (end := loop.index("\n  }\n"))], loop[end:]
    apart = what in ("", "twice")
    assert ("__syncthreads" not in inside and "shuffle" not in inside) == apart, text
    assert ("__syncthreads" in behind) == apart, text
    if dtype != "float32" and arch == "sm_90a":
        assert "widen4_e4m3" in inside
    draw = np.random.default_rng(0)  # small integers: any order of sums is exact
    x = draw.integers(-2, 3, (ROUNDS, rows, 64)).astype("float32")
    args = {
        "X": numerics.encode(x, dtype),
        "Y": empty((64,), "float32"),
        "Z": np.zeros((ROUNDS, 64), "float32"),
    }
    got = agree(made, args, exact=True, arch=arch)
    if apart:
        np.testing.assert_array_equal(got["Y"], x.sum((0, 1)) + (x[:2].sum((0, 1)) if what else 0))


@pytest.mark.parametrize("dim", [0, 1])
def test_a_sum_that_another_name_reads_is_whole_in_every_round(dim: int):
    @T.prim_func
    def program(X: T.Tensor((ROUNDS, 64, 64), "float32"), Y: T.Tensor((ROUNDS, 64), "int32")):
        with T.Kernel(1, threads=128):
            x, total = T.alloc_fragment((64, 64), "float32"), T.alloc_fragment((64,), "float32")
            bits = T.view(total, dtype="int32")
            T.clear(total)
            for k in T.serial(ROUNDS):
                T.copy(X[k, 0, 0], x)
                T.reduce_sum(x, total, dim=dim, clear=False)
                T.copy(bits, Y[k, 0])

    x = np.random.default_rng(0).integers(-2, 3, (ROUNDS, 64, 64)).astype("float32")
    got = agree(program, {"X": x, "Y": np.zeros((ROUNDS, 64), "int32")}, exact=True)
    np.testing.assert_array_equal(got["Y"].view("float32"), x.sum(1 + dim).cumsum(0))


@pytest.mark.parametrize("op", ["max", "min", "absmax", "sum"])
def test_chains(op: str):
    """A thread's greatest and least come from four chains, NaN and zeros of both signs among them; sums from
    one."""

    @T.prim_func
    def program(X: T.Tensor((64, 96), "float32"), Y: T.Tensor((64,), "float32")):
        with T.Kernel(1, threads=128):
            x, y = T.alloc_fragment((64, 96), "float32"), T.alloc_fragment((64,), "float32")
            T.copy(X, x)
            T.reduce(x, y, op, dim=1)
            T.copy(y, Y)

    x = data((64, 96), "float32", 3)
    x[1, 7], x[2, ::2], x[3] = np.nan, -np.inf, 0.0
    assert ("total[4]" in print_kernel(lowered(program)[0]).text) == (op != "sum")
    agree(program, {"X": x, "Y": empty((64,), "float32")}, exact=op != "sum")


def staying() -> tuple[Any, Any, dict[str, Any]]:
    """Attention of two blocks that stay, two warpgroups each, several tiles a block."""
    made, program = lowered(kernel(3, 1, 64, True, Tile(128, 128, 256, 2, 2)))
    return made, program, arguments(130, 130, 3, 1, 64, side=2)


def test_warpgroups_store_apart():
    """No barrier of all consumers is left, since tiles of different rounds lie whole tiles apart; each
    warpgroup stores its own rows."""
    text = print_kernel(staying()[0]).text
    assert "ts::barrier_sync(15" not in text and text.count("ts::barrier_sync((tid >> 7) + 1, 128)") == 2
    assert re.search(
        r"if \(\(tid & 127\) == 0\) \{\s*ts::tma_store\(O_map, &O_staged\[warpgroup \* 4096\]", text
    )


@pytest.mark.parametrize("fault", ["ts::barrier_sync", "ts::bulk_wait_read<0>", "ts::fence_proxy_async"])
def test_what_orders_those_stores_is_needed(fault: str):
    made, program, args = staying()
    right = emulator.run(made, program, args)["O"]
    broken = edited(made, lambda n, a: None if n == fault else ...)
    for seed in range(6):
        try:
            if not (emulator.run(broken, program, args, seed)["O"] == right).all():
                return
        except emulator.EmulationError:
            return
    pytest.fail("no schedule shows it")
