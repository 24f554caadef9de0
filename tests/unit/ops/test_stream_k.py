"""Stream-K and kernels for any number of rows: every step is taken once, by whichever block, in one order,
and none is compiled twice."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import tilescale.ops
from tests.kernels import instead_of_kernels
from tests.unit.cuda.emulated import data
from tilescale.compiler.checks.run import check
from tilescale.compiler.cuda.targets import target
from tilescale.compiler.passes.pipeline import gpu_scheduled, tile_level
from tilescale.compiler.tvm_compat import ir, structural_map, tirx
from tilescale.errors import TileValueError
from tilescale.ops import gemm
from tilescale.ops.gemm_kernels import streamed

TILE = {"BM": 64, "BN": 64, "BK": 32, "stages": 2, "threads": 128, "panel": 2}


def kernel(M: int, N: int, K: int, blocks: int) -> Any:
    how = {
        "swap": False,
        "dtype": "float16",
        "out": "float32",
        "trans_a": False,
        "trans_b": False,
        "bias": False,
        "activation": "",
    }
    return streamed(None, N, K, **TILE, blocks=blocks, **how)


def arguments(M: int, N: int, K: int, blocks: int) -> dict[str, Any]:
    a, b = data((M, K), "float16", 1), data((K, N), "float16", 2)
    zeros = {
        "P": torch.full((blocks, 64, 64), float("nan")).numpy(),
        "ready": torch.zeros(blocks, dtype=torch.int32).numpy(),
    }
    return {"A": a, "B": b, **zeros, "C": torch.zeros(M, N).numpy()}


@pytest.mark.parametrize("level", ["tile", "both"])
def test_who_shares_a_tile_agrees_on_it_under_any_schedule(level: str):
    """Three blocks, four tiles of five steps; the same bits whoever comes first."""
    shape = (120, 104, 160, 3)
    report = check(
        kernel(*shape),
        1,
        arguments(*shape),
        level=level,
        seeds=6,
        **({"arch": "sm_90a"} if level == "both" else {}),
    )
    assert report, report
    assert "C" not in {str(name).partition(" ")[0] for name in report.varying}
    if level == "both":
        assert [
            r.form for r in gpu_scheduled(tile_level(kernel(*shape)), target("sm_90a")).schedule.rings
        ] == ["roles"]


def test_a_block_that_does_not_wait_is_found():
    shape = (120, 104, 160, 3)
    program = tile_level(kernel(*shape))
    one = lambda c: isinstance(c, ir.Call) and c.op.name == "ts.atomic" and str(c.attrs["kind"]) == "load"  # noqa: E731
    hasty = lambda s: tirx.Bind(s.var, tirx.IntImm("int32", 1), s.span) if one(s.value) else s  # noqa: E731
    report = check(
        program.with_body(structural_map(program.func.body, (tirx.Bind, hasty))),
        1,
        arguments(*shape),
        seeds=4,
    )
    assert not report and {f.kind for f in report.findings} <= {"race", "uninitialised"}, report


@pytest.mark.parametrize(
    "M, N, K, blocks", [(64, 64, 200, 7), (300, 64, 32, 4), (130, 200, 96, 5), (64, 192, 64, 3), (1, 1, 1, 9)]
)
def test_shares_of_all_kinds(M: int, N: int, K: int, blocks: int, monkeypatch: pytest.MonkeyPatch):
    """One tile of several blocks, several tiles of a block with a step each, cut and whole tiles, whole tiles
    alone, one step."""
    monkeypatch.setenv("TILESCALE_TARGET", "sim")
    a, b = torch.randn(M, K), torch.randn(K, N)
    got = tilescale.ops.matmul(a, b, config=gemm.Config(**TILE, blocks=blocks, stream=True))
    assert torch.allclose(got, a @ b, atol=1e-4)


def test_one_kernel_serves_a_class_of_rows(monkeypatch: pytest.MonkeyPatch):
    made: set[str] = set()
    instead_of_kernels(
        monkeypatch, lambda factory, args, /, **constants: made.add(f"{factory.__name__} {constants}")
    )

    def kernels(rows: tuple[int, ...], trans_a: bool = False) -> int:
        made.clear()
        for m in rows:
            a = (
                torch.zeros(64, m, dtype=torch.float16).T
                if trans_a
                else torch.zeros(m, 64, dtype=torch.float16)
            )
            tilescale.ops.matmul(a, torch.zeros(64, 96, dtype=torch.float16))
        return len(made)

    assert kernels((65, 100, 128, 200)) == 1 and kernels((1, 2, 16)) == 1 and kernels((16, 17)) == 2
    assert kernels((72, 104), trans_a=True) == 2


def test_configurations_that_there_are_not():
    a, b = torch.zeros(8, 8), torch.zeros(8, 8)
    more = ({"blocks": 3, "cluster": 2}, {"blocks": 4, "cluster": 2, "stream": True})
    for wrong in (
        {"stream": True},
        {"blocks": 4, "split": 2},
        {"blocks": 4, "swap": True},
        {"blocks": 4, "stream": True, "split": 2},
        *more,
    ):
        with pytest.raises(TileValueError):
            tilescale.ops.matmul(a, b, config=gemm.Config(**wrong))
