"""Blocks of a cluster, and executors of a block, that reach each other: on a Hopper GPU, against the
simulator."""

from __future__ import annotations

from typing import Any

import pytest

from tests.unit.cuda.test_clusters import PROGRAMS
from tilescale.compiler.checks.run import launch

torch: Any = pytest.importorskip("torch")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0),
        reason="needs a Hopper GPU",
    ),
]


@pytest.mark.parametrize("name", PROGRAMS)
def test_programs(name: str):
    from tests.gpu.device import run

    kernel, args = PROGRAMS[name]
    want = launch(kernel, 1, args).arrays[0]
    for _ in range(20):
        got = run(kernel, args)
        for key, array in got.items():
            assert (array == want[key]).all(), key
