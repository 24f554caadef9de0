"""What is mutated: the kernels of the examples that communicate, small, and so that their loops run more than
once."""

from __future__ import annotations

import functools
import importlib.util
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

EXAMPLES = Path(__file__).resolve().parents[3] / "examples"


@dataclass(frozen=True)
class Subject:
    """``make(n)`` gives the kernel for n ranks and its arguments. harmless: mutants that no check can name,
    and why: they do what the kernel does. ranks: on how many it is tried, those first that show most."""

    name: str
    make: Callable[[int], tuple[Any, dict[str, Any]]]
    harmless: dict[str, str] = field(default_factory=dict)
    ranks: tuple[int, ...] = (3, 4, 2)


@functools.cache
def example(number: str) -> Any:
    """The module of an example."""
    (path,) = EXAMPLES.glob(f"{number}_*.py")
    sys.path.insert(0, str(EXAMPLES))
    try:
        spec = importlib.util.spec_from_file_location(f"mutated_{path.stem}", path)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(str(EXAMPLES))
    return module


def only(whole: Any, index: Any) -> Any:
    """An array of which one part is written, the other parts unwritten memory."""
    made = np.ma.masked_all(whole.shape, whole.dtype)
    made[index] = whole[index]
    return made


def ring_shift(n: int) -> tuple[Any, dict[str, Any]]:
    return example("05").kernel.get_tir(12 * 3, block=12), {}


def all_gather(n: int) -> tuple[Any, dict[str, Any]]:
    return example("06").collective.get_tir(30, n, block=12, dtype="float32"), {}


def put_gather(n: int) -> tuple[Any, dict[str, Any]]:
    return example("06").puts.get_tir(30, n, block=12, dtype="float32"), {}


def one_shot(n: int) -> tuple[Any, dict[str, Any]]:
    return example("07").one_shot.get_tir(30, n, block=12, dtype="float32"), {}


def two_shot(n: int) -> tuple[Any, dict[str, Any]]:
    return example("07").two_shot.get_tir(20 * n, n, block=12, dtype="float32"), {}


def ag_gemm(n: int) -> tuple[Any, dict[str, Any]]:
    x = np.ones((n, 12, 8), np.float32)
    kernel = example("08").kernel.get_tir(12, 12, 8, n, BM=8, BN=8, BK=8, blocks=3, dtype="float32")
    return kernel, {"X": lambda r: only(x, r)}


def gemm_rs(n: int) -> tuple[Any, dict[str, Any]]:
    return example("09").kernel.get_tir(12, 12, 8, n, BM=8, BN=8, BK=8, blocks=3, dtype="float32"), {}


def gemm_ar(n: int) -> tuple[Any, dict[str, Any]]:
    return example("10").kernel.get_tir(12, 12, 8, BM=8, BN=8, BK=8, blocks=2, dtype="float32"), {}


def combine(n: int) -> tuple[Any, dict[str, Any]]:
    """Answers come back from every rank: token t's two experts are on ranks t and t + 1, round the ring."""
    tokens, width, blocks = 5, 4, 2
    owner = np.array([[(t + c) % n for c in range(2)] for t in range(tokens)], np.int32)
    place = np.zeros_like(owner)
    rows = np.zeros(n, np.int32)
    for t in range(tokens):
        for c in range(2):
            place[t, c] = rows[owner[t, c]]
            rows[owner[t, c]] += 1
    # every rank has the same tokens, so each sends as many rows to everyone as it is asked for
    rows_of = [np.full(n, rows[r], np.int32) for r in range(n)]
    kernel = example("11").combine.get_tir(tokens, 2, width, n, blocks=blocks, dtype="float32")
    return kernel, {"rows": rows_of, "owner": owner, "place": place}


def ring_attention(n: int) -> tuple[Any, dict[str, Any]]:
    kv = np.ones((2, 2, 2, 16, 4), np.float32)
    return example("12").kernel.get_tir(2, 16, 4, n, False, BM=8, dtype="float32"), {"KV": only(kv, 0)}


def causal_ring_attention(n: int) -> tuple[Any, dict[str, Any]]:
    kv = np.ones((2, 2, 1, 16, 4), np.float32)
    return example("12").kernel.get_tir(1, 16, 4, n, True, BM=8, dtype="float32"), {"KV": only(kv, 0)}


ENTRY = "a rank is reached only when it has come to the launch, and each tile is gathered once: its place is free from the beginning"
EXIT = "a launch ends on a rank when all that is aimed at it has landed, and no statement of the kernel reads the result"
GATHER = "T.all_gather(A[i * block : (i + 1) * block], G[0:world, i * block : (i + 1) * block])"
PUT = "T.copy(A[tile : tile + block], G[rank, tile : tile + block], dst=peer, signal=arrived[rank])"
REDUCE = "T.all_reduce(part[tile], C[tile])"

SUBJECTS = (
    Subject("05_ring_shift", ring_shift),
    Subject(
        "06_all_gather",
        all_gather,
        {
            f"meeting 1 of {GATHER}: deleted": ENTRY,
            f"meeting 1 of {GATHER}: moved down": ENTRY,
            f"meeting 2 of {GATHER}: deleted": EXIT,
            f"meeting 2 of {GATHER}: moved up": EXIT,
        },
    ),
    Subject(
        "06_all_gather by puts",
        put_gather,
        {f"signal of {PUT}: moved up": EXIT, "wait T.wait(arrived[source], tiles): one fewer": EXIT},
    ),
    Subject("07_all_reduce in one shot", one_shot),
    Subject("07_all_reduce in two shots", two_shot),
    Subject("08_ag_gemm", ag_gemm),
    Subject("09_gemm_rs", gemm_rs),
    Subject(
        "10_gemm_ar",
        gemm_ar,
        {
            f"meeting 2 of {REDUCE}: deleted": "each tile of the parts is written once in a launch, so nobody waits for its readers",
            f"meeting 2 of {REDUCE}: moved up": "it is moved over the store of the sum into the rank's own result, which no other rank reads",
        },
    ),
    Subject("11_all_to_all, combine", combine),
    Subject("12_ring_attention", ring_attention),
    Subject("12_ring_attention, causal", causal_ring_attention),
)
