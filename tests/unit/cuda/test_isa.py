"""The emulator's own statement of PTX's matrix instructions: what a kernel prints and the hardware lacks is
refused, whatever the target's tables say."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

import tilescale.language as T
from tests.gpu.gemms import gemm
from tests.unit.cuda.emulated import data, empty
from tilescale.compiler import emulator
from tilescale.compiler.cuda import toolchain
from tilescale.compiler.cuda.ops import gemm as mma_sync
from tilescale.compiler.cuda.wgmma import function_text
from tilescale.compiler.emulator import isa, matrices
from tilescale.compiler.layout import tensor_cores
from tilescale.compiler.ops import gemm as gemm_op

ROOT = Path(__file__).resolve().parents[3]

THERE = [
    "ts::wgmma_m64n256k16_bf16_01",
    "ts::wgmma_m64n8k16_f16_11",
    "ts::wgmma_m64n40k16_f16_r1",
    "ts::wgmma_m64n248k8_tf32_00",
    "ts::wgmma_m64n24k32_e4m3_e5m2_00",
    "ts::wgmma_m64n240k32_u8_s8_00",
    "ts::wgmma_sp_m64n64k32_bf16_10_s1",
    "ts::wgmma_sp_m64n64k64_s8_00_s0",
    "ts::wgmma_sp_m64n64k16_tf32_00_s1",
]
#: what an entry too many in the target's tables would print, and what PTX says
LACKING = [
    ("ts::wgmma_m64n128k16_f16_bf16_01", "no product of f16 by bf16"),
    ("ts::wgmma_m64n128k32_s8_e4m3_00", "no product of s8 by e4m3"),
    ("ts::wgmma_m64n128k4_f64_00", "no product of f64 by f64"),
    ("ts::wgmma_m64n12k16_f16_01", "no N of 12 for f16"),
    ("ts::wgmma_m64n264k16_f16_01", "no N of 264 for f16"),
    ("ts::wgmma_m64n40k32_s8_00", "no N of 40 for s8"),
    ("ts::wgmma_m64n64k32_bf16_00", "no K of 32 for bf16: 16 alone"),
    ("ts::wgmma_m64n64k16_tf32_00", "no K of 16 for tf32: 8 alone"),
    ("ts::wgmma_m128n64k16_f16_00", "no 128 rows: 64 alone"),
    ("ts::wgmma_sp_m64n64k16_bf16_00_s0", "no K of 16 for sparse bf16: 32 alone"),
    ("ts::wgmma_sp_m64n64k64_e4m3_00_s1", "no sparsity selector of 1 for e4m3"),
    ("ts::wgmma_sp_m64n64k32_f16_00_s2", "no sparsity selector of 2 for f16"),
    ("ts::mma_m16n8k16_f16_bf16", "mma.sync m16n8k16 of f16 by bf16 is no instruction"),
    ("ts::mma_m16n8k32_bf16", "mma.sync m16n8k32 of bf16 by bf16 is no instruction"),
    ("ts::mma_sp_m16n8k64_bf16", "mma.sp m16n8k64 of bf16 by bf16 is no instruction"),
]


@pytest.mark.parametrize("name", THERE)
def test_what_ptx_has_is_read_from_what_is_printed(name: str) -> None:
    made = isa.wgmma(name)
    assert f"m{made.m}n{made.n}k{made.k}_{made.a}" in name
    assert (made.selector is not None) == ("_sp_" in name)


@pytest.mark.parametrize(("name", "why"), LACKING)
def test_what_ptx_lacks_is_refused(name: str, why: str) -> None:
    with pytest.raises(emulator.EmulationError, match=re.escape(why)):
        isa.check(name)


def test_transposes_of_other_operands_than_16_bits_are_refused() -> None:
    """The printer leaves their options out, so a product that asks for one reads another operand."""
    made = isa.wgmma("ts::wgmma_m64n64k8_tf32_00")
    asked = isa.Wgmma(**{**vars(made), "across": (False, True)})
    assert isa.lacking(asked) == "no transpose of tf32: of 16-bit operands alone"
    with pytest.raises(emulator.EmulationError, match="no transpose of tf32"):
        isa.check("ts::wgmma_m64n64k8_tf32_01")


def test_an_instruction_with_other_operands_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """An option too few, a register too few, another opcode."""
    name = "wgmma_m64n64k16_f16_01"
    for old, new, why in (
        ("p, 1, 1, 0, 1", "p, 1, 1", "other operands"),
        ("p, 1, 1, 0, 1", "p, 1, -1, 0, 1", "other operands"),
        ("%30, %31", "%30", "32 registers, and others"),
        ("wgmma.mma_async.sync", "wgmma.mma_async", "no wgmma.mma_async"),
    ):
        text = function_text(name)
        assert old in text
        monkeypatch.setattr(
            isa, "function_text", lambda _, text=text, old=old, new=new: text.replace(old, new)
        )
        isa.wgmma.cache_clear()
        with pytest.raises(emulator.EmulationError, match=why):
            isa.wgmma(f"ts::{name}")
    isa.wgmma.cache_clear()


@pytest.mark.parametrize("arch", ["sm_90a", "sm_80"])
def test_a_row_too_many_in_the_target_s_table_is_refused(arch: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A float16 by bfloat16, which neither wgmma nor mma.sync has, allowed by has_mma and the language."""
    monkeypatch.setattr(gemm_op, "_accumulates", lambda a, b, c: True)
    for module in (tensor_cores, mma_sync):
        monkeypatch.setattr(module, "has_mma", lambda call: True)

    @T.prim_func
    def mixed(
        A: T.Tensor((64, 64), "float16"), B: T.Tensor((64, 64), "bfloat16"), C: T.Tensor((64, 64), "float32")
    ):
        with T.Kernel(1, threads=128):
            a, b = T.alloc_shared((64, 64), "float16"), T.alloc_shared((64, 64), "bfloat16")
            c = T.alloc_fragment((64, 64), "float32")
            T.clear(c)
            for _ in T.Pipelined(1, num_stages=1):
                T.copy(A, a)
                T.copy(B, b)
                T.gemm(a, b, c)
            T.copy(c, C)

    args = {
        "A": data((64, 64), "float16"),
        "B": data((64, 64), "bfloat16"),
        "C": empty((64, 64), "float32"),
    }
    with pytest.raises(emulator.EmulationError, match="f16 by bf16"):
        emulator.launch(mixed, args, arch)


def test_a_width_too_many_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """40 columns of 8-bit integers, which wgmma does not have."""
    monkeypatch.setattr(tensor_cores, "widths", lambda dtype: tuple(range(8, 257, 8)))
    kernel = gemm(64, 40, 128, BM=64, BN=40, BK=64, dtype="int8", out="int32", trans_b=True, threads=128)
    args = {
        "A": data((64, 128), "int8"),
        "B": data((40, 128), "int8"),
        "C": empty((64, 40), "int32"),
    }
    with pytest.raises(emulator.EmulationError, match="no N of 40 for s8"):
        emulator.launch(kernel, args)


def test_an_accumulator_of_another_dtype_is_refused() -> None:
    """The functions take float* or int*; the emulator's registers say which they are."""
    run = matrices.FUNCTIONS["ts::mma_m16n8k32_s8"]
    held = lambda dtype: type("P", (), {"memory": type("M", (), {"data": np.zeros((32, 8), dtype)})})()  # noqa: E731
    with pytest.raises(emulator.EmulationError, match="int8 writes int32, and its accumulator is of float32"):
        run(None, None, held("float32"), held("int8"), held("int8"))


def test_the_headers_have_what_is_emulated() -> None:
    """Every mma.sync of the emulator is PTX's, and stands in the headers under its name."""
    names = [n for n in matrices.FUNCTIONS if n.startswith("ts::mma_")]
    text = (Path(toolchain.__file__).parent / "include/ts/warp.cuh").read_text()
    for name in names:
        isa.check(name)
        assert re.search(rf"\b{name.removeprefix('ts::')}\b", text)
    assert len(names) == 14
