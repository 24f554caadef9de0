"""The kernels of experts on several ranks on the emulated Hopper GPU, as they are printed for peers'
addresses and packets, against the simulator."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.unit.cuda.emulated import agree, agree_on_ranks, data, empty, lowered
from tilescale.compiler import driver
from tilescale.compiler.checks.run import check, launch
from tilescale.compiler.cuda.printer import print_kernel
from tilescale.ops.ranks import (
    combine,
    combine_kernels,
    dispatch_gemm,
    exchange_kernels,
    expert_kernels,
    experts,
    gemm_combine,
)
from tilescale.packets import length

WORLD, E, K, H, BLOCKS = 2, 6, 2, 24, 2
LOCAL, TOKENS = 3, (37, 5)


def choices(rank: int) -> Any:
    """Two experts of each token, some none."""
    g = np.random.default_rng(rank)
    ids = np.stack([g.permutation(E)[:K] for _ in range(TOKENS[rank])]).astype(np.int32)
    ids[g.random(ids.shape) < 0.2] = -1
    return ids


def favoured(rank: int) -> Any:
    """One expert of almost every token, so that it has whole tiles of rows, and another one of each."""
    g = np.random.default_rng(rank)
    others = [1 + int(g.integers(E - 1)) for _ in range(TOKENS[rank])]
    ids = np.stack([(0, e) if g.random() < 0.5 else (e, 0) for e in others]).astype(np.int32)
    ids[g.random(ids.shape) < 0.1] = -1
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


def listing(high: int) -> tuple[Any, list[dict[str, Any]]]:
    """`plan` with lists for tiles of ``high`` rows, and what it takes."""
    C = expert_kernels.told(E, WORLD, high)
    kernel = expert_kernels.plan(K=K, E=E, world=WORLD, chunk=32, blocks=BLOCKS, threads=64, high=high)
    args = [
        {
            **taken(r, "ids"),
            "weights": data((TOKENS[r], K), "float32", 40 + r),
            "counts": empty((BLOCKS, C), "int32"),
            "box": np.zeros(length((WORLD, C), 32), np.int64),
            "pairs": empty((TOKENS[r], K), "int32"),
            "slots": empty((TOKENS[r], WORLD), "int32"),
            "begins": empty((WORLD,), "int32"),
            "sizes": empty((LOCAL,), "int32"),
            "starts": empty((WORLD + 1,), "int32"),
            "order": empty((TOKENS[r] * WORLD, 4), "int32"),
            "steps": empty((LOCAL + 1, 4), "int32"),
            "meta": empty((R, 2, K), "int32"),
            "index": empty((R * K,), "int32"),
        }
        for r in range(WORLD)
    ]
    return kernel, args


def lists(high: int) -> list[dict[str, Any]]:
    """What `plan` lists, by the simulator."""
    kernel, args = listing(high)
    return launch(kernel, WORLD, {name: [a[name] for a in args] for name in args[0]}).arrays


def test_lists():
    """In the order of steps, in each the next rank's rows first, of a rank in the order of tokens."""
    high = 4
    for r, (made, want) in enumerate(zip(lists(high), PLACES, strict=True)):
        rows = []
        for e in range(LOCAL):
            assert made["steps"][e, 0] == len(rows)
            for d in ((r + hop) % WORLD for hop in range(1, WORLD + 1)):
                for i, row in enumerate(want["ids"]):
                    here = [x for x in row if x // LOCAL == d]
                    if here and min(here) == d * LOCAL + e:
                        rows.append((i, d, want["begins"][d] + want["slots"][i, d], 0))
        assert made["steps"][LOCAL, 0] == len(rows)
        assert made["order"][: len(rows)].tolist() == [list(map(int, row)) for row in rows]
        sizes = want["sizes"].tolist()
        assert made["steps"][:, 1].tolist() == [sum(sizes[:e]) for e in range(LOCAL + 1)]
        assert made["steps"][:, 2].tolist() == [
            sum(-(-n // high) for n in sizes[:e]) for e in range(LOCAL + 1)
        ]
        first = [
            min(x for x in row if x // LOCAL == r) for p in PLACES for row in p["ids"] if r in row // LOCAL
        ]
        assert made["steps"][:LOCAL, 3].tolist() == [first.count(r * LOCAL + e) for e in range(LOCAL)]
        for name in ("pairs", "slots", "begins", "sizes", "starts"):
            assert (made[name] == want[name]).all(), name
        assert (made["index"][: len(want["index"])] == want["index"]).all()
        assert not made["index"][len(want["index"]) :].any()
        assert (made["meta"][: len(want["meta"]), 0] == want["meta"][:, 0]).all()


def test_plan_with_lists():
    agree_on_ranks(*listing(64))


@pytest.mark.parametrize(("gate", "trans_b"), [("", False), ("silu", True)])
def test_dispatch_gemm(gate: str, trans_b: bool):
    """On the emulator, and at both levels of the simulator: rows are moved by spare warps, and tiles fetched
    by TMA."""
    N, wide = 96, 72
    kernel = dispatch_gemm.dispatch_gemm(
        H=wide, N=N, E=E, world=WORLD, BM=64, BN=48 if gate else 64, BK=32, stages=2, threads=128, panel=2,
        blocks=3, warps=2, dtype="bfloat16", trans_b=trans_b, gate=gate,
    )  # fmt: skip
    tall = R * K // 64 + LOCAL
    args = [
        {
            "X": data((TOKENS[r], wide), "bfloat16", r),
            **{name: found[name] for name in ("order", "steps", "index")},
            "B": data((LOCAL, N, wide) if trans_b else (LOCAL, wide, N), "bfloat16", 70 + r),
            "rows": empty((R, wide), "bfloat16"),
            "Y": np.zeros_like(data((tall * 64, wide), "bfloat16", 0)),
            "told": np.zeros(LOCAL + tall, np.int64),
            "C": empty((R * K, N // 2 if gate else N), "bfloat16"),
        }
        for r, found in enumerate(lists(64))
    ]
    agree_on_ranks(kernel, args)
    everyone = {name: [a[name] for a in args] for name in args[0]}
    assert (report := check(kernel, WORLD, everyone, level="both", seeds=2, arch="sm_90a")), report
    notes = driver.lower(kernel.trace(), "cuda:sm_90a").program.notes
    assert notes == ["moe_dispatch_gemm: 2 non-blocking copies by 2 warps beside the producer"]


@pytest.mark.parametrize(
    ("scales", "steps", "cut", "stages", "remote"),
    [
        (0, 1, 2, 0, ""),
        (3, 2, 1, 0, ""),
        (3, 2, 1, 0, "nvshmem"),
        (3, 1, 1, 2, ""),
        (0, 1, 2, 3, ""),
        (3, 1, 2, 2, "nvshmem"),
    ],
)
def test_dispatch(scales: int, steps: int, cut: int, stages: int, remote: str):
    kernel = expert_kernels.dispatch(
        H=H, K=K, E=E, S=scales, world=WORLD, wide=H // cut if stages else 16, steps=steps, cut=cut,
        movers=2, stages=stages, blocks=BLOCKS, threads=96, dtype="bfloat16",
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
    ("weighted", "steps", "cut", "givers", "stages", "staged", "remote"),
    [
        (True, 2, 1, 0, 0, 0, ""),
        (False, 1, 2, 0, 0, 0, ""),
        (True, 2, 1, 1, 0, 0, ""),
        (True, 2, 1, 1, 0, 0, "nvshmem"),
        (True, 2, 1, 1, 2, 4, ""),
        (True, 2, 1, 1, 2, 1, ""),
        (False, 1, 2, 1, 3, 4, ""),
        (True, 2, 1, 1, 2, 4, "nvshmem"),
    ],
)
def test_combine(
    weighted: bool, steps: int, cut: int, givers: int, stages: int, staged: int, remote: str,
    monkeypatch: pytest.MonkeyPatch,
):  # fmt: skip
    """``staged``: so many pairs have a place in a stage; a row has up to two here."""
    monkeypatch.setattr(combine_kernels, "STAGED", staged)
    kernel = combine_kernels.combine(
        H=H, K=K, world=WORLD, wide=16, steps=steps, cut=cut, givers=givers, stages=stages,
        blocks=BLOCKS, threads=64, dtype="bfloat16", weighted=weighted,
    )  # fmt: skip
    q = max(TOKENS)
    agree_on_ranks(
        kernel,
        [
            {
                "Y": data((R * K, H), "bfloat16", r),
                **taken(r, "meta", "starts", "slots"),
                "back": empty((WORLD, q, H), "bfloat16"),
                "arrived": np.zeros((WORLD, q * cut), np.int64),
                "C": empty((TOKENS[r], H), "bfloat16"),
            }
            for r in range(WORLD)
        ],
        remote=remote,
    )


@pytest.mark.parametrize(("columns", "trans_b", "weighted"), [(1, False, True), (2, True, False)])
def test_gemm_combine(columns: int, trans_b: bool, weighted: bool, monkeypatch: pytest.MonkeyPatch):
    """On the emulator, and at both levels of the simulator: whole tiles are stored by TMA, and read by other
    blocks behind their counts."""
    monkeypatch.setattr(f"{__name__}.TOKENS", (70, 13))
    monkeypatch.setattr(f"{__name__}.choices", favoured)
    found, R = places(), sum(TOKENS)
    assert any(p["sizes"].max() > 64 for p in found)
    wide, inner, q, panels = 200, 40, max(TOKENS), -(-4 // columns)
    kernel = gemm_combine.gemm_combine(
        H=wide, K=inner, topk=K, E=E, world=WORLD, BM=64, BN=64, BK=32, stages=2, threads=128, panel=2,
        blocks=4, columns=columns, movers=1, step=64, group=4, dtype="bfloat16", trans_b=trans_b,
        weighted=weighted,
    )  # fmt: skip
    shape = (LOCAL, wide, inner) if trans_b else (LOCAL, inner, wide)
    args = [
        {
            "A": data((R * K, inner), "bfloat16", r),
            "B": data(shape, "bfloat16", 70 + r),
            **{name: found[r][name] for name in ("sizes", "meta", "starts", "slots")},
            "Y": empty((R * K, wide), "bfloat16"),
            "back": empty((WORLD, q, wide), "bfloat16"),
            "done": np.zeros(panels, np.int64),
            "arrived": np.zeros((WORLD, panels * -(-q // 4)), np.int64),
            "C": empty((TOKENS[r], wide), "bfloat16"),
        }
        for r in range(WORLD)
    ]
    agree_on_ranks(kernel, args)
    everyone = {name: [a[name] for a in args] for name in args[0]}
    assert (report := check(kernel, WORLD, everyone, level="both", seeds=2, arch="sm_90a")), report
    assert not driver.lower(kernel.trace(), "cuda:sm_90a").program.notes
    code = driver.source_text(kernel.trace(), "cuda", "cuda:sm_90a")
    assert "ts::tma_store(Y_map" in code and "ts::tma_load(&a[" in code


def test_rows_go_through_rings_at_full_size():
    """Parts of 16 KB at most, of as many warps as have rings in shared memory."""
    assert experts.ring(1792, 8, 3) == (experts.Cut(1792, 1, 1), 4)
    assert experts.ring(16384 // 4, 8, 3) == (experts.Cut(2048, 1, 2), 4)
    assert experts.ring(12, 2, 3) == (experts.Cut(12, 1, 1), 16)
    kernel = expert_kernels.dispatch(
        H=1792, K=8, E=256, S=0, world=4, wide=1792, steps=1, cut=1, movers=4, stages=3, blocks=32,
        threads=384, dtype="int64",
    )  # fmt: skip
    code = driver.source_text(kernel.trace(), "cuda", "cuda:sm_90a")
    assert "ts::store_run<1, ts::ROWS_BEGUN>(" in code and "ts::cp_async<16>(&x[" in code
    assert code.count("ts::rows_complete()") == 1


def test_rows_move_in_vectors_at_full_size():
    made = {
        "X": expert_kernels.dispatch(
            H=3584,
            K=8,
            E=256,
            S=0,
            world=4,
            wide=896,
            steps=4,
            cut=1,
            movers=8,
            stages=0,
            blocks=32,
            threads=512,
            dtype="int32",
        ),  # fmt: skip
        "Y": combine_kernels.combine(
            H=7168,
            K=8,
            world=4,
            wide=512,
            steps=14,
            cut=1,
            givers=8,
            stages=0,
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


def test_rings_of_half_a_blocks_warps_at_full_size():
    """Four pairs' rows a stage, of three, and a tile that TMA puts from, of eight warps and not of all 16."""
    how = experts.cut(7168, 2, 1, 1, combine.lines(K=8, stages=3, givers=8))
    kernel = combine_kernels.combine(
        H=7168, K=8, world=4, wide=how.wide, steps=how.steps, cut=how.cut, givers=8, stages=3, blocks=32,
        threads=512, dtype="bfloat16", weighted=True,
    )  # fmt: skip
    made = lowered(kernel)
    assert made.program.arena_bytes == 8 * (3 * 4 + 1) * how.wide * 2
    assert any("by TMA, 1024 elements at a time" in str(n) for n in made.program.notes)
    code = print_kernel(made.kernel).text
    assert "ts::store_run<32, ts::ROWS_" in code and "ts::cp_async<16>(&near_3[" in code
    assert "ring0_read % 3 >= 0" not in code


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
