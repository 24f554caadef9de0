"""T.Pipelined(order=…, stage=…): what runs ahead, what stays, in which order, and what is refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import tilescale.language as T
from tests.kernels import refused, run
from tests.unit.cuda.emulated import agree, data, empty
from tilescale.compiler.checks.run import check
from tilescale.compiler.cuda.lower import Lowering
from tilescale.compiler.cuda.printer import print_kernel
from tilescale.compiler.cuda.targets import target
from tilescale.compiler.ir.operations import name_of
from tilescale.compiler.passes import pipeline
from tilescale.compiler.passes.manual_stages import manual_stages
from tilescale.compiler.passes.products import flat
from tilescale.compiler.passes.schedule import AHEAD, ROLES
from tilescale.compiler.tvm_compat import structural_walk, tirx
from tilescale.errors import TileValueError


def product(**words: Any) -> Any:
    """A GEMM with a name among its statements."""

    @T.prim_func
    def kernel(
        A: T.Tensor((64, 256), "float16"), B: T.Tensor((256, 64), "float16"), C: T.Tensor((64, 64), "float32")
    ):
        with T.Kernel(1, threads=128):
            a, b = T.alloc_shared((64, 32), "float16"), T.alloc_shared((32, 64), "float16")
            c = T.alloc_fragment((64, 64), "float32")
            T.clear(c)
            for k in T.Pipelined(8, **words):
                base: T.int32 = k * 32
                T.copy(A[0, base], a)
                T.copy(B[base, 0], b)
                T.gemm(a, b, c)
            T.copy(c, C)

    return kernel


def scaled(**words: Any) -> Any:
    """Rows added up, with statements that may change places: 0 copy, 1 copy, 2 sum, 3 sum, 4 count."""

    @T.prim_func
    def kernel(
        A: T.Tensor((8, 128), "float32"), B: T.Tensor((8, 128), "float32"), C: T.Tensor((2, 128), "float32")
    ):
        with T.Kernel(1, threads=64):
            a, b = T.alloc_shared((128,), "float32"), T.alloc_shared((128,), "float32")
            s, t = T.alloc_fragment((128,), "float32"), T.alloc_fragment((128,), "float32")
            n = T.alloc_var("int32", 0)
            T.clear(s)
            T.clear(t)
            for k in T.Pipelined(8, **words):
                T.copy(A[k, 0], a)
                T.copy(B[k, 0], b)
                for i in T.Parallel(128):
                    s[i] += a[i]
                for i in T.Parallel(128):
                    t[i] += b[i] * s[i]
                n = n + 1
            for i in T.Parallel(128):
                C[0, i] = s[i] + n
                C[1, i] = t[i]

    return kernel


PRODUCT = {
    "A": data((64, 256), "float16", 1),
    "B": data((256, 64), "float16", 2),
    "C": empty((64, 64), "float32"),
}
SUMS = {"A": data((8, 128), "float32", 1), "B": data((8, 128), "float32", 2), "C": empty((2, 128), "float32")}


def scheduled(kernel: Any, arch: str) -> Any:
    return pipeline.run(kernel.trace(), target(arch))[0]


def body_of(kernel: Any) -> list[Any]:
    """The statements of the one pipelined loop behind the pass, and its annotations."""
    loops: list[Any] = []
    structural_walk(
        manual_stages(kernel.trace()).func.body,
        (tirx.For, lambda s: loops.append(s) if "ts.num_stages" in s.annotations else None),
    )
    (loop,) = loops
    return [loop, *flat(loop.body)]


@pytest.mark.parametrize("arch", ["sm_90a", "sm_80"])
@pytest.mark.parametrize(("words", "depth"), [
    ({"order": [0, 1, 2], "stage": [0, 0, 1]}, 2),
    ({"order": [0, 1, 2], "stage": [0, 0, 2]}, 3),
    ({"order": [1, 0, 2], "stage": [0, 0, 1], "num_stages": 3}, 3),
    ({"order": [1, 2, 0], "stage": [0, 0, 1]}, 2),  # the product in front of the next round's copies
    ({"order": [-1, -1, 0], "stage": [-1, -1, 0], "num_stages": 3}, 3),
    ({"order": [5, 0, 1, 2], "stage": [7, 0, 0, 1]}, 2),  # an entry for the name too
    ({"order": [0, 1], "stage": [0, 1], "group": [[0], [1, 2]], "num_stages": 2}, 0),
])  # fmt: skip
def test_copies_of_an_earlier_stage_run_ahead(words: dict[str, Any], depth: int, arch: str):
    if not depth:  # B's copy is grouped with the product, in its stage: it stays
        words = words | {"group": [[0], [1, 2]]}
    program = scheduled(product(**words), arch)
    rings = program.schedule.rings
    assert all(r.form == (ROLES if arch == "sm_90a" else AHEAD) and r.depth == (depth or 2) for r in rings), (
        program.notes
    )
    assert sorted(b for r in rings for b in r.buffers) == (["a", "b"] if depth else ["a"])
    agree(product(**words), PRODUCT, arch=arch)


def test_copies_are_issued_where_the_order_has_them():
    """On sm_80, where the threads that compute issue them: in front of the product, or behind it."""
    for order, behind in (([0, 1, 2], False), ([1, 2, 0], True)):
        text = print_kernel(Lowering(scheduled(product(order=order, stage=[0, 0, 1]), "sm_80")).run()).text
        loop = text[text.index("cp_async_commit") :]  # behind the first rounds' copies
        assert (loop.index("mma") < loop.index("cp_async<")) == behind, text


def test_statements_of_a_stage_run_in_their_order():
    loop, *stmts = body_of(scaled(order=[1, 0, 2, 4, 3], stage=[0, 0, 1, 1, 1]))
    assert [name_of(s) or type(s).__name__ for s in stmts] == ["copy", "copy", "For", "BufferStore", "For"]
    assert [s.value.args[0].source.name for s in stmts[:2]] == ["B", "A"] and int(
        loop.annotations["ts.num_stages"]
    ) == 2
    for arch in ("sm_90a", "sm_80"):
        agree(scaled(order=[1, 0, 2, 4, 3], stage=[0, 0, 1, 1, 1]), SUMS, arch=arch, exact=True)


@pytest.mark.parametrize("arch", ["sm_90a", "sm_80"])
@pytest.mark.parametrize(
    "words", [{"order": [2, 0, 1], "stage": [0, 2, 2]}, {"order": [9, 0, 1, 2], "stage": [9, 0, 1, 1]}]
)
def test_a_range_with_a_beginning_and_an_allocation_inside(words: dict[str, Any], arch: str):
    """Neither has an entry; the name in front of the copy may."""

    @T.prim_func
    def kernel(
        A: T.Tensor((10, 128), "float32"), at: T.Tensor((10,), "int32"), C: T.Tensor((128,), "float32")
    ):
        with T.Kernel(1, threads=64):
            s = T.alloc_fragment((128,), "float32")
            T.clear(s)
            for k in T.Pipelined(1, 9, **words):
                a = T.alloc_shared((128,), "float32")
                row = at[k]
                T.copy(A[row, 0], a)
                if k > 3:
                    for i in T.Parallel(128):
                        s[i] += a[i] * k
                for i in T.Parallel(128):
                    s[i] += 1
            T.copy(s, C)

    assert [r.form for r in scheduled(kernel, "sm_80").schedule.rings] == [AHEAD]
    where = np.arange(10, dtype=np.int32)[::-1].copy()
    agree(
        kernel,
        {"A": data((10, 128), "float32"), "at": where, "C": empty((128,), "float32")},
        arch=arch,
        exact=True,
    )


def test_one_stage_runs_nothing_ahead():
    kernel = scaled(order=[0, 1, 2, 3, 4], stage=[0] * 5, num_stages=3)
    for arch in ("sm_90a", "sm_80"):
        program = scheduled(kernel, arch)
        assert not program.schedule.rings and "cp_async" not in print_kernel(Lowering(program).run()).text
        agree(kernel, SUMS, arch=arch, exact=True)


def test_one_copy_of_the_latest_stage_stays():
    kernel = scaled(order=[0, 1, 2, 3, 4], stage=[0, 1, 1, 1, 1])
    program = scheduled(kernel, "sm_80")
    assert [r.buffers for r in program.schedule.rings] == [["a"]] and program.schedule.rings[0].form == AHEAD
    agree(kernel, SUMS, arch="sm_80", exact=True)


def test_the_same_on_the_cpu():
    a, b = np.asarray(SUMS["A"]), np.asarray(SUMS["B"])
    s, t = np.zeros(128, np.float32), np.zeros(128, np.float32)
    for k in range(8):
        s = s + a[k]
        t = t + b[k] * s
    for depth in (1, 3):
        got = np.zeros((2, 128), np.float32)
        run(scaled(order=[1, 0, 3, 4, 2], stage=[0, 0, 1, 1, 1]), depth=depth)(a, b, got)
        np.testing.assert_allclose(got, [s + 8, t], rtol=1e-5)


def refuse(kernel: Any, message: str, **more: Any) -> None:
    with refused(TileValueError, message, **more):
        scheduled(kernel, "sm_90a")


def test_orders_that_would_change_results():
    refuse(
        scaled(order=[0, 1, 3, 2, 4], stage=[0, 0, 1, 1, 1]),
        "in front of the loop",
        at="T.Parallel(128)",
        expected="in the order in which it is written",
        write="order=[0, 1, 2, 3, 4], stage=[0, 0, 1, 1, 1]",
    )
    refuse(
        product(order=[0, 2, 1], stage=[0, 0, 0]), "b is written there and read here", at="T.gemm(a, b, c)"
    )

    @T.prim_func
    def behind(A: T.Tensor((8, 128), "float32"), C: T.Tensor((8, 128), "float32")):
        with T.Kernel(1, threads=64):
            a = T.alloc_shared((128,), "float32")
            T.clear(a)
            for k in T.Pipelined(8, order=[0, 1], stage=[1, 0]):
                T.copy(a, C[k, 0])
                T.copy(A[k, 0], a)

    refuse(behind, "a is read there and written here", at="T.copy(A[k, 0], a)")

    @T.prim_func
    def told(A: T.Tensor((8, 128), "float32"), F: T.Signal((8,)), C: T.Tensor((8, 128), "float32")):
        with T.Kernel(1, threads=64):
            c = T.alloc_fragment((128,), "float32")
            for k in T.Pipelined(8, order=[1, 0], stage=[0, 0]):
                T.copy(A[k, 0], c)
                with T.Scale("device"):
                    T.signal(F[k])

    refuse(told, "one of them signals other threads or blocks", at='with T.Scale("device"):')


def test_stages_that_nothing_can_run_ahead_in():
    refuse(
        product(order=[0, 1, 2], stage=[0, 1, 0]),
        "b is written there and read here",
        at="T.gemm(a, b, c)",
        expected="also across rounds",
        write="order=[0, 1, 2], stage=[0, 0, 1]",
    )
    refuse(
        product(order=[0, 1, 2], stage=[0, 1, 2]),
        "in the stages 0, 1",
        at="T.Pipelined(8, **words)",
        expected="one stage for all copies",
    )
    refuse(
        product(order=[0, 1, 2], stage=[0, 0, 3], num_stages=3),
        "3 rounds ahead, and num_stages=3",
        expected="num_stages=4 or more",
    )
    refuse(
        product(order=[0, 1], stage=[0, 1]),
        "have 2 entries for 3 statements",
        expected="an entry for each",
        write="2: T.gemm (line",
    )
    refuse(
        product(order=[0, 1], stage=[0, 1], group=[[0, 1], [1, 2]]),
        "of a loop of 3 statements",
        expected="each statement once",
    )

    @T.prim_func
    def elsewhere(A: T.Tensor((8, 128), "float32"), C: T.Tensor((128,), "float32")):
        with T.Kernel(1, threads=64):
            a, s = T.alloc_shared((128,), "float32"), T.alloc_fragment((128,), "float32")
            T.clear(s)
            for k in T.Pipelined(8, order=[0, 1], stage=[0, 1]):
                T.copy(A[k, 0], a)
                for i in T.Parallel(128):
                    s[i] += a[i]
            for i in T.Parallel(128):
                C[i] = s[i] + a[i]

    refuse(
        elsewhere, "and a is used elsewhere too", at="T.copy(A[k, 0], a)", expected="this copy alone writes"
    )


def test_words_that_are_no_schedule():
    for words, message in (
        ({"order": [0, 1, 2]}, "stage=None"),
        ({"stage": [0, 0, 1]}, "order=None"),
        ({"group": [[0]]}, "order=None"),
        ({"order": [0, 1, 2], "stage": [0, 1]}, "order=[0, 1, 2] and stage=[0, 1]"),
        ({"order": [-1, 0, 1], "stage": [0, 0, 1]}, "order=[-1, 0, 1]"),
        ({"order": [0, 0, 1], "stage": [0, 0, 1]}, "two statements in one place"),
        ({"order": [0, 1, -2], "stage": [0, 0, 1]}, "order=[0, 1, -2]"),
        ({"order": "012", "stage": [0, 0, 1]}, "order='012'"),
        ({"order": [0, 1, 2], "stage": [0, 0, 1], "group": 3}, "group=3"),
        ({"sync": [[0, 1]]}, "sync=[[0, 1]]"),
        ({"num_stages": -1}, "num_stages=-1"),
    ):
        refuse(product(**words), message, at="T.Pipelined(8, **words)")


@pytest.mark.parametrize("arch", ["sm_90a", "sm_80"])
@pytest.mark.parametrize("words", [
    {"order": [1, 0, 2, 4, 3], "stage": [0, 0, 2, 2, 2]}, {"order": [3, 4, 0, 1, 2], "stage": [0, 0, 1, 1, 1], "num_stages": 3},
    {"order": [0, 1, 2, 3, 4], "stage": [0, 1, 1, 1, 1]},
])  # fmt: skip
def test_the_simulator_finds_nothing(words: dict[str, Any], arch: str):
    """The schedule that it becomes leaves the bits of the program as written, and nothing in flight is
    touched."""
    report = check(scaled(**words), 1, SUMS, level="both", seeds=2, arch=arch)
    assert report, report


def attention(order: list[int], stage: list[int], **words: Any) -> Any:
    """0: copy of keys, 1-2: scores, 3-9: softmax, 10: rescaling, 11: copy of values, 12: the second product."""

    @T.prim_func
    def kernel(
        Q: T.Tensor((64, 64), "float16"),
        K: T.Tensor((256, 64), "float16"),
        V: T.Tensor((256, 64), "float16"),
        O: T.Tensor((64, 64), "float32"),
    ):
        with T.Kernel(1, threads=128):
            q, k = T.alloc_shared((64, 64), "float16"), T.alloc_shared((64, 64), "float16")
            v = T.alloc_shared((64, 64), "float16")
            s, o = T.alloc_fragment((64, 64), "float32"), T.alloc_fragment((64, 64), "float32")
            p = T.alloc_fragment((64, 64), "float16")
            top, before = T.alloc_fragment((64,), "float32"), T.alloc_fragment((64,), "float32")
            scale, total = T.alloc_fragment((64,), "float32"), T.alloc_fragment((64,), "float32")
            sums = T.alloc_fragment((64,), "float32")
            T.copy(Q, q)
            T.clear(o)
            T.clear(total)
            T.fill(top, -T.infinity("float32"))
            for n in T.Pipelined(4, order=order, stage=stage, **words):
                T.copy(K[n * 64, 0], k)
                T.clear(s)
                T.gemm(q, k, s, transpose_B=True)
                T.copy(top, before)
                T.reduce_max(s, top, dim=1, clear=False)
                for i in T.Parallel(64):
                    scale[i] = T.exp2(before[i] - top[i])
                for i, j in T.Parallel(64, 64):
                    s[i, j] = T.exp2(s[i, j] - top[i])
                T.reduce_sum(s, sums, dim=1)
                for i in T.Parallel(64):
                    total[i] = total[i] * scale[i] + sums[i]
                T.copy(s, p)
                for i, j in T.Parallel(64, 64):
                    o[i, j] *= scale[i]
                T.copy(V[n * 64, 0], v)
                T.gemm(p, v, o)
            for i, j in T.Parallel(64, 64):
                o[i, j] /= total[i]
            T.copy(o, O)

    return kernel


#: TileLang's schedule of attention
GROUPS = [[0], [1, 2], [3, 4, 5, 6, 7, 8, 9], [10], [11], [12]]
ATTENTION = {
    "Q": data((64, 64), "float16", 1),
    "K": data((256, 64), "float16", 2),
    "V": data((256, 64), "float16", 3),
    "O": empty((64, 64), "float32"),
}
TWO_STAGES = {"order": [-1, 0, 3, 1, -1, 2], "stage": [-1, 0, 0, 1, -1, 1], "group": GROUPS, "num_stages": 2}


@pytest.mark.parametrize("arch", ["sm_90a", "sm_80"])
@pytest.mark.parametrize(
    "words",
    [
        TWO_STAGES,
        TWO_STAGES
        | {"stage": [0, 0, 0, 1, 0, 1], "order": [0, 1, 5, 2, 3, 4]},  # the copies have stages, too
        {
            "order": [0, 2, 1],
            "stage": [0, 0, 1],
            "group": [[0], list(range(1, 10)), [10, 11, 12]],
            "num_stages": 2,
        },
    ],
)
def test_computation_in_two_stages(words: dict[str, Any], arch: str):
    agree(attention(**words), ATTENTION, arch=arch)
    assert scheduled(attention(**words), arch).schedule.rings


def test_computation_in_two_stages_has_the_numbers_of_the_text():
    q, k, v = (np.asarray(ATTENTION[n], dtype=np.float64) for n in "QKV")
    p = np.exp2(q @ k.T - (q @ k.T).max(1, keepdims=True))
    got = np.zeros((64, 64), np.float32)
    run(attention(**TWO_STAGES))(*(np.asarray(ATTENTION[n]) for n in "QKV"), got)
    np.testing.assert_allclose(got, p @ v / p.sum(1, keepdims=True), rtol=2e-2, atol=2e-3)
    report = check(attention(**TWO_STAGES), 1, ATTENTION, level="both", seeds=1, arch="sm_90a")
    assert report, report


def test_two_stages_that_no_tiles_are_there_for():
    refuse(
        attention(**TWO_STAGES | {"order": [-1, 0, 1, 2, -1, 3]}),
        "of the round before: scale is read there and written here",
        at="T.copy(top, before)",
        expected="also across rounds",
    )
    refuse(
        attention(**TWO_STAGES | {"stage": [-1, 1, 0, 1, -1, 1]}),
        "in front of T.fill (line",
        expected="in the order in which it is written",
    )
