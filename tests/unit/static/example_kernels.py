"""The examples' kernels at several shapes, tilings and numbers of ranks, as programs."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

EXAMPLES = Path(__file__).resolve().parents[3] / "examples"
RANKS = (1, 2, 3, 4, 8)


def example(number: str) -> Any:
    """The module of an example; its folder must be on the path, as when it is run."""
    (path,) = EXAMPLES.glob(f"{number}_*.py")
    name = f"static_{path.stem}"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None and spec.loader is not None
        module = sys.modules[name] = importlib.util.module_from_spec(spec)
        sys.path.insert(0, str(EXAMPLES))
        try:
            spec.loader.exec_module(module)
        finally:
            sys.path.remove(str(EXAMPLES))
    return sys.modules[name]


def alone() -> Iterator[tuple[str, Any]]:
    """Kernels of one rank: (what it is, prim_func)."""
    for n in (1000, 4096):
        yield f"vector_add {n}", example("01").kernel.get_tir(n)
    for shape in ((70, 80), (256, 256), (1024, 512)):
        yield f"gemm {shape}", example("02").kernel.get_tir(*shape)
    for shape in ((50, 100), (64, 1024)):
        yield f"softmax {shape}", example("03").kernel.get_tir(*shape)
    for causal in (False, True):
        for s in (150, 512):
            yield f"flash_attention {s} {causal}", example("04").kernel.get_tir(1, 2, s, 32, causal)


def together(n: int) -> Iterator[tuple[str, Any]]:
    """Kernels made for ``n`` ranks."""
    for size in (3000, 8192):
        yield f"ring_shift {size}", example("05").kernel.get_tir(size)
        yield f"all_gather {size}", example("06").collective.get_tir(size, n)
        yield f"all_gather puts {size}", example("06").puts.get_tir(size, n)
    for size in (1500, 4096):
        yield f"all_reduce one shot {size}", example("07").one_shot.get_tir(size, n)
        yield f"all_reduce two shots {size}", example("07").two_shot.get_tir(size, n)
    for shape in ((70, 100, 96), (128, 256, 128)):
        yield f"ag_gemm {shape}", example("08").kernel.get_tir(*shape, n)
    for shape in ((70, 90, 40), (128, 128, 128)):
        yield f"gemm_rs {shape}", example("09").kernel.get_tir(*shape, n)
        yield f"gemm_ar {shape}", example("10").kernel.get_tir(*shape)
    yield "dispatch", example("11").dispatch.get_tir(64, 2, 32, 2, n)
    yield "combine", example("11").combine.get_tir(64, 2, 32, n)
    yield "take slots", example("13").dispatch.get_tir(64, 2, 32, 2, 64 * n)
    yield "give back", example("13").give_back.get_tir(64, 2, 32, 2, 64 * n)
    for causal in (False, True):
        yield f"ring_attention {causal}", example("12").kernel.get_tir(1, 70, 16, n, causal, BM=32)
    yield "hierarchical all_reduce", example("14").kernel.get_tir(1500, 2 - n % 2)
