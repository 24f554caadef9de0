"""Layouts by TileLang's names: those of mma against what this compiler multiplies with, those that are made,
printed and drawn."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import tilescale.language as T
from tests.kernels import refused
from tilescale.compiler.layout import instructions
from tilescale.compiler.tvm_compat import tirx
from tilescale.cuda.intrinsics.layout import mma_layout, utils
from tilescale.errors import TileTypeError, TileValueError
from tilescale.layout import (
    make_fully_replicated_layout_fragment,
    make_gemm_fragment_8x8,
    make_gemm_fragment_8x8_transposed,
    make_swizzled_layout,
    make_wgmma_swizzled_layout,
)
from tilescale.tools import plot_layout

DEPTHS = {32: ("16x8", "32x4"), 16: ("16x16", "32x8"), 8: ("16x32", "32x16")}


@pytest.mark.parametrize("bits", DEPTHS)
@pytest.mark.parametrize("operand", "ab")
def test_operands_of_mma(operand: str, bits: int):
    shape, slots = DEPTHS[bits]
    place = getattr(mma_layout, f"shared_{shape}_to_mma_{slots}_layout_sr_{operand}")
    turned = getattr(mma_layout, f"shared_{shape}_to_mma_{slots}_layout_rs_{operand}")
    element = getattr(mma_layout, f"mma_load_{operand}_{slots}_to_shared_{shape}_layout")
    i, j = np.indices((16, 256 // bits))
    thread, slot = place(i, j)
    assert sorted(zip(thread.ravel(), slot.ravel())) == [
        (t, s) for t in range(32) for s in range(128 // bits)
    ]
    back = element(thread, slot)
    assert (back[0] == i).all() and (back[1] == j).all()
    assert all((a == b).all() for a, b in zip(turned(j, i), (thread, slot)))


def test_as_the_compiler_has_them():
    i, j = np.indices((16, 16))
    for place, own in (
        (mma_layout.shared_16x16_to_mma_32x8_layout_sr_a, instructions.mma_a(16)),
        (utils.shared_16x16_to_mma_32x8_layout, instructions.mma_a(16)),
    ):
        thread, slot = place(i, j)
        assert (thread == own.thread(i, j)).all() and (slot == own.slot(i, j)).all()
    for bits, (shape, slots) in DEPTHS.items():
        own = instructions.mma_b(bits)  # of one instruction
        n, k = np.indices((8, own.shape[0]))
        thread, slot = getattr(mma_layout, f"shared_{shape}_to_mma_{slots}_layout_sr_b")(n, k)
        assert (thread == own.thread(k, n)).all() and (slot == own.slot(k, n)).all()


def test_ldmatrix_rows_are_those_of_the_operands():
    """Thread t of ldmatrix.x4 names the row of 16 bytes whose words go to the threads 4 (t % 8) … of register
    t // 8."""
    for bits, rows, element in (
        (
            16,
            mma_layout.ldmatrix_32x8_to_shared_16x16_layout,
            mma_layout.mma_load_a_32x8_to_shared_16x16_layout,
        ),
        (
            8,
            mma_layout.ldmatrix_32x16_to_shared_16x32_layout_a,
            mma_layout.mma_load_a_32x16_to_shared_16x32_layout,
        ),
        (
            8,
            mma_layout.ldmatrix_32x16_to_shared_16x32_layout_b,
            mma_layout.mma_load_b_32x16_to_shared_16x32_layout,
        ),
        (
            32,
            mma_layout.ldmatrix_32x4_to_shared_16x8_layout_b,
            mma_layout.mma_load_b_32x4_to_shared_16x8_layout,
        ),
    ):
        each = 32 // bits
        for t in range(32):
            for k in range(128 // bits):
                word, within = divmod(k, each)
                assert rows(t, k) == element(t % 8 * 4 + word, t // 8 * each + within)


def test_maps_of_indices_make_fragments(tmp_path: Path):
    held = tirx.IndexMap.from_func(mma_layout.shared_16x16_to_mma_32x8_layout_sr_a, index_dtype=T.int32)
    base = T.Fragment(
        [16, 16],
        forward_thread_fn=lambda i, j: held.map_indices([i, j])[0],
        forward_index_fn=lambda i, j: held.map_indices([i, j])[1],
    )
    assert base == T.Fragment((16, 16), mma_layout.shared_16x16_to_mma_32x8_layout_sr_a)
    assert (
        "threads=32" in repr(base) and base.get_thread_size() == 32 and base.map_forward_thread([1, 2]) == 5
    )
    whole = base.repeat([2, 1], repeat_on_thread=True).replicate(2)
    assert whole.threads == 128 and not whole.is_equal(base)
    (path,) = plot_layout(whole, str(tmp_path), "whole", "RdPu", True, formats="svg", view="input")
    assert path.stat().st_size > 1000
    with refused(TileValueError, "plot_layout with view='output'", expected='"input"'):
        plot_layout(whole, tmp_path, view="output")
    assert [p.suffix for p in plot_layout(base, tmp_path, formats="pdf,png")] == [".pdf", ".png"]


def test_layouts_by_name():
    tile = SimpleNamespace(shape=(64, 64), dtype="float16")
    assert make_wgmma_swizzled_layout(tile) == make_swizzled_layout(tile)
    assert make_wgmma_swizzled_layout(tile, continuity=32).swizzle == 64
    i, j = np.indices((8, 8))
    one, other = make_gemm_fragment_8x8(), make_gemm_fragment_8x8_transposed()
    assert (one.thread(i, j) == other.thread(j, i)).all() and one.threads == 32 and one.slots == 2
    whole = make_fully_replicated_layout_fragment(SimpleNamespace(shape=(4, 6)), 128)
    assert whole.slots == 24 and len(whole.copies) == 128
    turned = T.Layout((4, 8), lambda i, j: (j, i))
    assert turned.get_input_shape() == (4, 8) and turned.get_output_shape() == (8, 4)
    assert turned.map_forward_index([1, 2]) == [2, 1]
    assert turned.is_equal(T.Layout((4, 8), lambda i, j: j * 4 + i)) and not turned.is_equal(one)
    with refused(TileTypeError, "make_fully_replicated_layout_fragment of the shape None"):
        make_fully_replicated_layout_fragment(3, 128)
    with refused(TileValueError, "make_wgmma_swizzled_layout of"):
        make_wgmma_swizzled_layout(SimpleNamespace(shape=(64, 20), dtype="float16"))
