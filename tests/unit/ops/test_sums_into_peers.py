"""``T.copy(…, dst=rank, op="add")``: tiles added to another rank's memory, on every target."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest

import tilescale.language as T
from tests.kernels import refused
from tests.unit.cuda.emulated import agree_on_ranks, lowered
from tests.unit.ops.test_signals import by_name
from tilescale.compiler import driver, emulator
from tilescale.compiler.checks.run import check, launch
from tilescale.compiler.cuda import account, toolchain
from tilescale.compiler.emulator import EmulationError
from tilescale.compiler.sim import numerics
from tilescale.errors import TileError

R = 3


def gathered(
    dtype: str = "float32", given: str = "", wait: bool = True, width: int = 64, scope: str = "shared"
) -> Any:
    """Every rank's rows, added up in everyone's memory; two blocks a rank."""
    given = given or dtype

    @T.prim_func
    def main(
        A: T.Tensor((2, width), given),
        total: T.SymmTensor((2, width), dtype),
        s: T.Signal((2,)),
        B: T.Tensor((2, width), dtype),
    ):
        with T.Kernel(2, threads=32) as b, T.Scale("device") as (rank, n):
            if scope == "shared":
                held = T.alloc_shared((1, width), given)
            else:
                held = T.alloc_fragment((1, width), given)
            T.copy(A[b, 0], held)
            for k in T.serial(n):
                to = total[b, 0:width]
                if scope == "global":
                    T.copy(A[b, 0:width], to, dst=(rank + k) % n, signal=s[b], op="add")
                else:
                    T.copy(held, to, dst=(rank + k) % n, signal=s[b], op="add")
            if wait:
                T.wait(s[b], n)
            T.copy(total[b, 0:width], B[b, 0])

    return main


def arguments(dtype: str = "float32", given: str = "", width: int = 64) -> list[dict[str, Any]]:
    """Small whole numbers: their sums are exact, in whatever order."""
    draw = np.random.default_rng(3)

    def numbers(kind: str) -> Any:
        x = draw.integers(-8, 9, (2, width))
        return numerics.encode(x.astype(np.float32), kind) if kind in numerics.FLOATS else x.astype(kind)

    return [
        {
            "A": numbers(given or dtype),
            "total": numbers(dtype),
            "s": np.zeros(2, "int64"),
            "B": np.zeros((2, width), numerics.storage(dtype)),
        }
        for _ in range(R)
    ]


def sums(args: list[dict[str, Any]], dtype: str, given: str = "") -> list[Any]:
    """What each rank's memory holds behind it."""
    wide = [numerics.decode(a["A"], given or dtype).astype(np.float64) for a in args]
    return [numerics.decode(a["total"], dtype).astype(np.float64) + sum(wide) for a in args]


@pytest.mark.parametrize("scope", ["shared", "fragment", "global"])
@pytest.mark.parametrize(
    ("dtype", "given"),
    [
        ("float32", ""),
        ("float16", ""),
        ("bfloat16", ""),
        ("int32", ""),
        ("bfloat16", "float32"),
        ("float64", ""),
    ],
)
def test_the_simulator_adds_in_any_order(dtype: str, given: str, scope: str):
    args = arguments(dtype, given)
    kernel = gathered(dtype, given, scope=scope)
    for order, seed in (("round_robin", 0), ("random", 1), ("adversary", 2), ("adversary", 3)):
        result = launch(kernel, R, by_name(args), order=order, seed=seed)
        for rank, (got, want) in enumerate(zip(result.arrays, sums(args, dtype, given), strict=True)):
            assert (numerics.decode(got["B"], dtype) == want).all(), (order, rank)


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
@pytest.mark.parametrize("scope", ["shared", "fragment", "global"])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "int32"])
def test_emulated_threads_add_in_any_order(dtype: str, scope: str, arch: str):
    agree_on_ranks(gathered(dtype, scope=scope), arguments(dtype), seeds=4, arch=arch)


CALLS = {
    "float32": ("ts::system_red_add(", "ts::remote_red_add2_f32("),
    "float16": ("ts::remote_red_add2_f16(", "ts::remote_red_add2_f16("),
    "bfloat16": ("ts::system_red_add(", "ts::remote_red_add2_bf16("),
    "int32": ("ts::system_red_add(", "ts::system_red_add("),
}


@pytest.mark.parametrize("dtype", CALLS)
def test_neighbours_are_added_by_one_instruction(dtype: str):
    for arch, call in zip(("sm_80", "sm_90a"), CALLS[dtype], strict=True):
        text = driver.source_text(gathered(dtype).trace(), "cuda", f"cuda:{arch}")
        assert call in text and "tma_reduce" not in text, text
        added = re.search(r"\w+_red_add\w*\((\S+)\[", text)
        assert added is not None and added[1].endswith("total_there"), "in the peer's memory"
        assert text.index(call) < text.index("the signal tells of what all threads did")


def test_wide_rows_are_added_sixteen_bytes_at_a_time():
    for dtype, call in (("float32", "remote_red_add4_f32"), ("bfloat16", "remote_red_add8_bf16")):
        text = driver.source_text(gathered(dtype, width=1024).trace(), "cuda", "cuda:sm_90a")
        assert call in text
        made = lowered(gathered(dtype, width=1024))
        from tilescale.compiler.cuda.describe import _alignments

        assert _alignments(made.kernel, made.program)[1] == 16


@pytest.mark.skipif(toolchain.find_nvcc() is None, reason="no nvcc")
@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
def test_it_compiles_of_every_dtype(arch: str):
    vectors = ("float32", "float16", "bfloat16")  # those of other dtypes are sums one by one in both widths
    for dtype in (*vectors, "float64", "int32", "uint32", "int64", "uint64"):
        for width in (33, 1024) if dtype in vectors else (33,):
            made = driver.lower(gathered(dtype, width=width).trace(), f"cuda:{arch}")
            toolchain.compile_cubin(driver.backend(f"cuda:{arch}").printed(made), arch)


def test_without_its_wait_it_is_a_race():
    report = check(gathered(wait=False), R, by_name(arguments()), seeds=3)
    assert any(f.kind == "race" for f in report.findings), report
    made = lowered(gathered(wait=False))
    with pytest.raises(EmulationError, match="race in total of rank"):
        for seed in range(8):
            emulator.run_ranks(made.kernel, made.program, arguments(), seed)


def mixed(how: str) -> Any:
    """Rank 1 adds to what rank 0 touches at the same time."""

    @T.prim_func
    def main(A: T.Tensor((64,), "float32"), total: T.SymmTensor((64,), "float32")):
        with T.Kernel(1, threads=32), T.Scale("device") as (rank, n):
            if rank == 1:
                T.copy(A, total, dst=0, op="add")
            if rank == 0:
                if how == "adds":
                    T.copy(A, total, dst=0, op="add")
                elif how == "stores":
                    T.copy(A, total)
                else:
                    T.atomic_add(total, A)

    return main


@pytest.mark.parametrize(("how", "found"), [("adds", ""), ("stores", "race"), ("alone", "race")])
def test_what_goes_beside_it(how: str, found: str):
    """Another put that adds; no store; no update that is atomic within its own rank alone."""
    args = [{"A": np.ones(64, "float32"), "total": np.zeros(64, "float32")} for _ in range(2)]
    kinds = {f.kind for f in check(mixed(how), 2, by_name(args), seeds=3).findings}
    assert (found in kinds) if found else not kinds, kinds


BODIES = {
    'op="add" of a copy within one rank': lambda A, S, s: T.copy(A, S, op="add"),
    'op="add" of a copy from another rank': lambda A, S, s: T.copy(S, A, src=0, op="add"),
    "op='max' of T.copy": lambda A, S, s: T.copy(A, S, dst=0, op="max"),
    "signal= of a non-blocking copy by TMA": lambda A, S, s: T.copy(
        A[0:4], S[0:4], dst=0, signal=s[0], blocking=False, prefer_instruction="tma"
    ),
    'op="add" of a non-blocking copy': lambda A, S, s: T.copy(
        A[0:4], S[0:4], dst=0, signal=s[0], op="add", blocking=False
    ),
}


@pytest.mark.parametrize("what", BODIES)
def test_what_is_no_put_is_refused(what: str):
    body = BODIES[what]

    @T.prim_func
    def main(A: T.Tensor((4,), "float32"), S: T.SymmTensor((4,), "float32"), s: T.Signal((1,))):
        with T.Kernel(1, threads=32), T.Scale("device"):
            body(A, S, s)

    with refused(TileError, what):
        main.trace()


def test_other_memory_and_other_dtypes_are_refused():
    @T.prim_func
    def bytes_(A: T.Tensor((4,), "int8"), S: T.SymmTensor((4,), "int8")):
        with T.Kernel(1, threads=32), T.Scale("device"):
            T.copy(A, S, dst=0, op="add")

    with refused(TileError, 'op="add" of a copy to int8'):
        bytes_.trace()

    @T.prim_func
    def cluster(A: T.Tensor((4,), "float32")):
        with T.Kernel(2, threads=32, cluster_dims=2):
            a, b = T.alloc_shared((4,), "float32"), T.alloc_shared((4,), "float32")
            T.clear(a)
            T.clear(b)
            with T.Scale("cta_cluster"):
                T.copy(a, b, dst=0, op="add")

    with refused(TileError, 'op="add" of a copy to another block'):
        cluster.trace()


# ---- by TMA


def by_tma(
    dtype: str,
    given: str = "",
    cols: int = 64,
    scope: str = "fragment",
    ordered: bool = True,
    place: int = 16,
    signals: bool = False,
) -> Any:
    """Rounds in each of which every rank adds a tile to a part of another one's memory; the last part reaches
    beyond its end. Ranks are told of a round by a barrier, or each by who added to it."""

    @T.prim_func
    def main(
        A: T.Tensor((16, cols), given or dtype),
        total: T.SymmTensor((40, 256), dtype),
        s: T.Signal((1,)),
        B: T.Tensor((40, 256), dtype),
    ):
        with T.Kernel(1, threads=64), T.Scale("device") as (rank, n):
            held = (T.alloc_fragment if scope == "fragment" else T.alloc_shared)((16, cols), given or dtype)
            if scope != "global":
                T.copy(A[0:16, 0:cols], held)
            for k in T.serial(n):
                to = total[k * place : k * place + 16, 0:cols]
                words = {"dst": (rank + k) % n, "op": "add", "prefer_instruction": "tma"}
                if signals:
                    T.copy(held, to, signal=s[0], **words)
                    T.wait(s[0], k + 1)
                elif scope == "global":
                    T.copy(A[0:16, 0:cols], to, **words)
                else:
                    T.copy(held, to, **words)
                if ordered and not signals:
                    T.barrier()
            if signals or not ordered:
                T.barrier()
            T.copy(total[0:40, 0:256], B[0:40, 0:256])

    return main


def tiles(dtype: str, given: str = "", cols: int = 64) -> list[dict[str, Any]]:
    draw = np.random.default_rng(7)

    def numbers(kind: str, *shape: int) -> Any:
        x = draw.integers(0 if kind[0] == "u" else -8, 9, shape)
        return numerics.encode(x.astype(np.float32), kind) if kind in numerics.FLOATS else x.astype(kind)

    return [
        {
            "A": numbers(given or dtype, 16, cols),
            "total": numbers(dtype, 40, 256),
            "s": np.zeros(1, "int64"),
            "B": np.zeros((40, 256), numerics.storage(dtype)),
        }
        for _ in range(R)
    ]


@pytest.mark.parametrize("scope", ["shared", "fragment", "global"])
@pytest.mark.parametrize(
    ("dtype", "given", "cols"),
    [
        ("bfloat16", "float32", 64),
        ("float16", "", 256),
        ("float32", "", 128),
        ("float64", "", 2),
        ("int32", "", 32),
        ("uint64", "", 8),
    ],
)
def test_tma_adds(dtype: str, given: str, cols: int, scope: str):
    kernel, args = by_tma(dtype, given, cols, scope), tiles(dtype, given, cols)
    made = lowered(kernel)
    assert any("added to by TMA" in n for n in made.program.notes), made.program.notes
    rows = [c["how"] for c in account.copies(made.program, made.kernel) if c["of"].endswith(" → total")]
    assert rows == ["by TMA, to another rank"]
    agree_on_ranks(kernel, args, seeds=3)
    want = [numerics.decode(a["total"], dtype).astype(np.float64) for a in args]
    for rank, a in enumerate(args):
        for k in range(R):
            rows = slice(16 * k, min(16 * k + 16, 40))
            x = numerics.decode(a["A"], given or dtype).astype(np.float64)
            want[(rank + k) % R][rows, :cols] += x[: rows.stop - rows.start]
    for got, sums_of in zip(launch(kernel, R, by_name(args)).arrays, want, strict=True):
        assert (numerics.decode(got["B"], dtype) == sums_of).all()


@pytest.mark.skipif(toolchain.find_nvcc() is None, reason="no nvcc")
def test_it_compiles_by_tma():
    for dtype in ("float16", "bfloat16", "float32", "float64", "int32", "uint32", "uint64"):
        printed = driver.backend("cuda:sm_90a").printed(
            driver.lower(by_tma(dtype, cols=16).trace(), "cuda:sm_90a")
        )
        assert f"ts::add_rows_{dtype}<64>(" in str(printed)
        toolchain.compile_cubin(printed, "sm_90a")


@pytest.mark.parametrize("signals", [False, True])
def test_ranks_that_add_by_tma_at_once_are_a_race(signals: bool):
    """Parts that lie on one another are ordered by the barrier of each round, and not without it. A signal
    tells the rank that was added to, not who adds next."""
    for ordered in (False, True):
        kernel = by_tma("float32", place=8, ordered=ordered, signals=signals)
        report = check(kernel, R, by_name(tiles("float32")), seeds=3)
        kinds = {f.kind for f in report.findings}
        assert kinds == (set() if ordered and not signals else {"race"}), report
        made, found = lowered(kernel), set()
        for seed in range(6):
            try:
                emulator.run_ranks(made.kernel, made.program, tiles("float32"), seed)
            except EmulationError as e:
                found.add(str(e).split(" of rank")[0])
        assert found == (set() if ordered and not signals else {"race in total"}), found


def beside(first: str, second: str) -> Any:
    """Ranks 1 and 2 add to rank 0's memory, each in its way."""

    @T.prim_func
    def main(A: T.Tensor((1, 64), "float32"), total: T.SymmTensor((1, 64), "float32")):
        with T.Kernel(2, threads=32), T.Scale("device") as (rank, n):
            if rank == 1:
                T.copy(A[0:1, 0:64], total[0:1, 0:64], dst=0, op="add", prefer_instruction=first)
            if rank == 2:
                T.copy(A[0:1, 0:64], total[0:1, 0:64], dst=0, op="add", prefer_instruction=second)

    return main


@pytest.mark.parametrize("second", ["tma", "sync"])
def test_tma_beside_another_ranks_sums(second: str):
    """Blocks of one rank may add by TMA at once; two ranks may not, whatever the other one adds by."""
    args = [{"A": np.ones((1, 64), "float32"), "total": np.zeros((1, 64), "float32")} for _ in range(3)]
    for names, race in ((("tma", second), True), (("sync", "sync"), False), ((second, "tma"), True)):
        kernel = beside(*names)
        found = check(kernel, 3, by_name(args), seeds=3).findings
        assert bool(found) == race and all("TMA" in str(f) for f in found), (names, found)
        if race:
            with pytest.raises(EmulationError, match="race in total of rank 0"):
                made = lowered(kernel)
                for seed in range(8):
                    emulator.run_ranks(made.kernel, made.program, args, seed)
        else:
            agree_on_ranks(kernel, args, seeds=3)
    alone = [
        {"A": np.ones((1, 64), "float32"), "total": np.zeros((1, 64), "float32")} for _ in range(2)
    ]  # rank 2 is not there
    assert not check(beside("tma", "tma"), 2, by_name(alone), seeds=3).findings
    agree_on_ranks(beside("tma", "tma"), alone, seeds=3)


def test_what_tma_needs_the_emulator_asks_for(monkeypatch: Any):
    """Without its fences, or its wait, a sum is a fault."""
    from tilescale.compiler.emulator import async_units, puts

    kernel, args = by_tma("float32", "float16", place=8), tiles("float32", "float16")
    made = lowered(kernel)
    run = lambda: [emulator.run_ranks(made.kernel, made.program, args, k) for k in range(4)]  # noqa: E731
    run()
    with monkeypatch.context() as m:
        m.setattr(puts.async_units, "fence_global", lambda b, m: None)
        with pytest.raises(EmulationError, match="race in total"):
            run()
    with monkeypatch.context() as m:
        m.setattr(async_units.AsyncUnits, "await_stores", lambda *a: None)
        with pytest.raises(EmulationError, match="nobody has awaited the store"):
            run()


UNFIT = {
    "sm_80 has no TMA": ({}, "sm_80"),
    "TMA has no sums of int64": ({"dtype": "int64"}, "sm_90a"),
    "multiples of 16 bytes": ({"cols": 33}, "sm_90a"),
}


@pytest.mark.parametrize("why", UNFIT)
def test_threads_add_what_tma_cannot(why: str):
    words, arch = UNFIT[why]
    dtype, cols = words.get("dtype", "float32"), words.get("cols", 64)
    kernel = by_tma(dtype, cols=cols)
    made = lowered(kernel, arch)
    assert any("added to by threads" in n and why in n for n in made.program.notes), made.program.notes
    agree_on_ranks(kernel, tiles(dtype, cols=cols), seeds=2, arch=arch)


def put_by_tma(scale: str, width: int = 64, threads: int = 64, staged: bool = False) -> Any:
    """Each executor puts rows of its own into every rank's memory, whose numbers it looks up."""

    @T.prim_func
    def main(
        A: T.Tensor((13, width), "float16"),
        peers: T.Tensor((13,), "int32"),
        rows: T.SymmTensor((R * 16, width), "float16"),
        B: T.Tensor((R * 16, width), "float16"),
    ):
        with T.Kernel(2, threads=threads) as b, T.Scale("device") as (rank, n):
            with T.Scale(scale) as (w, of):
                x = (T.alloc_fragment if staged else T.alloc_shared)((width,), "float16")
                first, step = (w, of) if scale == "block" else (w * 2 + b, of * 2)
                for i in T.serial(first, 13, step=step):
                    T.copy(A[i, 0], x)
                    for hop in T.serial(n):
                        if peers[i] != hop:
                            T.copy(x, rows[rank * 16 + i, 0], dst=(rank + hop) % n, prefer_instruction="tma")
            T.barrier()
            if b == 0:
                T.copy(rows[0 : R * 16, 0:width], B[0 : R * 16, 0:width])

    return main


@pytest.mark.parametrize(
    ("scale", "staged", "why"),
    [
        ("warp", False, ""),
        ("block", False, ""),
        ("block", True, ""),
        ("warp", True, "no tile of its own"),
        ("thread", False, "a thread alone"),
    ],
)
@pytest.mark.parametrize("width", [8, 256])
def test_tma_puts_rows_of_warps_and_blocks(scale: str, staged: bool, why: str, width: int):
    kernel, draw = put_by_tma(scale, width, staged=staged), np.random.default_rng(5)
    args = [
        {
            "A": draw.standard_normal((13, width)).astype("float16"),
            "peers": draw.integers(0, R, 13).astype("int32"),
            "rows": np.full((R * 16, width), np.nan, "float16"),
            "B": np.zeros((R * 16, width), "float16"),
        }
        for _ in range(R)
    ]
    made = lowered(kernel)
    notes = " ".join(made.program.notes)
    assert (why in notes and "by threads" in notes) if why else "put to by TMA" in notes, notes
    agree_on_ranks(kernel, args, seeds=3)
    got = launch(kernel, R, by_name(args)).arrays
    for rank in range(R):
        want = np.full((R * 16, width), np.nan, "float16")
        for sender, a in enumerate(args):
            for i in range(13):
                if a["peers"][i] != (rank - sender) % R:
                    want[sender * 16 + i] = a["A"][i]
        assert np.array_equal(got[rank]["B"], want, equal_nan=True), rank
    if not why and toolchain.find_nvcc() is not None:
        printed = driver.backend("cuda:sm_90a").printed(driver.lower(kernel.trace(), "cuda:sm_90a"))
        toolchain.compile_cubin(printed, "sm_90a")


@pytest.mark.parametrize("op", [None, "add"])
@pytest.mark.parametrize("stages", [1, 2])
def test_tma_reads_no_stage_of_a_ring(stages: int, op: str | None):
    """Threads fill the stages, and no proxy fence stands behind them."""

    @T.prim_func
    def main(
        A: T.Tensor((4, 16, 64), "float32"),
        S: T.SymmTensor((4, 16, 64), "float32"),
        B: T.Tensor((4, 16, 64), "float32"),
    ):
        with T.Kernel(1, threads=128), T.Scale("device") as (rank, n):
            x = T.alloc_shared((16, 64), "float32")
            for k in T.Pipelined(4, num_stages=stages):
                T.copy(A[k, 0:16, 0:64], x)
                T.copy(x, S[k, 0:16, 0:64], dst=(rank + 1) % n, op=op, prefer_instruction="tma")
            T.barrier()
            T.copy(S, B)

    draw, shape = np.random.default_rng(3), (4, 16, 64)
    numbers = lambda: draw.integers(-8, 9, shape).astype("float32")  # noqa: E731
    args = [{"A": numbers(), "S": numbers(), "B": np.zeros(shape, "float32")} for _ in range(2)]
    made = lowered(main)
    assert made.program.schedule.rings and "by TMA" in " ".join(made.program.notes)
    agree_on_ranks(main, args, seeds=3)
    for rank, got in enumerate(launch(main, 2, by_name(args)).arrays):
        before = args[rank]["S"] if op else 0
        assert (got["B"] == before + args[1 - rank]["A"]).all()


@pytest.mark.parametrize(
    "words",
    [{"disable_tma": True}, {"loop_layout": T.Fragment((4, 16), lambda i, j: (i * 8 + j // 2, j % 2))}],
)
def test_what_its_author_has_threads_do_tma_does_not(words: dict[str, Any]):
    @T.prim_func
    def main(A: T.SymmTensor((4, 16), "float32")):
        with T.Kernel(1, threads=32), T.Scale("device") as (rank, n):
            x = T.alloc_shared((4, 16), "float32")
            T.fill(x, rank)
            T.copy(x, A, dst=(rank + 1) % n, prefer_instruction="tma", **words)

    made = lowered(main)
    assert "by TMA" not in " ".join(made.program.notes), made.program.notes
    agree_on_ranks(main, [{"A": np.zeros((4, 16), "float32")} for _ in range(2)])
