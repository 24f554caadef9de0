"""W4A16 with k cut among the blocks of a cluster, which Ampere does not have, and therefore not every case of the library can."""

from __future__ import annotations

import pytest

from tests.unit.cuda.test_library import emulated
from tilescale.ops import host, w4a16
from tilescale.ops.case import worst

CASES = [
    {"M": 11, "N": 76, "K": 1152, "BN": 64, "warps": 4, "rows": 32, "ahead": 2, "cluster": 2, "zeros": True, "dtype": "float16"},
    {"M": 1, "N": 40, "K": 640, "BN": 64, "warps": 4, "rows": 16, "ahead": 2, "cluster": 4},
]


@pytest.mark.parametrize("shape", CASES, ids=str)
def test_blocks_of_a_cluster_share_k(shape: dict, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(host, "launch", emulated("sm_90a"))
    arguments = w4a16.draw(**shape)
    (wanted,) = w4a16.reference(**arguments)
    assert worst(w4a16.w4a16_matmul(**arguments), wanted) <= 1
