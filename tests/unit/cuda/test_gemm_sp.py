"""T.gemm_sp: on the simulator against plain products, on the CPU and on emulated threads against the
simulator; what nvcc makes of it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import tilescale
import tilescale.language as T
from tests.gpu.gemms import sparse_gemm, sparse_operand
from tests.kernels import refused
from tests.unit.cuda import sass
from tests.unit.cuda.emulated import agree, data, empty, lowered
from tilescale.compiler.checks.run import check, launch
from tilescale.compiler.cuda import toolchain
from tilescale.compiler.cuda.lower import Lowering
from tilescale.compiler.cuda.printer import print_kernel
from tilescale.compiler.cuda.targets import target
from tilescale.compiler.passes import pipeline
from tilescale.compiler.sim import numerics
from tilescale.errors import TileTypeError, TileValueError

#: (M, N, K), options
CASES: list[tuple[tuple[int, int, int], dict[str, Any]]] = [
    ((64, 64, 128), {}),
    ((70, 72, 192), {"places": "uint8", "dtype": "bfloat16", "trans_b": True, "threads": 128}),
    ((64, 40, 128), {"places": "int32", "trans_a": True, "stages": 2}),
    ((64, 48, 128), {"out": "float16", "places": "uint16", "stages": 1}),
    ((64, 48, 128), {"dtype": "int8", "out": "int32"}),
    ((64, 48, 128), {"dtype": "float8_e4m3fn", "trans_b": True, "out": "float32"}),
    ((16, 24, 64), {"dtype": "float32", "out": "float32", "BM": 16, "BN": 32}),
]

#: (M, N, K), options: by wgmma.sp, whatever E's dtype
HOPPER: list[tuple[tuple[int, int, int], dict[str, Any]]] = [
    ((128, 128, 256), {"BM": 128, "BN": 128, "BK": 128, "threads": 256}),
    (
        (72, 72, 384),
        {
            "BK": 128,
            "threads": 128,
            "dtype": "bfloat16",
            "places": "uint8",
            "trans_b": True,
            "out": "bfloat16",
            "sums": "float32",
        },
    ),
    ((64, 64, 256), {"BK": 128, "threads": 128, "places": "int32", "trans_a": True, "stages": 2}),
    ((64, 64, 512), {"BK": 256, "threads": 128, "places": "uint16", "stages": 2}),
    ((256, 64, 512), {"BM": 256, "BK": 128, "threads": 256, "places": "uint8"}),
    (
        (128, 64, 256),
        {"BM": 128, "BK": 128, "threads": 128, "dtype": "float8_e4m3fn", "trans_b": True, "places": "int32"},
    ),
    (
        (64, 64, 256),
        {
            "BK": 128,
            "threads": 128,
            "dtype": "float8_e5m2",
            "right": "float8_e4m3fn",
            "trans_b": True,
            "places": "uint8",
        },
    ),
    (
        (64, 64, 256),
        {"BK": 128, "threads": 128, "dtype": "int8", "trans_b": True, "places": "int16", "out": "int32"},
    ),
    (
        (64, 64, 256),
        {
            "BK": 128,
            "threads": 128,
            "dtype": "uint8",
            "right": "int8",
            "trans_b": True,
            "places": "uint32",
            "out": "int32",
        },
    ),
    ((128, 64, 256), {"BK": 128, "threads": 128, "trans_b": True, "cluster": (1, 2)}),
    ((200, 128, 256), {"BK": 128, "threads": 128, "trans_b": True, "blocks": 2, "cluster": 2, "panel": 2}),
]


def arguments(shape: tuple[int, int, int], options: dict[str, Any]) -> tuple[dict[str, Any], Any]:
    """The kernel's, and A as a whole."""
    M, N, K = shape
    dtype = options.get("dtype", "float16")
    whole, kept, places = sparse_operand(M, K, dtype, options.get("places", "int16"))
    b = data((N, K) if options.get("trans_b") else (K, N), options.get("right", dtype), 2)
    kept = np.ascontiguousarray(kept.T) if options.get("trans_a") else kept
    return {"A": kept, "E": places, "B": b, "C": empty((M, N), options.get("out", "float32"))}, whole


@pytest.mark.parametrize("shape, options", CASES, ids=str)
def test_meaning(shape: tuple[int, int, int], options: dict[str, Any]):
    args, whole = arguments(shape, options)
    kernel = sparse_gemm(*shape, **options)
    got = launch(kernel, 1, args).arrays[0]["C"]
    b = numerics.decode(args["B"], str(args["B"].dtype)).astype(np.float64)
    want = numerics.decode(whole, str(whole.dtype)).astype(np.float64) @ (
        b.T if options.get("trans_b") else b
    )
    np.testing.assert_allclose(got.astype(np.float64), want, rtol=2e-3, atol=2e-2)
    for arch in ("sm_80", "sm_90a"):
        agree(kernel, args, arch=arch)


@pytest.mark.parametrize("shape, options", HOPPER, ids=str)
def test_on_hopper(shape: tuple[int, int, int], options: dict[str, Any]):
    """On emulated threads, which have the places of each instruction as PTX defines them, and the schedule on
    the simulator."""
    args, whole = arguments(shape, options)
    kernel = sparse_gemm(*shape, **options)
    made = lowered(kernel)
    program, text = made.program, print_kernel(made.kernel).text
    assert not program.notes or program.notes[0].startswith(f"{program.name} has ")
    assert "ts::wgmma_sp_m64" in text and "E_map" in text
    b = numerics.decode(args["B"], str(args["B"].dtype)).astype(np.float64)
    want = numerics.decode(whole, str(whole.dtype)).astype(np.float64) @ (
        b.T if options.get("trans_b") else b
    )
    for seed in range(2):
        got = agree(kernel, args, seed=seed)["C"]
        np.testing.assert_allclose(
            got.astype(np.float64), want, rtol=2e-3 if options.get("out") != "bfloat16" else 1e-2, atol=2e-2
        )
    found = check(kernel, 1, args, arch="sm_90a")
    assert not found.findings, found


@pytest.mark.parametrize("case", [0, 2, 4], ids=str)
def test_on_the_cpu(case: int):
    shape, options = CASES[case]
    args, _ = arguments(shape, options)
    kernel = sparse_gemm(*shape, **options)
    want = launch(kernel, 1, args).arrays[0]["C"]
    tilescale.compile(kernel, target="cpu")(*args.values())
    np.testing.assert_allclose(args["C"].astype(np.float64), want.astype(np.float64), rtol=1e-5, atol=1e-5)


def test_the_tensor_cores_do_it():
    for arch in ("sm_80", "sm_90a"):
        program, _ = pipeline.run(
            sparse_gemm(1024, 1024, 1024, BM=128, BN=128, BK=64, threads=128).trace(), target(arch)
        )
        printed = print_kernel(Lowering(program).run())
        assert "ts::mma_sp_m16n8k32_f16" in printed.text and "ts::cp_async<16>" in printed.text
        if toolchain.find_nvcc() is not None:
            made = toolchain.compile_cubin(printed, arch)
            assert made.resources.spill_stores == 0 and "HMMA.SP.16832.F32" in toolchain.sass(made.code)


@pytest.mark.skipif(
    toolchain.find_nvcc() is None or sass.find_nvdisasm() is None, reason="needs nvcc and nvdisasm"
)
@pytest.mark.parametrize(
    "options",
    [
        {"BN": 256, "stages": 2},
        {"BN": 128, "dtype": "int8", "out": "int32"},
        {"BM": 256, "BN": 128, "cluster": (1, 2), "panel": 8},
        {"BN": 64, "threads": 128},
    ],
    ids=str,
)
def test_products_stay_in_flight(options: dict[str, Any]):
    """Nothing awaits each product, and no register of places is written while a product may read it."""
    kernel = sparse_gemm(
        1024, 1024, 1024, **{"BM": 128, "BK": 128, "threads": 256, "trans_b": True, **options}
    )
    program, _ = pipeline.run(kernel.trace(), target("sm_90a"))
    made = toolchain.compile_cubin(print_kernel(Lowering(program).run()), "sm_90a")
    text = sass.disassembled(made.code)
    assert not made.serialised and made.resources.spill_stores == 0 and "GMMA.SP.64x" in text
    assert sass.faults(text) == []


@pytest.mark.parametrize("options, why", [
    ({"BK": 64}, "a tile of 64 × 4 has no swizzle"), ({"dtype": "float32"}, "T.gemm_sp of float32"),
    ({"dtype": "int8", "out": "int32"}, "B as (N, K) alone"), ({"out": "float16"}, "into float16"), ({"BM": 32}, "on 128 threads"),
], ids=str)  # fmt: skip
def test_what_keeps_to_one_role_is_said(options: dict[str, Any], why: str):
    options = {"BK": 128, "threads": 128, **options}
    kernel = sparse_gemm(64, 64, 256, **options)
    program, _ = pipeline.run(kernel.trace(), target("sm_90a"))
    assert any("without TMA" in note and why in note for note in program.notes), program.notes


def test_what_is_refused():
    def kernel(e: tuple[int, int], places: str, half: int, policy: Any = T.GemmWarpPolicy.Square) -> Any:
        @T.prim_func
        def product(C: T.Tensor((16, 16), "float32")):
            with T.Kernel(1, threads=32):
                a, s, b = (
                    T.alloc_shared((16, half), "float16"),
                    T.alloc_shared(e, places),
                    T.alloc_shared((64, 16), "float16"),
                )
                c = T.alloc_fragment((16, 16), "float32")
                T.gemm_sp(a, s, b, c, policy=policy)
                T.copy(c, C)

        return product

    with refused(
        TileValueError,
        "policy='rows' in T.gemm_sp",
        at="T.gemm_sp(a, s, b, c, policy=policy)",
        expected="FullRow",
    ):
        kernel((16, 4), "int16", 32, "rows").trace()
    kernel((16, 4), "int16", 32).trace()
    with refused(TileValueError, "T.gemm_sp of A", expected="E (M, K / 16)"):
        kernel((16, 8), "int16", 32).trace()
    with refused(TileValueError, "T.gemm_sp of A"):
        kernel((16, 4), "int16", 64).trace()
    with refused(TileTypeError, "E of T.gemm_sp"):
        kernel((16, 4), "float16", 32).trace()
