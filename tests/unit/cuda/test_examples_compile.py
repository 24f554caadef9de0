"""The examples' kernels on the emulated GPU, and one kernel with every instruction that nvcc has to take."""

from __future__ import annotations

from typing import Any

import pytest

import tilescale.language as T
from tests.unit.cuda.corpus import example
from tests.unit.cuda.emulated import agree, data
from tilescale.compiler.cuda import toolchain
from tilescale.compiler.cuda.lower import Lowering
from tilescale.compiler.cuda.printer import print_kernel
from tilescale.compiler.cuda.targets import target
from tilescale.compiler.passes import pipeline


@pytest.mark.parametrize(
    "name, args, options, shapes",
    [
        ("03_softmax", (9, 70), {}, {"X": (9, 70), "Y": (9, 70)}),
        ("02_gemm", (33, 50), {"BM": 32, "BN": 32, "BK": 16}, {"A": (40, 50), "B": (50, 33), "C": (40, 33)}),
        (
            "04_flash_attention",
            (1, 1, 37, 16),
            {"causal": True, "BM": 16, "BN": 16},
            dict.fromkeys("QKVO", (1, 1, 37, 16)),
        ),
    ],
)
def test_examples_on_the_emulated_gpu(name: str, args: Any, options: Any, shapes: dict[str, Any]):
    agree(
        example(name, args, options),
        {p: data(shape, "float32", k) for k, (p, shape) in enumerate(shapes.items())},
    )


ATOMIC = ("float32", "float64", "float16", "bfloat16", "int32", "int64", "uint32", "uint64")
FOLDED = ("float64", "float16", "int8", "uint8", "int16", "uint16", "int64", "uint64", "float8_e5m2")


def everything() -> Any:
    """One kernel with every atomic update and shuffle, and mma for every pair of dtypes."""

    @T.prim_func
    def kernel(A: T.Tensor((64,), "int32"), B: T.Tensor((64,), "float32")):
        with T.Kernel(1, threads=64):
            for dtype in ATOMIC:
                s, x = T.alloc_shared((64,), dtype), T.alloc_fragment((64,), dtype)
                T.clear(s)
                T.fill(x, 1)
                T.atomic_add(s, x)
                for i in T.Parallel(64):
                    T.atomic_max(s[i], x[i])
                    T.atomic_min(s[i], x[i])
                    T.atomic_store(s[i], x[i])
                    before = T.atomic_load(s[i])
                    B[i] = B[i] + T.cast(before, "float32")
                T.copy(s, A)
            for dtype in FOLDED:
                f, r = T.alloc_fragment((64,), dtype), T.alloc_fragment((1,), dtype)
                T.copy(A, f)
                T.reduce_max(f, r)
                T.reduce_sum(f, r, clear=False)
                T.atomic_add(A[0], T.cast(r[0], "int32"))
            for left, right, to in (
                ("int8", "int8", "int32"),
                ("uint8", "int8", "int32"),
                ("int8", "uint8", "int32"),
                ("uint8", "uint8", "int32"),
                ("bfloat16", "bfloat16", "float32"),
                ("float16", "float16", "float16"),
            ):
                a, b, c = (
                    T.alloc_shared((16, 32), left),
                    T.alloc_shared((32, 16), right),
                    T.alloc_fragment((16, 16), to),
                )
                T.clear(a)
                T.clear(b)
                T.gemm(a, b, c, clear_accum=True)
                T.gemm(b, a, T.alloc_fragment((32, 32), to), clear_accum=True) if left == right else None
                T.atomic_add(A[1], T.cast(c[0, 0], "int32"))

    return kernel


@pytest.mark.skipif(toolchain.find_nvcc() is None, reason="there is no nvcc on this machine")
@pytest.mark.parametrize("arch", ["sm_90a", "sm_75"])
def test_every_instruction_compiles(arch: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TILESCALE_CUDA_COMPILER", "nvcc")
    program, _ = pipeline.run(everything().trace(), target(arch))
    text = print_kernel(Lowering(program).run())
    assert ("mma_m16n8k32_u8_s8" in text.text) == (arch == "sm_90a") and "publishing_add" in text.text
    assert toolchain.compile_cubin(text, arch).code
