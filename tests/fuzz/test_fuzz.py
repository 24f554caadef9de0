"""A sample of the fuzzer's seeds; ``python -m tests.fuzz`` runs any number of others."""

from __future__ import annotations

import numpy as np
import pytest

from tests.fuzz import picks
from tests.fuzz.compare import Difference, agree, compare, kernel_of, simulated
from tests.fuzz.draw import draw
from tests.fuzz.pool import failing
from tests.fuzz.programs import Param, Program
from tests.fuzz.ranks import draw_ranks
from tests.fuzz.shrink import shrink
from tests.fuzz.values import Val


@pytest.mark.parametrize("first", range(0, 24, 8))
def test_programs_of_one_rank(first: int):
    for seed in range(first, first + 8):
        compare(draw(seed))


@pytest.mark.parametrize("seed", [900175, 900183])
def test_executors_read_what_they_may(seed: int):
    """Programs in which a T.Scale could reach for the block's fragments."""
    compare(draw(seed))


@pytest.mark.parametrize("ranks", [2, 3])
def test_programs_of_several_ranks(ranks: int):
    assert failing([draw_ranks(seed, ranks) for seed in range(4)]) == [None] * 4


PICKS = """import tilescale.language as T


@T.prim_func
def main(A0: T.Tensor((3, 9), "float32"), O0: T.Tensor((3, 2), "float32"), O1: T.Tensor((3, 2), "int32")):
    with T.Kernel(1):
        t0 = T.alloc_shared((3, 9), "float32")
        t1, t2 = T.alloc_shared((3, 2), "float32"), T.alloc_shared((3, 2), "int32")
        T.copy(A0, t0)
        T.topk(t0, t1, t2, 2)
        T.copy(t1, O0)
        T.copy(t2, O1)
"""


def test_picks_are_drawn_and_judged_by_numpy(monkeypatch: pytest.MonkeyPatch):
    """Seeds have each of the three; a simulator that takes the last of equal elements, or a number before a
    NaN, is found, whatever the CPU says."""
    texts = "".join(draw(seed).text for seed in range(40))
    assert all(f"T.{word}(" in texts for word in ("argmax", "argmin", "topk"))

    val = Val("float32", -4.0, 4.0, special=True)
    params = [
        Param("A0", "tensor", "float32", (3, 9), "", "special", 3),
        Param("O0", "tensor", "float32", (3, 2), "", "zero", 0, val),
        Param("O1", "tensor", "int32", (3, 2), "", "zero", 0, Val("int32", 0, 8)),
    ]
    program = Program(0, PICKS, params, {}, 1, False)
    assert np.isnan(program.args(0)["A0"]).any()
    compare(program)
    argsort = np.argsort
    for wrong in (
        lambda x, *how, **more: argsort(x[..., ::-1], *how, **more)[..., ::-1],
        lambda x, *how, **more: argsort(np.nan_to_num(x, nan=-np.inf), *how, **more),
    ):
        monkeypatch.setattr(np, "argsort", wrong)
        with pytest.raises(Difference, match=r"T\.topk of "):
            compare(program)


@pytest.mark.parametrize("least", [False, True])
def test_the_reference_of_picks(least: bool):
    """Against Python's stable sort."""
    x = np.array([[2, np.nan, -0.0, 0.0, np.inf, 2, np.nan, -np.inf], [1, 1, 1, 1, 1, 1, 1, 1]])
    for line, got in zip(x, picks.places(x, 1, 8, least), strict=True):
        key = lambda n, line=line: (line[n] == line[n], line[n] if least else -line[n])  # noqa: E731
        nans = [n for n in range(8) if line[n] != line[n]]
        numbers = sorted((n for n in range(8) if n not in nans), key=key)
        assert got.tolist() == nans + numbers


def test_a_seed_is_one_program():
    assert draw(11).text == draw(11).text != draw(12).text
    assert draw_ranks(11, 2).text == draw_ranks(11, 2).text


def test_a_difference_is_told_and_made_smaller():
    """A wrong result is seen wherever it is; of the program that made it what matters is left."""
    program = draw(5)
    kernel = kernel_of(program.text)
    want, got = simulated(kernel, program), simulated(kernel, program)
    agree(program, want, got, "again", exact=True)
    name = next(p.name for p in program.params if p.val is not None)
    got[0][name].flat[-1] = (
        got[0][name].flat[-1] + 1 if got[0][name].dtype != bool else ~got[0][name].flat[-1]
    )
    with pytest.raises(Difference, match=name):
        agree(program, want, got, "again", exact=True)

    least = shrink(program, lambda smaller: f"{name}[" in smaller.text or f", {name}" in smaller.text)
    assert least.text.count("\n") < program.text.count("\n")
    assert [p.name for p in least.params] == [name]


FAULTY = """import tilescale.language as T


@T.prim_func
def main(O0: T.Tensor((8,), "int32"), n: T.int32):
    with T.Kernel(1):
        t0 = T.alloc_shared((8,), "int32")
        for i in T.Parallel(8):
            O0[i] = t0[i + n]
"""


def test_a_program_that_is_not_well_formed_fails():
    """Before anything is compared: it reads outside its tile, which nobody has written."""
    out = Param("O0", "tensor", "int32", (8,), "", "zero", 0, Val("int32", 0, 0))
    why = failing([Program(0, FAULTY, [out], {"n": 3}, 1, False)])[0] or ""
    assert "a finding in a program without fault" in why and "out-of-bounds" in why and "uninitialised" in why
