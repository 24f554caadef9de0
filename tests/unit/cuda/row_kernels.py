"""Kernels whose rows go to other ranks by TMA, beside the warps that sent them; and their arguments."""

from __future__ import annotations

from typing import Any

import numpy as np

import tilescale.language as T
from tests.unit.cuda.emulated import data, empty


def spread(stages: int, world: int, late: bool = True, tokens: int = 23, wide: int = 64) -> Any:
    """Each token's row goes to the ranks that have a slot for it, as experts' tokens do."""

    @T.prim_func
    def spread_rows(
        X: T.Tensor((tokens, wide), "float32"),
        slots: T.Tensor((tokens, world), "int32"),
        rows: T.SymmTensor((world * tokens, wide), "float32"),
    ):
        with T.Kernel(2, threads=64) as b, T.Scale("device") as (rank, n), T.Scale("warp") as (w, of):
            x = T.alloc_shared((wide,), "float32")
            for r in T.Pipelined(T.ceildiv(tokens - w * 2 - b, of * 2), num_stages=stages):
                i = w * 2 + b + r * of * 2
                T.copy(X[i, 0:wide], x)
                for hop in T.serial(1, n + 1):
                    d = (rank + hop) % n
                    if slots[i, d] >= 0:
                        T.copy(
                            x,
                            rows[rank * tokens + slots[i, d], 0:wide],
                            dst=d,
                            prefer_instruction="tma",
                            blocking=not late,
                        )

    return spread_rows


def told(world: int, late: bool = True, before: bool = True) -> Any:
    """A warp's rows, one behind the other from the same tile, then a signal that tells of them."""

    @T.prim_func
    def told_of_rows(
        X: T.Tensor((8, 32), "float32"),
        rows: T.SymmTensor((world, 8, 32), "float32"),
        here: T.Signal((world,)),
        Y: T.Tensor((world, 8, 32), "float32"),
    ):
        with T.Kernel(1, threads=64), T.Scale("device") as (rank, n):
            with T.Scale("warp") as (w, of):
                x = T.alloc_shared((32,), "float32")
                for i in T.serial(w, 8, step=of):
                    T.copy(X[i, 0:32], x)
                    T.copy(
                        x,
                        rows[rank, i, 0:32],
                        dst=(rank + 1) % n,
                        prefer_instruction="tma",
                        blocking=not late,
                    )
                T.signal(here[rank], dst=(rank + 1) % n)
            source = (rank + n - 1) % n
            T.wait(here[source], 2)
            if before:
                T.copy(rows[source, 0:8, 0:32], Y[source, 0:8, 0:32])

    return told_of_rows


def of_tokens(world: int, tokens: int = 23, wide: int = 64) -> list[dict[str, Any]]:
    made = []
    for rank in range(world):
        draw = np.random.default_rng(rank)
        goes = draw.random((tokens, world)) < 0.7
        slots = np.where(goes, goes.cumsum(0) - 1, -1).astype(np.int32)
        made.append({"X": data((tokens, wide), "float32", rank), "slots": slots})
    return made


def of_told(world: int) -> list[dict[str, Any]]:
    return [
        {
            "X": data((8, 32), "float32", r),
            "rows": empty((world, 8, 32), "float32"),
            "here": np.zeros(world, np.int64),
            "Y": empty((world, 8, 32), "float32"),
        }
        for r in range(world)
    ]
