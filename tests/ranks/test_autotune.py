"""Autotuning on several ranks: all measure together and keep the same configuration."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

import tilescale
import tilescale.language as T
from tests.ranks.harness import run_ranks
from tilescale import env


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    native = env.CACHE_DIR.get() / "native"
    native.mkdir(parents=True, exist_ok=True)
    (tmp_path / "native").symlink_to(native)
    monkeypatch.setenv("TILESCALE_CACHE_DIR", str(tmp_path))
    return tmp_path


def shift_factory() -> Any:
    """Each rank's tile goes to its right neighbour, which waits for it."""

    @tilescale.jit
    def shift(n, block=8):
        @T.prim_func
        def main(
            A: T.Tensor((n,), "float32"),
            S: T.SymmTensor((n,), "float32"),
            f: T.Signal((1,)),
            C: T.Tensor((n,), "float32"),
        ):
            with T.Kernel(T.ceildiv(n, block), threads=32) as bx:
                with T.Scale("device") as (rank, world):
                    T.copy(A[bx * block : bx * block + block], S[bx * block], dst=(rank + 1) % world)
                    T.signal(f[0], dst=(rank + 1) % world)
                    T.wait(f[0], T.ceildiv(n, block))
                    T.copy(S[bx * block : bx * block + block], C[bx * block])

        return main

    return shift


def measured(by_rank: dict[int, dict[int, float]]) -> Any:
    """A do_bench that runs the kernel and returns a made-up time, by rank and block size."""
    from tilescale import comm

    def bench(self: Any, fn: Any = None, **options: Any) -> float:
        self.kernel(*self.inputs())
        block = int(self.kernel.label.split("block=")[1].rstrip(")"))
        return by_rank[comm.rank()][block]

    return bench


def test_the_slowest_rank_counts_and_all_agree():
    # Alone rank 0 would take 4 and rank 1 would take 16; 8 is best where the slower one counts.
    times = {0: {4: 1.0, 8: 2.0, 16: 9.0}, 1: {4: 9.0, 8: 3.0, 16: 1.0}}

    def work() -> Any:
        from tilescale import comm
        from tilescale.profiler import Profiler

        Profiler.do_bench = measured(times)  # type: ignore[method-assign]  # in this forked process only
        tuned = tilescale.autotune(shift_factory(), configs={"block": [4, 8, 16]})
        kernel = tuned(32)
        again = tilescale.autotune(shift_factory(), configs={"block": [4, 8, 16]})
        return (
            kernel.config,
            kernel.latency,
            [t.latency for t in tuned.trials],
            again(32).config,
            again.trials,
            comm.rank(),
        )

    for rank, result in enumerate(run_ranks(2, work)):
        assert result == ({"block": 8}, 3.0, [9.0, 3.0, 9.0], {"block": 8}, [], rank)


def test_a_configuration_that_fails_on_one_rank_is_skipped_on_all():
    def work() -> Any:
        from tilescale import comm
        from tilescale.profiler import Profiler
        from tilescale.tuning import tuner

        Profiler.do_bench = measured({r: {4: 1.0, 8: 2.0} for r in range(3)})  # type: ignore[method-assign]
        compiled = tuner.Autotuned._compile

        def compile_here(self: Any, config: Any, args: Any, kwargs: Any) -> Any:
            assert not (comm.rank() == 1 and config["block"] == 4), "no luck here"
            return compiled(self, config, args, kwargs)

        tuner.Autotuned._compile = compile_here  # type: ignore[method-assign]
        tuned = tilescale.autotune(shift_factory(), configs={"block": [4, 8]})
        return tuned(32).config, [t.error for t in tuned.trials]

    assert run_ranks(3, work) == [
        ({"block": 8}, ["failed on another rank", None]),
        ({"block": 8}, ["no luck here", None]),
        ({"block": 8}, ["failed on another rank", None]),
    ]


def test_rank_0_decides_what_the_disk_says(cache: Path):
    """A note that appears while the ranks look must not divide them."""

    def work() -> Any:
        from tilescale import comm
        from tilescale.profiler import Profiler

        comm.init()
        Profiler.do_bench = measured({r: {4: 1.0, 8: 2.0} for r in range(2)})  # type: ignore[method-assign]
        if comm.rank() == 1:
            os.environ["TILESCALE_CACHE_DIR"] = str(cache / "elsewhere")
            (cache / "elsewhere").mkdir()
            (cache / "elsewhere" / "native").symlink_to(cache / "native")
        first = tilescale.autotune(shift_factory(), configs={"block": [4, 8]})
        second = tilescale.autotune(shift_factory(), configs={"block": [4, 8]})
        return first(32).config, len(first.trials), second(32).config, len(second.trials)

    assert run_ranks(2, work) == [({"block": 4}, 2, {"block": 4}, 0)] * 2
    assert not (cache / "elsewhere" / "tuned").exists()


def test_real_times_and_results():
    def work() -> Any:
        import torch

        from tilescale import comm

        tuned = tilescale.autotune(shift_factory(), configs={"block": [8, 16]}, warmup=1, rep=5)
        kernel = tuned(64)
        mine = torch.arange(64.0) + 1000 * comm.rank()
        c = torch.zeros(64)
        kernel(mine, comm.empty((64,)), comm.signals(1), c)
        return kernel.config, kernel.latency, c[0].item(), c[63].item()

    results = run_ranks(2, work)
    assert results[0][:2] == results[1][:2] and 0 < results[0][1] < 1000
    assert [r[2:] for r in results] == [(1000.0, 1063.0), (0.0, 63.0)]


def test_ranks_exchange_numbers():
    def work() -> Any:
        from tilescale import agree, comm

        comm.init()
        r = comm.rank()
        return agree.table([r, 10 * r]), agree.largest([r, -r]), agree.first([r + 5]), agree.ranks()

    expected = ([[0, 0], [1, 10], [2, 20]], [2, 0], [5], 3)
    assert run_ranks(3, work) == [expected] * 3
