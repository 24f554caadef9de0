"""``@tilescale.autotune`` in one process: what is tried, what wins, what is remembered, what is skipped and
said."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

import tilescale
import tilescale.language as T
from tests.kernels import refused
from tilescale import env, tuning
from tilescale.errors import TileError, TileTypeError, TileValueError
from tilescale.profiler import Profiler
from tilescale.tuning import Autotuned, tuner


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    native = env.CACHE_DIR.get() / "native"
    native.mkdir(parents=True, exist_ok=True)
    (tmp_path / "native").symlink_to(native)
    monkeypatch.setenv("TILESCALE_CACHE_DIR", str(tmp_path))
    return tmp_path


@pytest.fixture
def latencies(monkeypatch: pytest.MonkeyPatch) -> dict[str, float]:
    """Milliseconds by a kernel's label, instead of measured ones; what was measured is noted under
    ``calls``."""
    table: dict[str, float] = {"calls": 0}

    def bench(self: Profiler, fn=None, **options) -> float:
        table["calls"] += 1
        self.kernel(*self.inputs())
        return next((ms for part, ms in table.items() if part in self.kernel.label), 9.0)

    monkeypatch.setattr(Profiler, "do_bench", bench)
    return table


def copy_factory():
    @tilescale.jit(out_idx=-1)
    def copy(n, block=8, extra=0):
        @T.prim_func
        def main(A: T.Tensor((n,), "float32"), B: T.Tensor((n,), "float32")):
            with T.Kernel(T.ceildiv(n, block)) as bx:
                s = T.alloc_shared((block,), "float32")
                T.copy(A[bx * block], s)
                for i in T.Parallel(block):
                    s[i] += extra
                T.copy(s, B[bx * block])

        return main

    return copy


BLOCKS = [{"block": 4}, {"block": 16}, {"block": 8}]


def test_the_fastest_wins_and_is_remembered(latencies: dict[str, float]):
    latencies["block=16"] = 1.0
    tuned = tilescale.autotune(copy_factory(), configs=BLOCKS)
    kernel = tuned(32)
    a = torch.randn(32)
    assert kernel.config == {"block": 16} and kernel.latency == 1.0 and kernel(a).equal(a)
    assert [(t.config["block"], t.latency) for t in tuned.trials] == [(4, 9.0), (16, 1.0), (8, 9.0)]
    assert tuned(32) is kernel and tuned(n=32).config == kernel.config and latencies["calls"] == 3
    assert tuned(33).config == {"block": 16} and latencies["calls"] == 6


def test_the_choice_outlives_the_process(latencies: dict[str, float]):
    latencies["block=8"] = 1.0
    tilescale.autotune(copy_factory(), configs=BLOCKS)(32)
    latencies["block=8"], latencies["block=4"] = 5.0, 0.5
    again = tilescale.autotune(copy_factory(), configs=BLOCKS)(32)
    assert again.config == {"block": 8} and again.latency == 1.0 and latencies["calls"] == 3
    # Another list, another search.
    assert tilescale.autotune(copy_factory(), configs=BLOCKS[:2])(32).config == {"block": 4}


def test_a_damaged_choice_is_searched_again(latencies: dict[str, float], cache: Path):
    tilescale.autotune(copy_factory(), configs=BLOCKS)(32)
    (note,) = (cache / "tuned").iterdir()
    for text in ("", "{", '{"index": 99, "latency": 1}', "[]"):
        note.write_text(text)
        before = latencies["calls"]
        assert tilescale.autotune(copy_factory(), configs=BLOCKS)(32).config == {"block": 4}
        assert latencies["calls"] == before + 3


def test_what_is_given_is_not_tuned(latencies: dict[str, float]):
    tuned = tilescale.autotune(copy_factory(), configs={"block": [4, 8], "extra": [0, 1]})
    latencies["extra=1"] = 2.0
    assert tuned(16).config == {"block": 4, "extra": 1} and latencies["calls"] == 4
    assert tuned(16, extra=0).config == {"block": 4} and latencies["calls"] == 6
    fixed = tuned(16, block=16)  # on no list: nothing to choose
    assert fixed.config is None and latencies["calls"] == 6
    assert tuned(16, 8, 1) is tuned.jitted(16, 8, 1) and latencies["calls"] == 6


def test_configurations_from_the_arguments(latencies: dict[str, float]):
    seen = []

    def configs(n, **more):
        seen.append((n, more))
        return [{"block": b} for b in (8, 16) if b <= n]

    tuned = tilescale.autotune(configs=configs)(copy_factory())
    assert isinstance(tuned, Autotuned) and tuned.__name__ == "copy"
    assert (
        tuned(8).config == {"block": 8}
        and [t.config for t in tuned.trials] == [{"block": 8}]
        and seen == [(8, {})]
    )


def test_failing_configurations_are_skipped_and_said(
    latencies: dict[str, float], capfd: pytest.CaptureFixture[str]
):
    tuned = tilescale.autotune(copy_factory(), configs=[{"block": -1}, {"block": 8}])
    assert tuned(16).config == {"block": 8}
    assert "autotune of copy: block=-1 is skipped: the grid has extent -16" in capfd.readouterr().err
    assert tuned.trials[0].latency is None and tuned.trials[0].error == "the grid has extent -16"


def test_wrong_results_are_skipped(latencies: dict[str, float]):
    latencies["extra=1"] = 0.5
    tuned = tilescale.autotune(copy_factory(), configs={"extra": [0, 1]}, ref_prog=lambda a: a)
    assert tuned(16).config == {"extra": 0}
    assert "the result differs from the reference in 16 of 16" in tuned.trials[1].error


def test_nothing_that_works_is_an_error(latencies: dict[str, float]):
    tuned = tilescale.autotune(copy_factory(), configs=[{"block": -1}, {"block": 0}])
    text = "autotune of copy: none of 2 configurations works\n  block=-1: the grid has extent -16\n  block=0: T.ceildiv(16, 0)"
    with refused(TileError, text):
        tuned(16)


def test_faults_of_the_program_are_not_the_configurations(latencies: dict[str, float]):
    def broken(a):
        raise ZeroDivisionError("mine")

    with pytest.raises(ZeroDivisionError):
        tilescale.autotune(copy_factory(), configs=BLOCKS, ref_prog=broken)(16)


def test_dynamic_extents_and_real_times():
    tuned = tilescale.autotune(copy_factory(), configs=BLOCKS, extents={"n": 64}, warmup=1, rep=3)
    kernel = tuned(T.dynamic("n"))
    assert all(0 < t.latency < 100 for t in tuned.trials) and kernel.latency == min(
        t.latency for t in tuned.trials
    )
    a = torch.randn(100)
    assert kernel(a).equal(a)


def test_eager_kernels_are_tuned_on_copies(latencies: dict[str, float]):
    @tilescale.jit
    def bump(A, block: int = 4):
        N = T.const("N")
        A: T.Tensor((N,), T.float32)
        B = T.empty((N,), T.float32)
        with T.Kernel(T.ceildiv(N, block)) as bx:
            for i in T.Parallel(block):
                B[bx * block + i] = block
                A[bx * block + i] += 1
        return B

    latencies["block=8"] = 1.0
    tuned = tilescale.autotune(bump, configs=BLOCKS)
    a = torch.zeros(16)
    assert tuned(a).tolist() == [8] * 16 and a.tolist() == [1] * 16  # once, though three were tried
    assert tuned(a).tolist() == [8] * 16 and latencies["calls"] == 3
    assert tuned(torch.zeros(24)).tolist() == [8] * 24 and latencies["calls"] == 6
    assert tuned(a, block=2).tolist() == [2] * 16 and latencies["calls"] == 6


def test_what_is_refused():
    with refused(
        TileTypeError,
        "a configuration of copy sets 'blocks', which is no parameter",
        expected="n, block, extra",
    ):
        tilescale.autotune(copy_factory(), configs=[{"blocks": 4}])(16)
    with refused(TileValueError, "autotune of copy has no configurations"):
        tilescale.autotune(copy_factory(), configs=[])(16)
    with refused(TileTypeError, "@tilescale.autotune has no configs"):
        tilescale.autotune(copy_factory())
    with refused(TileTypeError, "above a function", expected="above @tilescale.jit above a def"):
        tilescale.autotune(configs=BLOCKS)(lambda n: n)


def test_the_bar_is_for_terminals(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], latencies: dict[str, float]
):
    tilescale.autotune(copy_factory(), configs=BLOCKS)(16)
    assert capfd.readouterr().err == ""
    shown: list[str] = []

    class Terminal:
        def isatty(self) -> bool:
            return True

        def write(self, text: str) -> None:
            shown.append(text)

        def flush(self) -> None:
            return None

    monkeypatch.setattr(tuner.sys, "stderr", Terminal())
    tilescale.autotune(copy_factory(), configs=BLOCKS)(17)
    text = "".join(shown)
    assert "autotune copy" in text and "3/3" in text and "9 ms: block=4" in text


# ---- the cost model


@tilescale.jit(out_idx=-1, target="cuda:sm_90a")
def modelled(M, N, K, BM=64, BN=64, stages=2, threads=128):
    @T.prim_func
    def main(
        A: T.Tensor((M, K), "bfloat16"), B: T.Tensor((K, N), "bfloat16"), C: T.Tensor((M, N), "bfloat16")
    ):
        with T.Kernel(N // BN, M // BM, threads=threads) as (bx, by):
            a, b, acc = (
                T.alloc_shared((BM, 64), "bfloat16"),
                T.alloc_shared((64, BN), "bfloat16"),
                T.alloc_fragment((BM, BN), "float32"),
            )
            T.clear(acc)
            for k in T.Pipelined(K // 64, num_stages=stages):
                T.copy(A[by * BM, k * 64], a)
                T.copy(B[k * 64, bx * BN], b)
                T.gemm(a, b, acc)
            T.copy(acc, C[by * BM, bx * BN])

    return main


MANY = [
    {"BM": m, "BN": n, "stages": s, "threads": t}
    for m in (64, 128, 256)
    for n in (64, 128, 256)
    for s in (2, 3, 4, 5, 6)
    for t in (128, 256)
]


def test_configurations_are_ranked_without_compiling(cache: Path):
    ranked = tuning.rank(modelled, MANY, (4096, 4096, 4096))
    assert len(ranked) == len(MANY) and [p.latency for p in ranked] == sorted(p.latency for p in ranked)
    assert ranked[0].config["BM"] * ranked[0].config["BN"] >= 128 * 128 and 0.13 < ranked[0].latency < 0.3
    assert (
        "no room for a block" in ranked[-1].error
        and ranked[-1].config["BM"] == ranked[-1].config["BN"] == 256
    )
    assert not (cache / "kernels").exists(), "nothing was compiled"
    with refused(TileError, "for GPUs with known figures alone"):
        tuning.rank(modelled, MANY[:1], (4096, 4096, 4096), target="cpu")


def test_only_the_most_promising_are_measured(monkeypatch: pytest.MonkeyPatch):
    """Measured against a table: compiling and running need a GPU."""
    tried = []

    def measured(self: Autotuned, trial: tuner.Trial, given, args, kwargs) -> None:
        tried.append(trial.config)
        if trial.config["stages"] == 5:
            trial.error = "does not run"
        else:
            trial.latency = 1.0 / trial.config["stages"]

    monkeypatch.setattr(Autotuned, "_try", measured)
    monkeypatch.setattr(
        Autotuned, "_remember", lambda self, key, configs, found: (configs[found[0]], found[1])
    )
    tuned = tilescale.autotune(configs=MANY, top=10)(modelled)
    config, _ = tuned._find("key", {"M": 4096, "N": 4096, "K": 4096}, (4096, 4096, 4096), {})
    assert sum(t.latency is not None for t in tuned.trials) == 10, "what fails does not count"
    assert config["stages"] == 6 and all(t.predicted is not None for t in tuned.trials)
    best = sorted(
        (t for t in tuned.trials if t.error is None or "room" not in t.error), key=lambda t: t.predicted
    )
    assert tried == [t.config for t in best[: len(tried)]]


def test_all_are_measured_where_nothing_is_predicted(latencies, capfd, monkeypatch):
    monkeypatch.setenv("TILESCALE_LOG", "info")
    tuned = tilescale.autotune(configs=BLOCKS, top=1)(copy_factory())
    latencies.update({"block=16": 1.0, "block=4": 2.0, "block=8": 3.0})
    assert tuned(100).config == {"block": 16} and latencies["calls"] == 3
    assert "nothing is predicted for this target" in capfd.readouterr().err


def test_neighbouring_shapes_may_share_a_choice(latencies):
    latencies.update({"block=16": 1.0, "block=4": 2.0, "block=8": 3.0})
    tuned = tilescale.autotune(configs=BLOCKS, by="class")(copy_factory())
    assert tuned(100).config == tuned(127).config == {"block": 16} and latencies["calls"] == 3
    tuned(128)
    assert latencies["calls"] == 6
    tuned(3), tuned(4)
    assert latencies["calls"] == 12, "small numbers stay themselves"
    again = tilescale.autotune(configs=BLOCKS, by="class")(copy_factory())
    assert again(90).config == {"block": 16} and latencies["calls"] == 12, "the disk knows the class"
    with refused(TileValueError, "top=0"):
        tilescale.autotune(configs=BLOCKS, top=0)


@pytest.mark.parametrize("dynamic", [False, True])
def test_an_eager_kernel_is_tuned_ahead_of_any_call(dynamic: bool):
    @tilescale.autotune(configs=[{"block": 8}, {"block": 16}], rep=1, warmup=1)
    @tilescale.jit(target="cpu")
    def twice(A, block: int = 4):
        N = T.dynamic("N") if dynamic else T.const("N")
        A: T.Tensor((N,), "float32")
        B = T.empty((N,), "float32")
        with T.Kernel(T.ceildiv(N, block), threads=32) as b:
            for i in T.Parallel(block):
                if b * block + i < N:
                    B[b * block + i] = 2 * A[b * block + i]
        return B

    kernel = twice.compile(N=48)
    assert kernel.config in ({"block": 8}, {"block": 16}) and kernel.latency > 0
    a = np.arange(48, dtype="float32")
    np.testing.assert_array_equal(kernel(a), 2 * a)
