"""Pictures of layouts are files of the kind asked for, and show every element."""

from __future__ import annotations

import re
import sys

import pytest

import tilescale
from tests.gpu.gemms import gemm
from tilescale.compiler.cuda import toolchain
from tilescale.compiler.layout import instructions
from tilescale.compiler.layout.plot import plot_layout
from tilescale.compiler.layout.shared import boxed
from tilescale.errors import TileTypeError, TileValueError
from tilescale.layout import layouts


@pytest.mark.parametrize(("suffix", "magic"), [("png", b"\x89PNG"), ("svg", b"<?xml"), ("pdf", b"%PDF")])
def test_files_of_each_kind(tmp_path, suffix, magic):
    pytest.importorskip("matplotlib")
    for k, layout in enumerate(
        (
            instructions.mma_accumulator(),
            boxed((16, 64), 16, 128),
            instructions.wgmma_accumulator(256).reduced(1),
        )
    ):
        made = plot_layout(layout, tmp_path / f"{k}.{suffix}")
        assert made.read_bytes().startswith(magic) and made.stat().st_size > 2000


def test_a_picture_names_every_element(tmp_path):
    pytest.importorskip("matplotlib")
    text = plot_layout(instructions.mma_accumulator(), tmp_path / "a.svg").read_text()
    assert all(f"{t}:{s}<" in text for t in range(32) for s in range(4)) and "16×8 on 32 threads" in text


def test_a_large_tile_is_cut_and_says_so(tmp_path):
    pytest.importorskip("matplotlib")
    text = plot_layout(boxed((256, 256), 16, 128), tmp_path / "a.svg").read_text()
    assert "rows 0:32" in text


def test_of_a_ring_the_first_stage_is_drawn(tmp_path):
    pytest.importorskip("matplotlib")
    text = plot_layout(boxed((8, 64), 16, 128).staged(3), tmp_path / "a.svg").read_text()
    # 128-byte rows: the 16-byte chunks of row 1 are those of row 0, neighbours exchanged (PTX ISA, "Tensor
    # Swizzling Modes")
    assert "shared 3×8×64 × 16 bits, swizzle 128 B" in text and "[0]" in text
    places = re.findall(r"font-size: 6px[^>]*>(\d+)</text>", text)  # the axes have larger numbers
    assert (
        places[:10] == [str(k) for k in range(10)]
        and places[64:66] == ["72", "73"]
        and places[72:74] == ["64", "65"]
    )


def test_refusals(tmp_path, monkeypatch):
    with pytest.raises(TileValueError, match="png, .svg or .pdf"):
        plot_layout(instructions.mma_accumulator(), tmp_path / "a.jpg")
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(TileTypeError, match="needs matplotlib"):
        plot_layout(instructions.mma_accumulator(), tmp_path / "a.png")


@pytest.fixture(scope="module")
def kernel():
    if toolchain.find_nvcc() is None:
        pytest.skip("there is no nvcc on this machine")
    return tilescale.compile(gemm(512, 512, 512, 128, 128, 64, 2), target="cuda:sm_90a")


def test_tiles_of_a_kernel_by_name(tmp_path, kernel):
    pytest.importorskip("matplotlib")
    assert {"a", "b", "acc"} <= set(layouts(kernel)) and not any(
        name.startswith("ring") for name in layouts(kernel)
    )
    text = tilescale.plot_layout(kernel, "a", tmp_path / "a.svg").read_text()
    assert "a of gemm" in text and "swizzle 128 B" in text
    text = tilescale.plot_layout(kernel, "acc", tmp_path / "acc.svg").read_text()
    # wgmma's accumulator: row 0 is held by threads 0 to 3, two neighbouring columns each (PTX ISA, "Register
    # Fragments")
    assert "128×128 on 256 threads, 64 slots each" in text
    assert tilescale.plot_layout(instructions.mma_accumulator(), tmp_path / "mine.png").stat().st_size > 2000


def test_what_is_no_tile_is_refused(tmp_path, kernel):
    with pytest.raises(TileValueError, match="has no tile 'x'") as refused:
        tilescale.plot_layout(kernel, "x", tmp_path / "a.svg")
    assert "acc" in str(refused.value)
    with pytest.raises(TileValueError, match="names no tile"):
        tilescale.plot_layout(kernel, tmp_path / "a.svg")
    with pytest.raises(TileTypeError, match="plot_layout of a int"):
        tilescale.plot_layout(3, tmp_path / "a.svg")
    with pytest.raises(TileTypeError, match="the target cpu, where tiles have no layouts"):
        tilescale.plot_layout(
            tilescale.compile(gemm(64, 64, 64, 64, 64, 64, 1, dtype="float32"), target="cpu"),
            "acc",
            tmp_path / "a.svg",
        )
