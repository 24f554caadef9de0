"""Copies that run ahead by cp.async: what is copied, when it is awaited, what is printed, and what keeps to
turns."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

import tilescale.language as T
from tests.gpu.gemms import gemm
from tests.unit.cuda import emulated
from tests.unit.cuda.emulated import agree, data, empty
from tilescale.compiler import emulator
from tilescale.compiler.cuda import toolchain
from tilescale.compiler.cuda.printer import print_kernel
from tilescale.compiler.layout.shared import bank_conflicts
from tilescale.compiler.passes.schedule import AHEAD
from tilescale.compiler.tvm_compat import EXTERN_CALLS, ir, structural_map, tirx
from tilescale.env import WITHOUT

#: (M, N, K), options, bytes of one copy
CASES = [
    ((64, 64, 128), {"BM": 64, "BN": 64, "BK": 32, "stages": 2}, 16),
    ((70, 72, 200), {"BM": 64, "BN": 64, "BK": 32, "stages": 3}, 16),
    ((72, 40, 136), {"BM": 64, "BN": 64, "BK": 64, "stages": 4, "trans_a": True, "trans_b": True}, 16),
    ((33, 36, 100), {"BM": 32, "BN": 32, "BK": 32, "stages": 3}, 8),
    ((33, 34, 50), {"BM": 32, "BN": 32, "BK": 32, "stages": 3}, 4),
    ((33, 32, 64), {"BM": 32, "BN": 32, "BK": 64, "stages": 4}, 16),  # fewer rounds than stages
    ((33, 36, 100), {"BM": 32, "BN": 32, "BK": 32, "stages": 3, "dtype": "float32"}, 16),
    (
        (33, 36, 100),
        {"BM": 32, "BN": 32, "BK": 32, "stages": 3, "dtype": "float32", "precision": "tf32", "trans_b": True},
        16,
    ),
    (
        (40, 48, 160),
        {"BM": 32, "BN": 32, "BK": 64, "stages": 3, "dtype": "int8", "out": "int32", "trans_b": True},
        16,
    ),
    (
        (40, 48, 160),
        {"BM": 32, "BN": 32, "BK": 64, "stages": 3, "dtype": "float8_e4m3fn", "out": "float32"},
        16,
    ),
    ((40, 48, 160), {"BM": 32, "BN": 32, "BK": 64, "stages": 3, "blocks": 2, "panel": 2}, 16),
]


def lowered(kernel: Any, arch: str = "sm_80") -> tuple[Any, Any]:
    made = emulated.lowered(kernel, arch)
    return made.kernel, made.program


def arguments(M: int, N: int, K: int, options: dict[str, Any]) -> dict[str, Any]:
    dtype = options.get("dtype", "bfloat16")
    a, b = ((K, M) if options.get("trans_a") else (M, K)), ((N, K) if options.get("trans_b") else (K, N))
    return {"A": data(a, dtype, 1), "B": data(b, dtype, 2), "C": empty((M, N), options.get("out", dtype))}


@pytest.mark.parametrize("shape, options, size", CASES, ids=str)
def test_products(shape: tuple[int, int, int], options: dict[str, Any], size: int):
    kernel = gemm(*shape, threads=64, **options)
    made, program = lowered(kernel)
    text = print_kernel(made).text
    assert program.notes == [] and all(
        r.form == AHEAD and r.depth == options["stages"] for r in program.schedule.rings
    )
    assert f"ts::cp_async<{size}>" in text
    agree(kernel, arguments(*shape, options), arch="sm_80")


@pytest.mark.parametrize("n", [0, 1, 2, 7])
def test_rounds_that_only_the_call_says(n: int):
    """A tile of one axis, one read element by element, a tile that shares the ring's memory behind the
    loop."""

    @T.prim_func
    def kernel(A: T.Tensor((7, 256), "float32"), B: T.Tensor((256,), "float32"), n: T.int32):
        with T.Kernel(1, threads=64):
            a, total, turned = (
                T.alloc_shared((256,), "float32"),
                T.alloc_fragment((256,), "float32"),
                T.alloc_shared((768,), "float32"),
            )
            T.clear(total)
            for k in T.Pipelined(n, num_stages=3):
                T.copy(A[k, 0], a)
                for i in T.Parallel(256):
                    total[i] += a[255 - i] * (k + 1)
            for i in T.Parallel(256):
                turned[i * 3] = total[i]
            for i in T.Parallel(256):
                B[i] = turned[(255 - i) * 3]

    made, program = lowered(kernel)
    (ring,) = (b for b in program.arena if b in program.schedule.ring_of)
    assert len({program.arena[b][0] for b in program.arena}) == 1, "they share memory"
    args = {"A": data((7, 256), "float32"), "B": empty((256,), "float32"), "n": n}
    agree(kernel, args, arch="sm_80")


def test_tiles_that_memory_names():
    """Where a tile begins is read from memory; that it begins at a multiple of 64 is known all the same."""

    @T.prim_func
    def kernel(
        A: T.Tensor((512, 32), "float16"), I: T.Tensor((8,), "int32"), B: T.Tensor((4, 64, 32), "float16")
    ):
        with T.Kernel(4, threads=64) as bx:
            a, total = T.alloc_shared((64, 32), "float16"), T.alloc_fragment((64, 32), "float16")
            T.clear(total)
            first = I[bx] * 64
            for k in T.Pipelined(2, num_stages=2):
                T.copy(A[first + k * 64, 0], a)
                for i, j in T.Parallel(64, 32):
                    total[i, j] += a[63 - i, j]
            T.copy(total, B[bx, 0:64, 0:32])

    made, program = lowered(kernel)
    assert "ts::cp_async<16>" in print_kernel(made).text and program.notes == []
    args = {
        "A": data((512, 32), "float16"),
        "I": np.array([3, 0, 6, 1, 0, 0, 0, 0], "int32"),
        "B": empty((4, 64, 32), "float16"),
    }
    agree(kernel, args, arch="sm_80")


@pytest.mark.parametrize("rounds", [1, 2, 5])
def test_readers_among_the_copies(rounds: int):
    """All copies of a round run ahead of all that reads them, also those behind the first reader."""

    @T.prim_func
    def kernel(A: T.Tensor((5, 256), "float32"), B: T.Tensor((256,), "float32")):
        with T.Kernel(1, threads=64):
            a, b = T.alloc_shared((256,), "float32"), T.alloc_shared((256,), "float32")
            total = T.alloc_fragment((256,), "float32")
            T.clear(total)
            for k in T.Pipelined(rounds, num_stages=3):
                T.copy(A[k, 0], a)
                for i in T.Parallel(256):
                    total[i] += a[255 - i] * (k + 1)
                T.copy(A[rounds - 1 - k, 0], b)
                for i in T.Parallel(256):
                    total[i] *= b[i ^ 3]
            T.copy(total, B)

    _, program = lowered(kernel)
    assert [(r.form, r.depth, r.buffers) for r in program.schedule.rings] == [(AHEAD, 3, ["a", "b"])]
    args = {"A": data((5, 256), "float32"), "B": np.full((256,), np.nan, "float32")}
    agree(kernel, args, arch="sm_80")


def test_hopper_does_so_where_tma_cannot():
    made, program = lowered(gemm(100, 100, 100, BM=64, BN=64, threads=128), "sm_90a")
    assert "ts::cp_async<8>" in print_kernel(made).text and any(
        "does without TMA" in n for n in program.notes
    )
    agree(gemm(100, 100, 100, BM=64, BN=64, threads=128), arguments(100, 100, 100, {}))


def test_staged_operands_leave_room_for_fewer_stages():
    """A left operand in registers goes through shared memory, 48 KB of an sm_86 block's 99."""

    @T.prim_func
    def kernel(
        A: T.Tensor((128, 192), "float32"),
        B: T.Tensor((768, 64), "float32"),
        C: T.Tensor((128, 64), "float32"),
    ):
        with T.Kernel(1, threads=128):
            a, b, c = (
                T.alloc_fragment((64, 192), "float32"),
                T.alloc_shared((192, 64), "float32"),
                T.alloc_fragment((64, 64), "float32"),
            )
            T.clear(c)
            for i, j in T.Parallel(64, 192):
                a[i, j] = A[i, j] + A[i + 64, j]
            for k in T.Pipelined(4, num_stages=2):
                T.copy(B[k * 192, 0], b)
                T.gemm(a, b, c)
            T.copy(c, C[0:64, 0:64])

    _, program = lowered(kernel, "sm_86")
    assert any("no room for a second stage" in n for n in program.notes) and program.arena_bytes <= 99 << 10


def test_what_keeps_to_turns_is_said(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv(WITHOUT.name, "spare_stages")
    _, program = lowered(gemm(64, 64, 33, BM=32, BN=32, BK=32, threads=64))
    assert any("copies in turn, not ahead" in n and "4 bytes" in n for n in program.notes), program.notes
    agree(gemm(64, 64, 33, BM=32, BN=32, BK=32, threads=64), arguments(64, 64, 33, {}), arch="sm_80")
    _, program = lowered(gemm(64, 64, 64, BM=32, BN=32, BK=32, stages=1, threads=64))
    assert program.notes == [] and program.schedule.rings[0].depth == 1


def test_threads_write_without_bank_conflicts():
    """Chunks as the threads of a warp copy them, under every swizzle."""
    for cols in (16, 32, 64, 128):
        _, program = lowered(
            gemm(256, 256, 256, BM=64, BN=64, BK=cols, stages=2, threads=64, dtype="float16")
        )
        layout = next(program.layouts[b] for b in program.layouts if b.name == "a" and len(b.ty.shape) == 3)
        chunk = np.arange(32)
        at = layout.byte(np.zeros(32, int), chunk // (cols // 8), chunk % (cols // 8) * 8)
        assert bank_conflicts(at, 16) == 0


# ---- faults


FAULTS: dict[str, Any] = {
    "rounds are not awaited": lambda n: None if n.startswith("ts::cp_async_wait") else n,
    "one round too few is awaited": lambda n: "ts::cp_async_wait<2>" if n == "ts::cp_async_wait<1>" else n,
    "the last rounds are not awaited": lambda n: None if n == "ts::cp_async_wait<0>" else n,
    "nothing is committed": lambda n: None if n == "ts::cp_async_commit" else n,
    "threads do not meet": lambda n: None if n == "__syncthreads" else n,
}


@pytest.mark.parametrize(
    "fault, stages",
    [(f, n) for f in FAULTS for n in (2, 3) if n == 3 or f != "the last rounds are not awaited"],
)
def test_faults_are_found(fault: str, stages: int):
    shape, options = (32, 32, 192), {"BM": 32, "BN": 32, "BK": 32, "stages": stages, "threads": 64}
    made, program = lowered(gemm(*shape, **options))
    args = arguments(*shape, {})
    emulator.run(made, program, args)

    def change(s: Any) -> Any:
        call = s.value
        if not isinstance(call, ir.Call) or call.op.name not in EXTERN_CALLS:
            return s
        name = FAULTS[fault](str(call.args[0].value))
        return (
            tirx.Evaluate(tirx.IntImm("int32", 0))
            if name is None
            else tirx.Evaluate(tirx.call_extern("void", name, *call.args[1:]))
        )

    broken = dataclasses.replace(
        made,
        func=tirx.PrimFunc(list(made.func.params), structural_map(made.func.body, (tirx.Evaluate, change))),
    )
    with pytest.raises(emulator.EmulationError):
        emulator.run(broken, program, args)


def test_the_last_round_of_two_commits_a_group_of_none():
    """So its wait is that of every other round; without that group its copies may be under way behind it."""
    shape, options = (32, 32, 192), {"BM": 32, "BN": 32, "BK": 32, "stages": 2, "threads": 64}
    made, program = lowered(gemm(*shape, **options))
    text = print_kernel(made).text
    assert text.count("ts::cp_async_wait<1>()") == 1 and "ts::cp_async_wait<0>" not in text, text
    under: list[Any] = []

    def last(s: Any) -> Any:
        """The group behind an If is committed under it."""
        stmts = list(s.seq)
        for k, x in enumerate(stmts[1:], 1):
            if (
                "cp_async_commit" in str(x)
                and isinstance(x, tirx.Evaluate)
                and isinstance(stmts[k - 1], tirx.IfThenElse)
            ):
                copies = stmts[k - 1]
                under.append(x)
                both = tirx.IfThenElse(copies.condition, tirx.SeqStmt([copies.then_case, x]), None)
                return tirx.SeqStmt([*stmts[: k - 1], both, *stmts[k + 1 :]])
        return s

    func = tirx.PrimFunc(list(made.func.params), structural_map(made.func.body, (tirx.SeqStmt, last)))
    assert under
    emulator.run(made, program, arguments(*shape, {}))
    with pytest.raises(emulator.EmulationError):
        emulator.run(dataclasses.replace(made, func=func), program, arguments(*shape, {}))


# ---- the machine's


@pytest.mark.skipif(toolchain.find_nvcc() is None, reason="there is no nvcc on this machine")
def test_the_machine_copies_beside_its_products():
    made = toolchain.compile_cubin(
        print_kernel(lowered(gemm(4096, 4096, 4096, BM=128, BN=128, BK=32, stages=3, dtype="float16"))[0]),
        "sm_80",
    )
    sass = toolchain.sass(made.code)
    assert made.resources.spill_stores == 0
    assert all(
        word in sass
        for word in ("LDGSTS.E.BYPASS.128", "LDSM.16.M88.4", "LDSM.16.MT88.4", "HMMA.16816.F32", "LDGDEPBAR")
    )
    assert " LDG.E" not in sass and " STS" not in sass
