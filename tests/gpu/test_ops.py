"""tilescale.ops on the GPU: every operation on every case that is no benchmark, against float64, into
poisoned memory, twice the same bits."""

from __future__ import annotations

from typing import Any

import pytest

torch: Any = pytest.importorskip("torch")
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]

from tilescale.ops import MODULES, load  # noqa: E402
from tilescale.ops.case import Case, Op, as_tuple, worst  # noqa: E402

CASES = [
    pytest.param(load(m), c, id=f"{load(m).name}: {c}")
    for m in MODULES
    for c in load(m).cases
    if c.bar is None
]
BESIDE = 1024


def poisoned(like: tuple[Any, ...]) -> tuple[Any, list[Any]]:
    """Outputs that hold NaN (or their dtype's least number), each in the middle of memory that must stay as
    it is."""
    rooms, outs = [], []
    for t in like:
        room = torch.full(
            ((t.numel() + 2 * BESIDE) * t.element_size(),), 0x55, dtype=torch.uint8, device=t.device
        ).view(t.dtype)
        out = room[BESIDE : BESIDE + t.numel()].view(t.shape)
        out.fill_(float("nan") if t.is_floating_point() else torch.iinfo(t.dtype).min)
        rooms.append(room)
        outs.append(out)
    return (outs[0] if len(outs) == 1 else tuple(outs)), rooms


def same_bits(a: Any, b: Any) -> bool:
    return bool(a.contiguous().view(torch.uint8).equal(b.contiguous().view(torch.uint8)))


@pytest.mark.parametrize("op, case", CASES)
def test_against_float64(op: Op, case: Case):
    arguments = op.draw(**case.shape, device="cuda")
    got, want = as_tuple(op.run(**arguments)), op.reference(**arguments)
    assert len(got) == len(want)
    for k, (g, w) in enumerate(zip(got, want, strict=True)):
        assert g.shape == w.value.shape and worst(g, w) <= 1, (
            f"result {k} of {case}: {worst(g, w)} times what rounding explains"
        )
    out, rooms = poisoned(got)
    again = as_tuple(op.run(**arguments, out=out))
    for g, a, w, room in zip(got, again, want, rooms, strict=True):
        assert same_bits(a, g) if arguments.get("deterministic", True) else worst(a, w) <= 1
        assert (room[:BESIDE].view(torch.uint8) == 0x55).all() and (
            room[-BESIDE:].view(torch.uint8) == 0x55
        ).all()
