"""Pictures of layouts are files of the kind asked for, and show every element."""

from __future__ import annotations

import sys

import pytest

from tilescale.compiler.layout import Fragment, Piece, instructions
from tilescale.compiler.layout.plot import plot_layout
from tilescale.compiler.layout.shared import boxed
from tilescale.errors import TileTypeError, TileValueError


@pytest.mark.parametrize(("suffix", "magic"), [("png", b"\x89PNG"), ("svg", b"<?xml")])
def test_files_of_both_kinds(tmp_path, suffix, magic):
    pytest.importorskip("matplotlib")
    for k, layout in enumerate((instructions.mma_accumulator(), boxed((16, 64), 16, 128), instructions.wgmma_accumulator(256).reduced(1))):
        made = plot_layout(layout, tmp_path / f"{k}.{suffix}")
        assert made.read_bytes().startswith(magic) and made.stat().st_size > 2000


def test_a_picture_names_every_element(tmp_path):
    pytest.importorskip("matplotlib")
    import matplotlib

    with matplotlib.rc_context({"svg.fonttype": "none"}):  # text as text
        text = plot_layout(instructions.mma_accumulator(), tmp_path / "a.svg").read_text()
    assert all(f"{t}:{s}<" in text for t in range(32) for s in range(4)) and "16×8 on 32 threads" in text


def test_a_large_tile_is_cut_and_says_so(tmp_path):
    pytest.importorskip("matplotlib")
    import matplotlib

    with matplotlib.rc_context({"svg.fonttype": "none"}):
        text = plot_layout(boxed((256, 256), 16, 128), tmp_path / "a.svg").read_text()
    assert "rows 0:32" in text


def test_refusals(tmp_path, monkeypatch):
    with pytest.raises(TileValueError, match="png or .svg"):
        plot_layout(instructions.mma_accumulator(), tmp_path / "a.pdf")
    cube = Fragment((2, 2, 2), tuple(Piece(k, 1, 2, "thread", 1 << k) for k in range(3)), 8)
    with pytest.raises(TileValueError, match="3 axes"):
        plot_layout(cube, tmp_path / "a.png")
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(TileTypeError, match="needs matplotlib"):
        plot_layout(instructions.mma_accumulator(), tmp_path / "a.png")
