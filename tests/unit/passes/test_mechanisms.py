"""The compiler's mechanisms that make some kernels faster: each fires for a kernel, can be left out by name,
and changes no result."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import tilescale.language as T
from tests.gpu.gemms import gemm
from tests.unit.cuda import test_attention, test_attention_backward, test_copies_together, test_hopper
from tests.unit.cuda.emulated import agree, data, empty, lowered
from tests.unit.passes import (
    test_decided,
    test_narrow_tiles,
    test_skip_masks,
    test_spare_stages,
    test_tiles_in_registers,
)
from tilescale.compiler.cuda.printer import print_kernel
from tilescale.compiler.cuda.targets import target
from tilescale.compiler.passes.pipeline import GPU_PASSES, LOWERED, Trace, run
from tilescale.env import DUMP, WITHOUT
from tilescale.errors import TileValueError
from tilescale.ops.attention import Tile
from tilescale.ops.fp8_gemm import by_tensor

Case = tuple[Any, dict[str, Any]]


def product() -> Case:
    options = {"BM": 128, "BN": 128, "stages": 4}
    return gemm(130, 136, 136, **options), test_hopper.arguments(130, 136, 136, options)


def shared_product() -> Case:
    shape, options, *_ = test_hopper.CLUSTERS[0]
    return gemm(*shape, **options), test_hopper.arguments(*shape, options)


def attention() -> Case:
    tile = Tile(64, 64, 128, 2)
    return test_attention.kernel(1, 1, 32, True, tile), test_attention.arguments(70, 130, 1, 1, 32)


def packed_attention() -> Case:
    starts = [np.cumsum([0, *n]).astype("int32") for n in ((70, 1, 33), (50, 3, 0))]
    made = {
        n: data((int(s[-1]), 1, 16), "bfloat16", ord(n))
        for n, s in (("Q", starts[0]), ("K", starts[1]), ("V", starts[1]))
    }
    made |= {
        "O": empty((104, 1, 16), "bfloat16"),
        "Lse": empty((1, 104), "float32"),
        "Starts": starts[0],
        "Begins": starts[1],
        "most": 70,
    }
    return test_attention.kernel(1, 1, 16, False, Tile(64, 64, 128, 1), packed=True), made


def gradients() -> Case:
    return test_attention_backward.sums(2, 2), test_attention_backward.arguments(2)


def float8_product() -> Case:
    cut = {"BM": 128, "BN": 64, "stages": 2, "threads": 256, "panel": 1, "stay": 1, "parts": 1}
    made = by_tensor(
        256, 64, 512, **cut, left="float8_e4m3fn", right="float8_e4m3fn", out="float32", fast=False
    )
    args = {
        "A": data((256, 512), "float8_e4m3fn", 1),
        "B": data((64, 512), "float8_e4m3fn", 2),
        "C": empty((256, 64), "float32"),
    }
    return made, args | {name: np.ones(1, "float32") for name in ("SA", "SB")}


def narrow_rows() -> Case:
    """Rows of which TMA takes none, and a last round without one behind it."""
    kernel = gemm(33, 36, 100, BM=32, BN=32, BK=32, stages=2, threads=64, dtype="float16")
    args = {"A": data((33, 100), "float16", 1), "B": data((100, 36), "float16", 2)}
    return kernel, args | {"C": empty((33, 36), "float16")}


@T.prim_func
def halves(A: T.Tensor((32, 64), "bfloat16"), B: T.Tensor((32, 64), "bfloat16")):
    with T.Kernel(1, threads=64):
        a, b = T.alloc_fragment((32, 64), "bfloat16"), T.alloc_fragment((32, 64), "bfloat16")
        T.copy(A, a)
        for i, j in T.Parallel(32, 64):
            b[i, j] = a[i, j] * a[i, j]
        T.copy(b, B)


CASES: dict[str, Callable[[], Case]] = {
    "copies_together": lambda: (test_copies_together.rounds(), test_copies_together.given()),
    "decided": lambda: (
        test_decided.pooled(192),
        {"X": data((192, 32), "float32", 1), "Y": empty((3, 32), "float32")},
    ),
    "narrow_tiles": lambda: (
        test_narrow_tiles.sums(test_narrow_tiles.by_copy),
        test_narrow_tiles.arguments("bfloat16", "float32"),
    ),
    "skip_masks": lambda: (
        test_skip_masks.attention(test_skip_masks.ragged),
        test_skip_masks.arguments(130),
    ),
    "spare_stages": lambda: (test_spare_stages.product(2), test_spare_stages.arguments(2)),
    "tiles_in_registers": lambda: (test_tiles_in_registers.ragged(64), test_tiles_in_registers.rows_of("C")),
    "multicast": shared_product,
    "release_late": product,
    "overlap_products": attention,
    "ping_pong": float8_product,
    "split_rounds": packed_attention,
    "issue_early": narrow_rows,
    "tma_stores": product,
    "hoist_store_waits": gradients,
    "defer_cross_lane_sums": attention,
    "stores_by_warpgroup": product,
    "elide_proxy_fences": gradients,
    "warpgroup_code": gradients,
    "prefetched_maps": product,
    "packed_halves": lambda: (halves, {"A": data((32, 64), "bfloat16"), "B": empty((32, 64), "bfloat16")}),
}


def test_each_has_a_kernel():
    assert set(CASES) == {p.name for p in GPU_PASSES if p.optional} | set(LOWERED)


@pytest.mark.parametrize("name", CASES)
def test_it_fires_and_can_be_left_out(name: str, monkeypatch: pytest.MonkeyPatch):
    kernel, args = CASES[name]()
    own = lowered(kernel)
    assert name in own.program.fired
    monkeypatch.setenv(WITHOUT.name, name)
    other = lowered(kernel)
    assert name not in other.program.fired
    assert print_kernel(own.kernel).text != print_kernel(other.kernel).text
    agree(kernel, args, seed=1)


def test_only_what_may_be_left_out_is(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv(WITHOUT.name, "multicast, fences")
    with pytest.raises(TileValueError, match="fences") as error:
        lowered(product()[0])
    assert "release_late" in str(error.value)


def test_every_step_is_shown(tmp_path: Any, monkeypatch: pytest.MonkeyPatch):
    """With what is decided beside the statements, and whether the step changed anything."""
    monkeypatch.setenv(DUMP.name, str(tmp_path))
    trace: Trace = run(product()[0].trace(), target("sm_90a"))[1]
    steps = {step.name: step for step in trace.steps}
    assert steps["release_late"].changed and steps["tma_stores"].changed and not steps["multicast"].changed
    assert "ring 0 (roles)" in steps["schedule"].text and "tma_load(A[" in steps["schedule"].text
    assert "wgmma(" not in steps["schedule"].text and "wgmma(" in steps["select_wgmma"].text
    assert "of shared memory" in steps["allocate_shared"].text and "thread × 4" in steps["infer_layouts"].text
    texts = {path.name.split(".")[2]: path.read_text() for path in tmp_path.iterdir()}
    assert (
        set(texts) == set(steps)
        and "nothing changed" in texts["multicast"]
        and "nothing changed" not in texts["release_late"]
    )
