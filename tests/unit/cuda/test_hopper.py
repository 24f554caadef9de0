"""Hopper's GEMM without a GPU: the CUDA text, the machine's resources, and the emulated block, whose engines
deliver as late as they may."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

import tilescale.language as T
from tests.gpu.gemms import gemm
from tests.unit.cuda import emulated
from tests.unit.cuda.emulated import agree, data, empty
from tilescale.compiler import emulator
from tilescale.compiler.cuda import toolchain
from tilescale.compiler.cuda.printer import print_kernel
from tilescale.compiler.cuda.targets import target
from tilescale.compiler.gpu.kernel import ThreadKernel
from tilescale.compiler.passes import pipeline
from tilescale.compiler.tvm_compat import EXTERN_CALLS, ir, structural_map, structural_walk, tirx

GOLDEN = Path(__file__).with_name("hopper_gemm.txt")
#: (M, N, K), options, seed of the schedule: even ones deliver copies as late as they may
CASES = [
    ((130, 136, 136), {"BM": 128, "BN": 128, "stages": 3}, 0),
    ((130, 136, 136), {"BM": 128, "BN": 128, "stages": 3, "trans_b": True, "dtype": "float16"}, 1),
    (
        (136, 136, 200),
        {"BM": 128, "BN": 128, "stages": 2, "trans_a": True, "threads": 128, "out": "float32"},
        2,
    ),
    ((64, 136, 200), {"BM": 64, "BN": 128, "stages": 2, "trans_a": True, "trans_b": True}, 3),
    ((1, 264, 200), {"BM": 128, "BN": 256, "stages": 4}, 4),
    ((100, 96, 200), {"BM": 128, "BN": 96, "BK": 32, "stages": 4}, 5),
    ((100, 72, 200), {"BM": 128, "BN": 64, "stages": 1}, 7),
    (
        (130, 136, 208),
        {
            "BM": 128,
            "BN": 128,
            "BK": 128,
            "stages": 2,
            "trans_b": True,
            "dtype": "float8_e4m3fn",
            "right": "float8_e5m2",
            "out": "float32",
        },
        0,
    ),
    (
        (130, 136, 208),
        {
            "BM": 128,
            "BN": 128,
            "BK": 64,
            "stages": 3,
            "trans_b": True,
            "dtype": "float8_e5m2",
            "out": "bfloat16",
        },
        1,
    ),
    (
        (130, 136, 208),
        {"BM": 128, "BN": 128, "BK": 128, "stages": 2, "trans_b": True, "dtype": "int8", "out": "int32"},
        2,
    ),
    (
        (70, 136, 208),
        {
            "BM": 64,
            "BN": 96,
            "BK": 64,
            "stages": 3,
            "trans_b": True,
            "dtype": "uint8",
            "right": "int8",
            "out": "int32",
            "threads": 128,
        },
        3,
    ),
    (
        (70, 136, 100),
        {
            "BM": 64,
            "BN": 128,
            "BK": 32,
            "stages": 3,
            "trans_b": True,
            "dtype": "float32",
            "precision": "tf32",
        },
        3,
    ),
    ((200, 40, 264), {"BM": 192, "BN": 48, "BK": 128, "stages": 3, "threads": 384}, 6),
    ((200, 264, 136), {"BM": 192, "BN": 256, "BK": 64, "stages": 2, "threads": 384}, 7),
    (
        (70, 250, 144),
        {
            "BM": 192,
            "BN": 240,
            "BK": 64,
            "stages": 2,
            "threads": 384,
            "trans_b": True,
            "dtype": "int8",
            "out": "int32",
        },
        8,
    ),
]


def lowered(kernel: Any) -> tuple[ThreadKernel, Any]:
    made = emulated.lowered(kernel)
    return made.kernel, made.program


def arguments(M: int, N: int, K: int, options: dict[str, Any]) -> dict[str, Any]:
    dtype = options.get("dtype", "bfloat16")
    a, b = ((K, M) if options.get("trans_a") else (M, K)), ((N, K) if options.get("trans_b") else (K, N))
    return {
        "A": data(a, dtype, 1),
        "B": data(b, options.get("right", dtype), 2),
        "C": empty((M, N), options.get("out", dtype)),
    }


#: clusters, with the copies that each stage's tiles take, (plain, multicast), and the blocks that must have
#: read a stage
CLUSTERS = [
    ((200, 264, 200), {"BM": 128, "BN": 128, "stages": 3, "cluster": (1, 2)}, (1, 1), 2, 0),
    (
        (250, 200, 136),
        {"BM": 128, "BN": 128, "stages": 2, "cluster": (1, 2), "trans_b": True, "dtype": "float16"},
        (1, 1),
        2,
        1,
    ),
    (
        (64, 256, 328),
        {"BM": 64, "BN": 128, "stages": 3, "cluster": 2, "trans_a": True, "threads": 128},
        (2, 1),
        2,
        2,
    ),
    ((128, 256, 200), {"BM": 64, "BN": 128, "stages": 2, "cluster": (2, 2), "threads": 128}, (0, 2), 4, 3),
    ((512, 136, 64), {"BM": 128, "BN": 64, "stages": 4, "cluster": (1, 4), "panel": 4}, (1, 1), 4, 4),
    (
        (500, 384, 72),
        {"BM": 128, "BN": 64, "stages": 4, "cluster": (3, 2), "panel": 2, "trans_b": True},
        (1, 1),
        2,
        5,
    ),
]


@pytest.mark.parametrize("shape, options, copies, blocks, seed", CLUSTERS, ids=str)
def test_a_cluster_shares_what_its_blocks_copy_alike(
    shape: tuple[int, int, int], options: dict[str, Any], copies: tuple[int, int], blocks: int, seed: int
):
    kernel = gemm(*shape, **options)
    text = print_kernel(lowered(kernel)[0]).text
    assert (text.count("ts::tma_load("), text.count("ts::tma_load_multicast(")) == copies
    assert f"ts::mbarrier_init(&empty0[s], {options.get('threads', 256) // 32 * blocks});" in text
    agree(kernel, arguments(*shape, options), seed=seed)


@pytest.mark.parametrize("shape, options, seed", CASES, ids=str)
def test_products(shape: tuple[int, int, int], options: dict[str, Any], seed: int):
    kernel = gemm(*shape, **options)
    made, program = lowered(kernel)
    assert program.notes == [] and len(made.maps) in (2, 3) and made.threads > program.launch.threads
    agree(kernel, arguments(*shape, options), seed=seed)


@pytest.mark.parametrize("seed", [0, 1])
def test_a_persistent_kernel_keeps_its_ring(seed: int):
    """The counters live across tiles, the producer runs ahead of the epilogue."""
    options = {"BM": 64, "BN": 64, "threads": 128, "stages": 3, "blocks": 2, "panel": 2, "out": "float32"}
    assert "ts::tma_load" in print_kernel(lowered(gemm(200, 136, 200, **options))[0]).text
    agree(gemm(200, 136, 200, **options), arguments(200, 136, 200, options), seed=seed)


@pytest.mark.parametrize("seed", [0, 1])
def test_persistent_clusters_share(seed: int):
    options = {"BM": 64, "BN": 64, "threads": 128, "stages": 3, "blocks": 4, "panel": 4, "cluster": 2}
    text = print_kernel(lowered(gemm(300, 136, 200, **options))[0]).text
    assert (text.count("ts::tma_load("), text.count("ts::tma_load_multicast(")) == (1, 1)
    agree(gemm(300, 136, 200, **options), arguments(300, 136, 200, options), seed=seed)


@pytest.mark.parametrize(
    "options", [{}, {"blocks": 2}, {"BN": 128, "threads": 256, "trans_b": True}, {"cluster": 2}], ids=str
)
@pytest.mark.parametrize("K, arch", [(0, "sm_90a"), (72, "sm_90a"), (0, "sm_80")])
def test_a_loop_without_rounds(K: int, arch: str, options: dict[str, Any]):
    """Both roles go by it, products of a tile in front and behind stay what they are, and what the block had
    is stored."""
    options = {"BM": 64, "BN": 64, "BK": 32, "stages": 3, "threads": 128, "out": "float32"} | options
    args = arguments(128, 128, K, options)
    kernel = gemm(128, 128, T.dynamic("k", multiple_of=8), **options)
    assert "ts::wgmma_m64" in print_kernel(lowered(kernel)[0]).text
    got = agree(kernel, args, arch=arch)
    assert K or not got["C"].any()


ROWS = T.dynamic("rows")


@T.prim_func
def summed(A: T.Tensor((ROWS, 64), "float16"), C: T.Tensor((64, 64), "float32"), n: T.int32):
    with T.Kernel(1, threads=128):
        a, c = T.alloc_shared((32, 64), "float16"), T.alloc_fragment((64, 64), "float32")
        T.fill(c, 1)
        for k in T.Pipelined(n, num_stages=2):
            T.copy(A[k * 32, 0], a)
            T.gemm(a, a, c, transpose_A=True)
        T.copy(c, C)


def test_rounds_over_an_empty_tensor():
    for n in (0, 3):
        assert (
            agree(summed, {"A": data((0, 64), "float16"), "C": empty((64, 64), "float32"), "n": n})["C"] == 1
        ).all()


@pytest.mark.parametrize("panel, order", [(2, "row"), (3, "column"), (8, "row")])
def test_panels_reach_every_block(panel: int, order: str):
    m = T.dynamic("m")

    @T.prim_func
    def kernel(A: T.Tensor((m, 100), "int32")):
        with T.Kernel(T.ceildiv(100, 16), T.ceildiv(m, 4), threads=32) as (bx, by):
            T.use_swizzle(panel, order)
            for i, j in T.Parallel(4, 16):
                A[by * 4 + i, bx * 16 + j] += by * 1000 + bx + 1

    agree(kernel, {"A": empty((30, 100), "int32")})


@T.prim_func
def by_turns(
    A: T.Tensor((128, 128), "bfloat16"),
    X: T.Tensor((128, 128), "bfloat16"),
    W: T.Tensor((128, 64), "bfloat16"),
    C: T.Tensor((128, 64), "float32"),
    n: T.int32,
):
    with T.Kernel(2, threads=128) as b:
        a, w = T.alloc_shared((64, 32), "bfloat16"), T.alloc_shared((32, 64), "bfloat16")
        acc = T.alloc_fragment((64, 64), "float32")
        T.clear(acc)
        for k in T.Pipelined(4, num_stages=2):
            if b < n:
                T.copy(A[b * 64, k * 32], a)
                T.copy(W[k * 32, 0], w)
            else:
                T.copy(X[b * 64, k * 32], a)
                T.copy(W[96 - k * 32, 0], w)
            T.gemm(a, w, acc)
        T.copy(acc, C[b * 64, 0])


def test_branches_that_fill_several_tiles():
    """One of two copies for each of them: rings, as if each stood in branches of its own."""
    made, program = lowered(by_turns)
    assert program.notes == [] and "ts::wgmma_m64" in print_kernel(made).text
    A, X, W = (data(shape, "bfloat16") for shape in ((128, 128), (128, 128), (128, 64)))
    for n in (0, 1, 2):
        agree(by_turns, {"A": A, "X": X, "W": W, "C": empty((128, 64), "float32"), "n": n})


def test_two_products_of_one_ring():
    """Both are awaited one round late, as two groups; and a statement between them means that each is awaited
    at once."""
    shape, half = (64, 128), (64, 64)

    def kernel(between: bool) -> Any:
        @T.prim_func
        def both(
            A: T.Tensor((64, 328), "float16"),
            B: T.Tensor((328, 64), "float16"),
            C: T.Tensor(shape, "float32"),
            n: T.int32,
        ):
            with T.Kernel(1, threads=128):
                a, b = T.alloc_shared(half, "float16"), T.alloc_shared(half, "float16")
                x, y = T.alloc_fragment(half, "float32"), T.alloc_fragment(half, "float32")
                T.clear(x)
                T.clear(y)
                for k in T.Pipelined(n, num_stages=4):
                    T.copy(A[0, k * 64], a)
                    T.copy(B[k * 64, 0], b)
                    T.gemm(a, b, x)
                    if between:
                        for i, j in T.Parallel(64, 64):
                            x[i, j] = x[i, j] * 0.5
                    T.gemm(a, b, y, transpose_A=True)
                T.copy(x, C[0:64, 0:64])
                T.copy(y, C[0:64, 64:128])

        return both

    args = {
        "A": data((64, 328), "float16", 1),
        "B": data((328, 64), "float16", 2),
        "C": empty(shape, "float32"),
    }
    for between, n, wait in (
        (False, 6, "ts::wgmma_wait<2>"),
        (False, 0, "ts::wgmma_wait<2>"),
        (True, 6, "ts::wgmma_wait<0>"),
    ):
        text = print_kernel(lowered(kernel(between))[0]).text
        assert wait in text and "ts::tma_load" in text
        agree(kernel(between), {**args, "n": n}, seed=n)


@pytest.mark.parametrize("K", [64, 400])
@pytest.mark.parametrize("seed", [0, 1])
def test_sums_that_are_scaled_block_by_block(K: int, seed: int):
    """Each block of k in a fragment of its own, warpgroups in turn; the stage is released when it has been
    multiplied."""
    M, N, steps = 130, 136, -(-K // 128)

    @T.prim_func
    def kernel(
        A: T.Tensor((M, K), "float8_e4m3fn"),
        B: T.Tensor((N, K), "float8_e4m3fn"),
        S: T.Tensor((M, steps), "float32"),
        C: T.Tensor((M, N), "float32"),
    ):
        with T.Kernel(T.ceildiv(N, 128), T.ceildiv(M, 128), threads=256) as (bx, by):
            a, b = T.alloc_shared((128, 128), "float8_e4m3fn"), T.alloc_shared((128, 128), "float8_e4m3fn")
            acc, part, row = (
                T.alloc_fragment((128, 128), "float32"),
                T.alloc_fragment((128, 128), "float32"),
                T.alloc_fragment((128,), "float32"),
            )
            T.clear(acc)
            for k in T.Pipelined(steps, num_stages=3):
                for i in T.Parallel(128):
                    row[i] = S[by * 128 + i, k]
                T.copy(A[by * 128, k * 128], a)
                T.copy(B[bx * 128, k * 128], b)
                T.gemm(a, b, part, transpose_B=True, clear_accum=True)
                for i, j in T.Parallel(128, 128):
                    acc[i, j] += part[i, j] * row[i]
            T.copy(acc, C[by * 128, bx * 128])

    made, program = lowered(kernel)
    text = print_kernel(made).text
    assert program.notes == [] and text.index("barrier_arrive(((warpgroup") > text.index("ts::wgmma_commit()")
    assert text.index("ts::mbarrier_arrive_warp") < text.index("acc[u0 * 4 + u1 * 2 + u2] + part")
    f8 = "float8_e4m3fn"
    agree(
        kernel,
        {
            "A": data((M, K), f8, 1),
            "B": data((N, K), f8, 2),
            "S": data((M, steps), "float32", 3),
            "C": empty((M, N), "float32"),
        },
        seed=seed,
    )


# ---- faults


def edited(kernel: ThreadKernel, edit: Any) -> ThreadKernel:
    """The kernel with instructions changed: ``edit(name, arguments)`` gives (name, arguments), None to take
    it out, or Ellipsis."""
    import dataclasses

    count = [0]

    def change(s: Any) -> Any:
        call = s.value
        if not isinstance(call, ir.Call) or call.op.name not in EXTERN_CALLS:
            return s
        made = edit(str(call.args[0].value), list(call.args[1:]))
        if made is ...:
            return s
        count[0] += 1
        return (
            tirx.Evaluate(tirx.IntImm("int32", 0))
            if made is None
            else tirx.Evaluate(tirx.call_extern("void", made[0], *made[1]))
        )

    body = structural_map(kernel.func.body, (tirx.Evaluate, change))
    assert count[0], "nothing was changed"
    return dataclasses.replace(kernel, func=tirx.PrimFunc(list(kernel.func.params), body))


def _named(a: Any) -> str:
    return a.args[0].source.name if isinstance(a, ir.Call) and a.op.name == "tirx.address_of" else ""


def _empty(n: str, a: Any, what: str) -> bool:
    return n.startswith(what) and _named(a[0]) == "empty0"


#: faults of clusters; the emulated blocks of one take turns. Those of single blocks: test_seeded_threads.py
IN_CLUSTERS: dict[str, Any] = {
    "the blocks do not meet behind their barriers": lambda n, a: None if n == "ts::cluster_begins" else ...,
    "stages are released in the own block alone": lambda n, a: (
        ("ts::mbarrier_arrive_warp", [a[0], a[2]]) if n.startswith("ts::mbarrier_arrive_blocks") else ...
    ),
    "only one block's consumers are counted": lambda n, a: (
        (n, [a[0], 8]) if _empty(n, a, "ts::mbarrier_init") else ...
    ),
    "a copy goes to the own block alone": lambda n, a: (
        ("ts::tma_load", [*a[:3], *a[4:]]) if n == "ts::tma_load_multicast" else ...
    ),
    "the other block's producer is not awaited": lambda n, a: (
        None if _empty(n, a, "ts::mbarrier_wait") else ...
    ),
    "the last releases are not awaited": lambda n, a: (
        None if _empty(n, a, "ts::mbarrier_wait") and "s" in [v.name for v in variables(a[1])] else ...
    ),
}


def variables(e: Any) -> list[Any]:
    found: list[Any] = []
    structural_walk(e, (ir.Var, found.append))
    return found


@pytest.mark.parametrize("fault", IN_CLUSTERS)
def test_faults_of_clusters_are_found(fault: str):
    _found(
        IN_CLUSTERS[fault],
        (256, 64, 520),
        {"BM": 128, "BN": 64, "stages": 3, "out": "float32", "cluster": (1, 2)},
    )


def _found(fault: Any, shape: tuple[int, int, int], options: dict[str, Any]) -> None:
    made, program = lowered(gemm(*shape, **options))
    args = arguments(*shape, options)
    right = emulator.run(made, program, args)["C"]
    broken = edited(made, fault)
    for seed in range(12):
        try:
            got = emulator.run(broken, program, args, seed)["C"]
        except emulator.EmulationError:
            return
        if not (got == right).all():
            return
    pytest.fail("no schedule shows it")


# ---- the text


def test_the_text():
    """The kernel as a person reads it, without the comments that name lines, and their numbers in the
    others."""
    text = re.sub(r", line \d+", "", print_kernel(lowered(gemm(8192, 7168, 8192))[0]).text)
    kept = [
        line.rstrip()
        for line in text[text.index('extern "C"') :].splitlines()
        if not re.match(r"\s*// gemms\.py", line)
    ]
    numbers = re.compile(r", line \d+")  # of tests/gpu/gemms.py, in the barriers' comments
    assert numbers.sub("", "\n".join(kept) + "\n") == numbers.sub("", GOLDEN.read_text())


@pytest.mark.skipif(toolchain.find_nvcc() is None, reason="there is no nvcc on this machine")
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"trans_b": True},
        {"BM": 128, "BN": 128, "threads": 128},
        {"K": T.dynamic("k")},
        {"blocks": 132},
        {"K": T.dynamic("k"), "blocks": 132},
        {"trans_b": True, "dtype": "float8_e4m3fn", "BK": 128, "out": "bfloat16"},
        {"trans_b": True, "dtype": "int8", "BK": 128, "out": "int32"},
        {"trans_b": True, "dtype": "float32", "BK": 32, "precision": "tf32"},
    ],
    ids=str,
)
def test_products_stay_in_flight(options: dict[str, Any]):
    """No spills, and nothing that makes the machine await each product (ptxas' warning C7514)."""
    made = toolchain.compile_cubin(
        print_kernel(
            lowered(gemm(**{"M": 4096, "N": 4096, "K": 4096, "trans_a": "K" in options, **options}))[0]
        ),
        "sm_90a",
    )
    assert made.resources.spill_stores == 0 and made.resources.stack == 0
    assert not made.serialised, made.messages


def test_stages_that_do_not_fit_are_said():
    made, program = lowered(gemm(512, 512, 512, stages=9))
    assert [n for n in program.notes if "has 4 stages where 9 were asked for" in n], program.notes
    assert "(ring0_filled & 3)" in print_kernel(made).text


# ---- what keeps to one role


def test_what_tma_cannot_do_is_said():
    program = pipeline.run(gemm(100, 100, 100).trace(), target("sm_90a"))[0]
    assert any("without TMA" in note and "16 bytes" in note for note in program.notes), program.notes
    agree(gemm(100, 100, 100, BM=64, BN=64, threads=128), arguments(100, 100, 100, {}))
    program = pipeline.run(gemm(128, 128, 128, dtype="float32").trace(), target("sm_90a"))[0]
    assert any("T.gemm of float32" in note for note in program.notes)
    assert pipeline.run(gemm(128, 128, 128).trace(), target("sm_80"))[0].notes == []


@pytest.mark.parametrize(
    "dtype, sums", [("float8_e4m3fn", "float32"), ("int8", "int32"), ("bfloat16", "float32")]
)
def test_a_left_operand_that_is_read_once_for_two_products(dtype: str, sums: str):
    """A stage's rows go to registers, from which products of both halves of the columns take them."""

    @T.prim_func
    def kernel(A: T.Tensor((130, 208), dtype), B: T.Tensor((136, 208), dtype), C: T.Tensor((130, 136), sums)):
        with T.Kernel(T.ceildiv(136, 64), T.ceildiv(130, 64), threads=128) as (bx, by):
            a, b = T.alloc_shared((64, 64), dtype), T.alloc_shared((64, 64), dtype)
            rows, acc = (
                T.alloc_fragment((64, 64), dtype),
                [T.alloc_fragment((64, 32), sums) for _ in range(2)],
            )
            for h in range(2):
                T.clear(acc[h])
            for k in T.Pipelined(T.ceildiv(208, 64), num_stages=2):
                T.copy(A[by * 64, k * 64], a)
                T.copy(B[bx * 64, k * 64], b)
                T.copy(a, rows)
                for h in range(2):
                    T.gemm(rows, b[h * 32 : (h + 1) * 32, 0:64], acc[h], transpose_B=True)
            for h in range(2):
                T.copy(acc[h], C[by * 64, bx * 64 + h * 32])

    made, program = lowered(kernel)
    assert program.notes == [] and "_r0(" in print_kernel(made).text
    for seed in (0, 1):
        agree(
            kernel,
            {"A": data((130, 208), dtype, 1), "B": data((136, 208), dtype, 2), "C": empty((130, 136), sums)},
            seed=seed,
        )


@pytest.mark.parametrize(
    "options, threads",
    [
        ({"BM": 64, "BN": 128, "BK": 32, "stages": 3}, 256 + 32),
        ({"BM": 64, "BN": 128, "BK": 128, "stages": 4}, 256 + 128),  # shared memory has room for one
        ({"BM": 128, "BN": 128, "BK": 32, "stages": 3}, 256 + 128),  # 64 registers of sums alone
    ],
)
def test_blocks_with_little_in_registers_leave_room_for_others(options: dict[str, Any], threads: int):
    """A second block of a multiprocessor has no place where registers moved to the consumers of the first."""
    code = print_kernel(lowered(gemm(256, 256, 256, **options))[0]).text
    assert f"__launch_bounds__({threads}, 1)" in code, code
    assert ("more_registers" in code) == (threads > 300), code


def test_another_name_of_sums_takes_no_registers_more():
    """32 registers of sums under two names, 16 of factors and two of results leave room for a second block."""

    @T.prim_func
    def scores(
        Q: T.Tensor((64, 128), "bfloat16"),
        K: T.Tensor((256, 128), "bfloat16"),
        W: T.Tensor((1, 64), "float32"),
        L: T.Tensor((256,), "float32"),
    ):
        with T.Kernel(1, threads=256):
            q, k = T.alloc_shared((64, 128), "bfloat16"), T.alloc_shared((64, 128), "bfloat16")
            s, w = T.alloc_fragment((64, 64), "float32"), T.alloc_fragment((1, 64), "float32")
            groups, total = T.reshape(s, (64, 1, 64)), T.alloc_fragment((64, 1), "float32")
            T.copy(Q, q)
            T.copy(W, w)
            for n in T.Pipelined(4, num_stages=1):
                T.copy(K[n * 64, 0], k)
                T.gemm(k, q, s, transpose_B=True, clear_accum=True, policy=T.GemmWarpPolicy.FullRow)
                for i, g, h in T.Parallel(64, 1, 64):
                    groups[i, g, h] = T.max(groups[i, g, h], 0) * w[g, h]
                T.reduce_sum(groups, total, dim=-1)
                for i in T.Parallel(64):
                    L[n * 64 + i] = total[i, 0]

    code = print_kernel(lowered(scores)[0]).text
    assert "wgmma" in code and "__launch_bounds__(288, 1)" in code and "more_registers" not in code, code
    args = {
        "Q": data((64, 128), "bfloat16"),
        "K": data((256, 128), "bfloat16", 1),
        "W": data((1, 64), "float32"),
    }
    agree(scores, {**args, "L": empty((256,), "float32")})


@pytest.mark.parametrize("sums, blocks", [(1, 1), (3, 3)])
def test_a_producer_costs_no_block_of_one_warpgroup(sums: int, blocks: int):
    """96 registers of sums: ptxas is told that three blocks of 160 threads shall fit, which takes 136 at
    most; with 32 it needs not be told."""

    @T.prim_func
    def products(
        A: T.Tensor((64, 256), "bfloat16"),
        B: T.Tensor((64, 256), "bfloat16"),
        C: T.Tensor((3, 64, 64), "float32"),
    ):
        with T.Kernel(1, threads=128):
            a, b = T.alloc_shared((64, 64), "bfloat16"), T.alloc_shared((64, 64), "bfloat16")
            tiles = [T.alloc_fragment((64, 64), "float32") for _ in range(sums)]
            for c in tiles:
                T.clear(c)
            for k in T.Pipelined(4, num_stages=2):
                T.copy(A[0, k * 64], a)
                T.copy(B[0, k * 64], b)
                for c in tiles:
                    T.gemm(a, b, c, transpose_B=True)
            for n in range(sums):
                T.copy(tiles[n], C[n, 0, 0])

    code = print_kernel(lowered(products)[0]).text
    assert f"__launch_bounds__(160, {blocks})" in code, code
