"""The fixture ``ranks``: one test body on simulated ranks and, with --target cpu, on processes. The bodies
below run here on the simulator, and once more as a file of its own with --target cpu."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

import tilescale
import tilescale.language as T
from tilescale import comm
from tilescale.errors import CommError, FindingError, TileTypeError
from tilescale.testing.processes import RanksFailed


@tilescale.jit
def ring(N, dtype="float32", wait=True):
    @T.prim_func
    def main(
        A: T.Tensor((N,), dtype),
        k: T.int32,
        inbox: T.SymmTensor((N,), dtype),
        got: T.Signal((2,), keep=True),
        B: T.Tensor((N,), dtype),
    ):
        with T.Kernel(1):
            with T.Scale("device") as rank, n:
                T.copy(A, inbox, dst=(rank + k) % n, signal=got[0])
                if wait:
                    T.wait(got[0])
                T.copy(inbox, B)

    return main


@tilescale.jit(out_idx=-1)
def doubled(N):
    @T.prim_func
    def main(A: T.Tensor((N,), "float32"), B: T.Tensor((N,), "float32")):
        with T.Kernel(1):
            for i in T.Parallel(N):
                B[i] = A[i] * 2

    return main


def test_a_kernel_of_many_ranks(ranks):
    for kernel in (ring(40), ring.get_tir(40)):
        arrays = ranks(4).run(kernel, {"A": lambda rank: np.full(40, rank, "float32"), "k": 1})
        for rank, of in enumerate(arrays):
            assert (
                (of["B"] == (rank - 1) % 4).all()
                and (of["inbox"] == of["B"]).all()
                and of["got"].tolist() == [1, 0]
            )


def test_arguments_of_every_form(ranks):
    small = [np.arange(8, dtype="float32").astype(ml_dtypes.bfloat16) + r for r in range(3)]
    got = np.array([0, 5])
    arrays = ranks(3).run(ring(8, "bfloat16"), {"A": small, "k": [2, 2, 2], "got": got})
    for rank, of in enumerate(arrays):
        assert (
            (of["B"] == small[(rank - 2) % 3]).all()
            and of["B"].dtype == ml_dtypes.bfloat16
            and of["got"].tolist() == [1, 5]
        )
    assert got.tolist() == [0, 5]


def test_what_is_left_out_is_the_same_on_both(ranks):
    of = ranks(2).run(ring(64), {"k": 1})
    assert (
        (of[0]["B"] == of[1]["A"]).all()
        and (of[1]["B"] == of[0]["A"]).all()
        and not (of[0]["A"] == of[1]["A"]).any()
    )
    assert (of[1]["A"] == ranks(2, target="sim").run(ring(64).program(), {"k": 1})[1]["A"]).all()


def test_outputs_that_a_call_allocates(ranks):
    (of,) = ranks(1).run(doubled(4), {"A": np.arange(4, dtype="float32")})
    assert of["B"].tolist() == [0, 2, 4, 6]


def test_a_function_on_every_rank(ranks):
    def program(start: int) -> tuple[float, float]:
        comm.init()
        rank, n = comm.rank(), comm.world_size()
        inbox, got, b = comm.empty(8, like="numpy"), comm.signals(2, like="numpy"), np.zeros(8, "float32")
        ring(8)(np.full(8, start + rank, "float32"), 1, inbox, got, b)
        comm.barrier()
        return float(b[0]), float(comm.peer(inbox, (rank + 1) % n)[0])

    assert ranks(3).call(program, 10) == [(12, 10), (10, 11), (11, 12)]


def test_a_fault_is_an_error(ranks):
    made = ranks(3)
    if made.target == "sim":  # processes may well be lucky
        for run in (lambda: made.run(ring(8, wait=False), {"k": 1}), lambda: made.call(_without_wait)):
            with pytest.raises(FindingError, match="race: this reads inbox") as caught:
                run()
            assert "race" in caught.value.report.kinds


def _without_wait() -> None:
    comm.init()
    inbox, got = comm.zeros(8, like="numpy"), comm.signals(2, like="numpy")
    ring(8, wait=False)(np.zeros(8, "float32"), 1, inbox, got, np.zeros(8, "float32"))


def test_a_rank_that_fails(ranks):
    def program() -> None:
        comm.init()
        if comm.rank() == 1:
            raise KeyError("lost")
        comm.barrier()

    with pytest.raises(KeyError if ranks(2).target == "sim" else RanksFailed, match="lost"):
        ranks(2).call(program)


# ---- about the fixture itself


def test_the_choice_of_a_target(ranks):
    assert ranks(2, target="cpu").target == "cpu"
    with pytest.raises(ValueError, match="none of sim, cpu"):
        ranks(2, target="gpu")
    with pytest.raises(TileTypeError, match=r"takes a kernel, and this is a int"):
        ranks(2).run(3)  # type: ignore[arg-type]


def test_kernels_made_before_are_not_mixed_up_with_simulated_ones(ranks):
    a = np.ones(4, "float32")
    assert doubled(4).target == "cpu"
    assert (
        ranks(2, target="sim").call(lambda: (doubled(4).target, doubled(4)(a).tolist()))
        == [("sim", [2, 2, 2, 2])] * 2
    )
    assert doubled(4).target == "cpu" and doubled(4)(a).tolist() == [2, 2, 2, 2]
    with pytest.raises(CommError, match="not initialised"):
        ranks(1, target="sim").call(comm.barrier)


def test_the_same_bodies_on_processes(tmp_path: Path, clean_env):
    text = Path(__file__).read_text()
    (tmp_path / "test_both.py").write_text(text[: text.index("# ---- about the fixture itself")])
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "tilescale.testing",
        "-p",
        "no:cacheprovider",
        "--target",
        "cpu",
        str(tmp_path),
    ]
    done = subprocess.run(command, cwd=tmp_path, env=clean_env, capture_output=True, text=True, timeout=120)
    bodies = len(re.findall(r"^def test_", text[: text.index("# ---- about")], re.MULTILINE))
    assert done.returncode == 0 and f"{bodies} passed" in done.stdout, done.stdout + done.stderr


def test_a_failure_shows_the_finding_and_not_the_fixture(tmp_path: Path, clean_env):
    test = tmp_path / "test_it.py"
    test.write_text(
        "import tilescale.language as T\n\n\ndef test_it(ranks):\n    @T.prim_func\n    def main(F: T.SymmTensor((8,), 'int32')):\n"
        "        with T.Kernel(1), T.Scale('device') as rank, n:\n            T.copy(F, F, dst=n)\n\n    ranks(2).run(main)\n"
    )
    argv = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "-p",
        "tilescale.testing",
        str(test),
    ]
    ran = subprocess.run(argv, cwd=tmp_path, env=clean_env, capture_output=True, text=True, timeout=120)
    assert ran.returncode == 1 and "no-such-rank" in ran.stdout, ran.stdout + ran.stderr
    assert "given = each_rank" not in ran.stdout and "done.report" not in ran.stdout
