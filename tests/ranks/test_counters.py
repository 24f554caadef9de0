"""Signals of every kind, looks at counters, atomic updates of peers and puts of numbers between processes."""

from __future__ import annotations

import numpy as np
import torch

from tests.kernels import run
from tests.ranks.harness import run_ranks
from tests.unit.ops import test_look, test_put, test_remote_atomic, test_signals, test_sums_into_peers
from tilescale import comm

R = 3


def test_in_processes():
    marks = {op: run(test_signals.watermark(op)) for op in ("max", "min")}
    several = run(test_signals.all_of_three(lambda s, n: s[0:3]))
    polled, sizes = run(test_look.polled()), run(test_put.exchange())
    tickets = {dtype: run(test_remote_atomic.tickets(dtype)) for dtype in ("int32", "float32")}
    handed = run(test_remote_atomic.handed_over())
    adds = {
        dtype: run(test_sums_into_peers.gathered(dtype))
        for dtype in ("float32", "float16", "bfloat16", "int32")
    }

    def work():
        comm.init()
        rank = comm.rank()
        x, s, o = comm.full(8, rank, "float32"), comm.signals(3), torch.zeros(8)
        for made in marks.values():
            x.fill_(rank)
            made(x, s, o)
            assert rank or (o == 2).all()
        rows, out = comm.full((3, 8), rank, "float32"), torch.zeros(3, 8)
        several(rows, s, out)
        assert out[:, 0].tolist() == [0, 1, 2]
        two, row = comm.signals(2), comm.zeros(8, "int32")
        for _ in range(20):
            x.fill_(rank + 1)
            polled(x, two, o)
            assert rank != 0 or (o == 2).all()
        table, halves, told = (
            comm.zeros((R, 2), "int32"),
            comm.zeros(R, "float16"),
            torch.zeros(R, 2, dtype=torch.int32),
        )
        sizes(table, halves, two, told)
        assert told[:, 1].tolist() == [k * 10 + rank for k in range(R)] and halves.tolist() == [0.5, 1.5, 2.5]
        for dtype, made in tickets.items():
            count, places = comm.zeros(2, dtype), torch.zeros(2, dtype=getattr(torch, dtype))
            row.fill_(0)
            made(count, row, places)
            assert rank or (int(count[0]) == 2 * R and sorted(row[: 2 * R].tolist()) == [1, 1, 2, 2, 3, 3])
        flag = comm.zeros(1, "int32")
        for _ in range(20):
            x.fill_(rank + 1)
            flag.fill_(0)
            handed(x, flag, o)
            assert rank != 0 or (o == 2).all()
        for dtype, made in adds.items():
            kind = getattr(torch, dtype)
            given = torch.arange(128).reshape(2, 64).to(kind) + rank
            total, two, out = comm.zeros((2, 64), dtype), comm.signals(2), torch.zeros(2, 64, dtype=kind)
            for _ in range(20):
                total.fill_(1)
                made(given, total, two, out)
                assert (out == (R * torch.arange(128).reshape(2, 64) + 4).to(kind)).all(), dtype
        return np.asarray(places).tolist()

    assert sorted(p for places in run_ranks(R, work) for p in places) == list(range(2 * R))
