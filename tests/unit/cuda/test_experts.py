"""The kernels of experts on several ranks on the emulated Hopper GPU, as they are printed for peers'
addresses and packets, against the simulator."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.unit.cuda.emulated import agree, agree_on_ranks, data, empty
from tilescale.compiler import driver
from tilescale.ops.ranks import exchange_kernels, expert_kernels
from tilescale.packets import length

WORLD, E, K, H, BLOCKS = 2, 6, 2, 24, 2
LOCAL, TOKENS = 3, (37, 5)


def choices(rank: int) -> Any:
    """Two experts of each token, some none."""
    g = np.random.default_rng(rank)
    ids = np.stack([g.permutation(E)[:K] for _ in range(TOKENS[rank])]).astype(np.int32)
    ids[g.random(ids.shape) < 0.2] = -1
    return ids


def places() -> list[dict[str, Any]]:
    """What `plan` is to find, by counting."""
    ids = [choices(r) for r in range(WORLD)]
    rows: list[list[tuple[int, int]]] = [[] for _ in range(WORLD)]
    pairs: list[list[tuple[int, int, int]]] = [[] for _ in range(WORLD)]
    for d in range(WORLD):
        for s in range(WORLD):
            rows[d] += [(s, i) for i in range(TOKENS[s]) if (ids[s][i] // LOCAL == d).any()]
        for e in range(d * LOCAL, d * LOCAL + LOCAL):
            pairs[d] += [(s, i, e) for s in range(WORLD) for i in range(TOKENS[s]) if e in ids[s][i]]
    found = []
    for r in range(WORLD):
        begins = np.array([sum(s < r for s, _ in rows[d]) for d in range(WORLD)], np.int32)
        slots = np.full((TOKENS[r], WORLD), -1, np.int32)
        own = np.full((TOKENS[r], K), -1, np.int32)
        for i in range(TOKENS[r]):
            for d in range(WORLD):
                if (r, i) in rows[d]:
                    slots[i, d] = rows[d].index((r, i)) - begins[d]
            for k in range(K):
                if ids[r][i, k] >= 0:
                    own[i, k] = pairs[ids[r][i, k] // LOCAL].index((r, i, ids[r][i, k]))
        mine = range(r * LOCAL, r * LOCAL + LOCAL)
        starts = [sum(s < k for s, _ in rows[r]) for k in range(WORLD + 1)]
        meta = np.zeros((len(rows[r]), 2, K), np.int32)
        for at, (s, i) in enumerate(rows[r]):
            weights = data((TOKENS[s], K), "float32", 40 + s)[i].view(np.int32)
            here = [k for k, e in enumerate(ids[s][i]) if e // LOCAL == r]
            meta[at] = -1
            meta[at, 0, : len(here)] = [pairs[r].index((s, i, ids[s][i][k])) for k in here]
            meta[at, 1, : len(here)] = weights[here]
        found.append(
            {
                "ids": ids[r],
                "pairs": own,
                "slots": slots,
                "begins": begins,
                "sizes": np.array([sum(e == x for _, _, x in pairs[r]) for e in mine], np.int32),
                "starts": np.array(starts, np.int32),
                "meta": meta,
                "index": np.array([rows[r].index((s, i)) for s, i, _ in pairs[r]], np.int32),
            }
        )
    return found


PLACES = places()
R = sum(TOKENS)


def taken(rank: int, *names: str) -> dict[str, Any]:
    return {name: PLACES[rank][name].copy() for name in names}


def test_plan():
    C = expert_kernels.told(E, WORLD)
    kernel = expert_kernels.plan(K=K, E=E, world=WORLD, chunk=32, blocks=BLOCKS, threads=64)
    args = [
        {
            **taken(r, "ids"),
            "counts": empty((BLOCKS, C), "int32"),
            "box": np.zeros(length((WORLD, C), 32), np.int64),
            "pairs": empty((TOKENS[r], K), "int32"),
            "slots": empty((TOKENS[r], WORLD), "int32"),
            "begins": empty((WORLD,), "int32"),
            "sizes": empty((LOCAL,), "int32"),
            "starts": empty((WORLD + 1,), "int32"),
        }
        for r in range(WORLD)
    ]
    agree_on_ranks(kernel, args)


@pytest.mark.parametrize(
    ("scales", "steps", "cut", "remote"), [(0, 1, 2, ""), (3, 2, 1, ""), (3, 2, 1, "nvshmem")]
)
def test_dispatch(scales: int, steps: int, cut: int, remote: str):
    kernel = expert_kernels.dispatch(
        H=H, K=K, E=E, S=scales, world=WORLD, wide=16, steps=steps, cut=cut, blocks=BLOCKS, threads=64,
        dtype="bfloat16",
    )  # fmt: skip
    agree_on_ranks(
        kernel,
        [
            {
                "X": data((TOKENS[r], H), "bfloat16", r),
                "Z": data((TOKENS[r], scales) if scales else (1, 1), "float32", 20 + r),
                **taken(r, "ids"),
                "weights": data((TOKENS[r], K), "float32", 40 + r),
                **taken(r, "pairs", "slots", "begins", "sizes"),
                "rows": empty((R, H), "bfloat16"),
                "marks": empty((R, scales) if scales else (1, 1), "float32"),
                "meta": empty((R, 2, K), "int32"),
                "index": empty((R * K,), "int32"),
            }
            for r in range(WORLD)
        ],
        remote=remote,
    )


@pytest.mark.parametrize("rank", range(WORLD))
@pytest.mark.parametrize("S", [2 * K, 3 * K])
def test_choices(rank: int, S: int):
    meta = taken(rank, "meta")["meta"]
    marks = data((len(meta), S), "float32", 60 + rank)
    ids = [choices(s) for s in range(WORLD)]
    marks[:, :K] = [row for s in range(WORLD) for row in ids[s] if (row // LOCAL == rank).any()]
    kernel = expert_kernels.choices(
        K=K, S=S, E=E, world=WORLD, blocks=BLOCKS, threads=32, dtype="float64" if S > 2 * K else "float32"
    )
    pairs = int((meta[:, 0] >= 0).sum())
    args = {
        "marks": marks,
        **taken(rank, "meta", "starts"),
        "rank": rank,
        "choice": empty((pairs,), "int32"),
        "weight": empty((pairs,), "float64" if S > 2 * K else "float32"),
    }
    agree(kernel, args)


@pytest.mark.parametrize(
    ("weighted", "group", "steps", "cut", "remote"),
    [(True, 4, 2, 1, ""), (False, 1, 1, 2, ""), (True, 4, 2, 1, "nvshmem")],
)
def test_combine(weighted: bool, group: int, steps: int, cut: int, remote: str):
    kernel = expert_kernels.combine(
        H=H, K=K, world=WORLD, wide=16, steps=steps, cut=cut, group=group, blocks=BLOCKS, threads=64,
        dtype="bfloat16", weighted=weighted,
    )  # fmt: skip
    q = max(TOKENS)
    agree_on_ranks(
        kernel,
        [
            {
                "Y": data((R * K, H), "bfloat16", r),
                **taken(r, "meta", "starts", "slots"),
                "back": empty((WORLD, q, H), "bfloat16"),
                "arrived": np.zeros((WORLD, -(-q // group) * cut), np.int64),
                "C": empty((TOKENS[r], H), "bfloat16"),
            }
            for r in range(WORLD)
        ],
        remote=remote,
    )


def test_rows_move_in_vectors_at_full_size():
    made = {
        "X": expert_kernels.dispatch(
            H=3584, K=8, E=256, S=0, world=4, wide=896, steps=4, cut=1, blocks=32, threads=256, dtype="int32"
        ),
        "Y": expert_kernels.combine(
            H=7168,
            K=8,
            world=4,
            wide=512,
            steps=14,
            cut=1,
            group=8,
            blocks=32,
            threads=512,
            dtype="bfloat16",
            weighted=True,
        ),
    }
    for name, kernel in made.items():
        code = driver.source_text(kernel.trace(), "cuda", "cuda:sm_90a")
        assert f"*(const uint4*)&{name}[" in code and "_there[" in code
        assert "*(uint4*)&rows_there[" in code or "*(uint4*)&back_there[" in code


@pytest.mark.parametrize(("columns", "remote"), [(24, ""), (7, ""), (7, "nvshmem")])
def test_exchange(columns: int, remote: str):
    sizes = np.array([[3, 6], [0, 5]], np.int32)
    kernel = exchange_kernels.exchange(
        H=columns, world=WORLD, group=4, blocks=BLOCKS, threads=64, dtype="bfloat16", givers=1
    )
    agree_on_ranks(
        kernel,
        [
            {
                "X": data((10, columns), "bfloat16", r),
                "sizes": sizes[r].copy(),
                "box": np.zeros(length((WORLD, 4), 32), np.int64),
                "landing": empty((12, columns), "bfloat16"),
                "arrived": np.zeros((WORLD, 1), np.int64),
                "Y": empty((12, columns), "bfloat16"),
                "got": empty((WORLD,), "int32"),
            }
            for r in range(WORLD)
        ],
        remote=remote,
    )
