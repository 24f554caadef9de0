"""tilescale.ops on emulated GPU threads, for Hopper and for Ampere: every operation's small cases, through
the functions that people call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.kernels import instead_of_kernels
from tests.unit.cuda.emulated import run
from tilescale.arrays import as_numpy
from tilescale.ops import MODULES, host, load
from tilescale.ops.case import Case, Op, as_tuple, worst

#: cases of each operation that are emulated, and how many of them always; the others differ in what the
#: simulator's and the CPU's tests see
MOST, FEW = 8, 5
SMALL = [
    (load(m), c, k >= FEW)
    for m in MODULES
    for k, c in enumerate(
        [c for c in load(m).cases if c.small][:: max(1, len([c for c in load(m).cases if c.small]) // MOST)]
    )
]


def emulated(arch: str) -> Callable[..., None]:
    """What stands in for `host.launch`: the same kernel on emulated threads, results copied into the
    tensors."""

    def launch(factory: Callable[..., Any], args: tuple[Any, ...], /, **constants: Any) -> None:
        kernel = factory(**constants)
        names = [p.name for p in kernel.trace().params]
        given = {
            n: as_numpy(a).copy() if isinstance(a, torch.Tensor) and a.dim() else a
            for n, a in zip(names, args, strict=True)
        }
        got = run(kernel, given, arch, 0)
        for name, tensor in zip(names, args, strict=True):
            if name in got and isinstance(tensor, torch.Tensor):
                as_numpy(tensor)[...] = got[name].reshape(tuple(tensor.shape))

    return launch


@pytest.mark.parametrize(
    "op, case, arch",
    [
        # on Ampere every second case, the others under the marker slow
        pytest.param(
            o,
            c,
            a,
            id=f"{o.name}: {c}-{a}",
            marks=[pytest.mark.slow] if late or a == "sm_80" and k % 2 else [],
        )
        for k, (o, c, late) in enumerate(SMALL)
        for a in ("sm_90a", "sm_80")
    ],
)
def test_on_emulated_threads(op: Op, case: Case, arch: str, monkeypatch: pytest.MonkeyPatch):
    instead_of_kernels(monkeypatch, emulated(arch))
    monkeypatch.setattr(host, "has_clusters", lambda device: arch == "sm_90a")
    arguments = op.draw(**case.shape)
    for k, (g, w) in enumerate(zip(as_tuple(op.run(**arguments)), op.reference(**arguments), strict=True)):
        assert worst(g, w) <= 1, f"result {k} of {case}: {worst(g, w)} times what rounding explains"
