"""Random tile programs: what the static checks say against the simulator, and against counting everything
out.

Proven is never wrong, and neither is refuted: for no number that a caller may pass, and for no number of
ranks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import tilescale.language as T
from tilescale.compiler.checks.run import launch
from tilescale.compiler.static import check
from tilescale.compiler.static.obligations import KINDS, PROVEN, REFUTED
from tilescale.errors import TileError

NUMBERS = (0, 1, 3, 6)
RANKS = (1, 2, 3, 4)


def both(strategy: Any, few: int) -> Any:
    """The test twice: a few examples always, many under the marker slow."""

    def wrap(body: Any) -> Any:
        @pytest.mark.parametrize("amount", ["few", pytest.param("many", marks=pytest.mark.slow)])
        def test(amount: str) -> None:
            size = few if amount == "few" else 100 * few
            settings(settings.get_profile("few"), max_examples=size)(given(strategy)(body))()

        test.__doc__ = body.__doc__
        return test

    return wrap


# ---- expressions: trees that are traced, and computed


def trees(names: tuple[str, ...], depth: int = 2) -> Any:
    """Indices made of ``names``: mostly affine, with quotients, remainders, limits and choices."""
    leaf = st.one_of(
        st.tuples(st.just("v"), st.sampled_from(names)), st.tuples(st.just("c"), st.integers(-1, 6))
    )
    inner = leaf
    for _ in range(depth):
        small = st.integers(1, 8)
        inner = st.one_of(
            leaf,
            st.tuples(st.sampled_from("+-"), inner, inner),
            st.tuples(st.sampled_from(["*", "//", "%"]), inner, small),
            st.tuples(st.sampled_from(["min", "max"]), inner, inner),
            st.tuples(st.just("?"), st.tuples(st.sampled_from(["<", "==", "!="]), inner, leaf), inner, inner),
        )
    return inner


def conditions(names: tuple[str, ...]) -> Any:
    one = st.tuples(st.sampled_from(["<", "==", "!="]), trees(names, 1), trees(names, 1))
    return st.one_of(one, st.tuples(st.sampled_from(["and", "or"]), one, one))


def build(e: Any, env: dict[str, Any]) -> Any:
    """A tree over the values of ``env``: device values give code, Python's give a number."""
    op, *args = e
    if op == "v":
        return env[args[0]]
    if op == "c":
        return args[0]
    a, b = (build(x, env) if isinstance(x, tuple) else x for x in args[:2])
    if op in ("min", "max"):
        return (T.min if op == "min" else T.max)(a, b)
    if op == "?":
        return (
            T.if_then_else(a, b, build(args[2], env))
            if not isinstance(a, bool)
            else b
            if a
            else build(args[2], env)
        )
    if op in ("and", "or"):
        return (
            (a and b if op == "and" else a or b)
            if isinstance(a, bool) and isinstance(b, bool)
            else joined(op, a, b)
        )
    return {
        "+": lambda: a + b, "-": lambda: a - b, "*": lambda: a * b, "//": lambda: a // b, "%": lambda: a % b,
        "<": lambda: a < b, "==": lambda: compared("==", a, b), "!=": lambda: compared("!=", a, b),
    }[op]()  # fmt: skip


def compared(op: str, a: Any, b: Any) -> Any:
    from tilescale.compiler.builder.values import compare

    if isinstance(a, int) and isinstance(b, int):
        return a == b if op == "==" else a != b
    return compare(op, a, b)


def joined(op: str, a: Any, b: Any) -> Any:
    from tilescale.compiler.builder.values import as_expr
    from tilescale.compiler.tvm_compat import tirx

    return (tirx.And if op == "and" else tirx.Or)(as_expr(a, "bool"), as_expr(b, "bool"))


# ---- tiles


@st.composite
def tile_programs(pick: Any) -> dict[str, Any]:
    def statement() -> dict[str, Any]:
        names = ("i", "j", "b", "q", "k") if pick(st.integers(0, 3)) == 0 else ("i", "j", "b", "q")
        two = pick(st.booleans())
        plain = pick(st.booleans())
        index = (("v", "i"), ("v", "j")) if plain and two else (pick(trees(names)), pick(trees(names)))
        if plain and not two:
            index = (("//", ("v", "i"), 4), ("%", ("v", "i"), 4))
        return {
            "lanes": (pick(st.sampled_from([4, 8, 12])), pick(st.sampled_from([1, 3, 4]))),
            "rounds": pick(st.integers(1, 3)),
            "index": index,
            "read": pick(st.one_of(st.none(), st.tuples(trees(names, 1), trees(names, 1)))),
            "guard": pick(st.one_of(st.none(), conditions(names))),
            "what": pick(st.sampled_from(["store", "store", "update", "global", "copy"])),
        }

    return {
        "blocks": pick(st.integers(1, 2)),
        "clear": pick(st.booleans()),
        "statements": [statement() for _ in range(pick(st.integers(1, 2)))],
    }


def tile_kernel(case: dict[str, Any]) -> Any:
    def body(s: dict[str, Any], tile: Any, other: Any, A: Any, C: Any, env: dict[str, Any]) -> None:
        x, y = (build(e, env) for e in s["index"])
        value = A[env["i"]] if s["read"] is None else tile[build(s["read"][0], env), build(s["read"][1], env)]
        if s["what"] == "update":
            tile[x, y] = tile[x, y] + value
        elif s["what"] == "global":
            C[x, y] = value
        else:
            tile[x, y] = value

    @T.prim_func
    def main(k: T.int32, A: T.Tensor((16,), "int32"), C: T.Tensor((8, 4), "int32")):
        with T.Kernel(case["blocks"]) as b:
            tile, other = T.alloc_shared((8, 4), "int32"), T.alloc_fragment((2, 4), "int32")
            T.clear(other)
            if case["clear"]:
                T.clear(tile)
            for s in case["statements"]:
                for q in T.serial(s["rounds"]):
                    if s["what"] == "copy":
                        low = build(s["index"][0], {"i": q, "j": q, "b": b, "q": q, "k": k})
                        T.copy(other, tile[low : low + 2, 0:4])
                    else:
                        for i, j in T.Parallel(*s["lanes"]):
                            env = {"i": i, "j": j, "b": b, "q": q, "k": k}
                            if s["guard"] is None:
                                body(s, tile, other, A, C, env)
                            else:
                                if build(s["guard"], env):
                                    body(s, tile, other, A, C, env)
            for i, j in T.Parallel(8, 4):
                C[i, j] = tile[i, j]

    return main


@both(tile_programs(), few=20)
def test_tiles_against_the_simulator(case: dict[str, Any]) -> None:
    """Collisions, tiles' bounds, reads of what nothing wrote: for every number that is passed the simulator
    agrees."""
    try:
        program = tile_kernel(case).trace()
    except TileError:
        return  # a constant that is refused as it is traced
    said = check(program, 400_000)
    found = []
    for k in NUMBERS:
        try:
            found.append(launch(program, 1, {"k": k}).report.kinds)
        except TileError:
            return  # a constant of a choice, which is refused as the nest is prepared
    for kind in ("collision", "bounds", "coverage"):
        word = KINDS[kind][1]
        mine = [o for o in said if o.kind == kind]
        if all(o.status == PROVEN for o in mine):
            assert not any(word in kinds for kinds in found), (kind, found)
        for o in mine:
            if o.status == REFUTED:
                assert all(word in kinds for kinds in found), (str(o.finding()), found)


# ---- ranks


@st.composite
def rank_programs(pick: Any) -> dict[str, Any]:
    names = ("rank", "n", "r", "b")
    row = ("rank", "r", "b")
    usual = [
        ("%", ("+", ("v", "rank"), ("c", 1)), "n"),
        ("%", ("+", ("v", "rank"), ("v", "r")), "n"),
        ("v", "r"),
        ("v", "rank"),
    ]
    peer = st.one_of(st.sampled_from(usual), trees(names, 1))
    index = st.one_of(st.sampled_from([("v", "rank"), ("v", "r"), ("c", 0), ("v", "b")]), trees(row, 1))
    return {
        "blocks": pick(st.integers(1, 3)),
        "rounds": pick(st.sampled_from([("v", "n"), ("-", ("v", "n"), ("c", 1)), ("c", 1), ("c", 2)])),
        "guard": pick(st.one_of(st.none(), conditions(names))),
        "peer": pick(peer),
        "row": pick(index),
        "column": pick(st.one_of(st.just(("v", "b")), trees(row, 1))),
        "counter": pick(index),
        "value": pick(st.integers(1, 2)),
        "awaited": pick(st.one_of(st.just(("c", 0)), index)),
        "needed": pick(
            st.one_of(
                st.sampled_from([("v", "n"), ("c", 1), ("+", ("v", "n"), ("c", 1))]),
                trees(("rank", "n", "b"), 1),
            )
        ),
        "waiting": pick(st.one_of(st.none(), conditions(("rank", "n", "b")))),
    }


def modulo(e: Any) -> Any:
    """Trees may take remainders by the number of ranks, which is a name."""
    return (
        e
        if not isinstance(e, tuple)
        else tuple(("v", "n") if x == "n" and e[0] == "%" else modulo(x) for x in e)
    )


def rank_kernel(case: dict[str, Any]) -> Any:
    @T.prim_func
    def main(A: T.Tensor((4,), "int32"), inbox: T.SymmTensor((8, 32), "int32"), s: T.Signal((8,))):
        with T.Kernel(case["blocks"]) as b:
            with T.Scale("device") as rank, n:
                for r in T.serial(build(case["rounds"], {"n": n})):
                    env = {"rank": rank, "n": n, "r": r, "b": b}
                    low, row = build(case["column"], env) * 4, build(case["row"], env)
                    peer, at = build(modulo(case["peer"]), env), build(case["counter"], env)
                    if case["guard"] is None:
                        T.copy(A, inbox[row, low : low + 4], dst=peer, signal=s[at], value=case["value"])
                    else:
                        if build(case["guard"], env):
                            T.copy(A, inbox[row, low : low + 4], dst=peer, signal=s[at], value=case["value"])
                env = {"rank": rank, "n": n, "b": b, "r": rank}
                if case["waiting"] is None:
                    T.wait(s[build(case["awaited"], env)], build(case["needed"], env))
                else:
                    if build(case["waiting"], env):
                        T.wait(s[build(case["awaited"], env)], build(case["needed"], env))

    return main


def counted(case: dict[str, Any], n: int) -> dict[str, bool]:
    """Which kinds fail on ``n`` ranks, by going through all executions."""
    sums: Counter[tuple[int, int]] = Counter()
    writers: dict[tuple[int, int, int], set[tuple[int, int]]] = {}
    wrong = {"peer": False, "counter": False, "wait": False, "overlap": False}
    for env in executions(case, n):
        if case["guard"] is not None and not build(case["guard"], env):
            continue
        peer, at = build(modulo(case["peer"]), env), build(case["counter"], env)
        wrong["peer"] |= not 0 <= peer < n
        wrong["counter"] |= not 0 <= at < 8
        sums[peer, at] += case["value"]
        row, low = build(case["row"], env), build(case["column"], env) * 4
        for c in range(max(low, 0), min(low + 4, 32)):
            if 0 <= row < 8:
                writers.setdefault((peer, row, c), set()).add((env["rank"], env["b"]))
    for rank in range(n):
        for b in range(case["blocks"]):
            env = {"rank": rank, "n": n, "b": b, "r": rank}
            if case["waiting"] is not None and not build(case["waiting"], env):
                continue
            at, needed = build(case["awaited"], env), build(case["needed"], env)
            wrong["counter"] |= not 0 <= at < 8
            wrong["wait"] |= sums[rank, at] < needed
    wrong["overlap"] = any(len(w) > 1 for w in writers.values())
    return wrong


def executions(case: dict[str, Any], n: int) -> Iterator[dict[str, int]]:
    for rank in range(n):
        for b in range(case["blocks"]):
            for r in range(build(case["rounds"], {"n": n})):
                yield {"rank": rank, "n": n, "b": b, "r": r}


@both(rank_programs(), few=20)
def test_ranks_against_counting(case: dict[str, Any]) -> None:
    """Peers, counters, waits and overlaps: with an open number of ranks, one that has a bound, and a known
    one."""
    try:
        program = rank_kernel(case).trace()
    except TileError:
        return
    wrong = {n: counted(case, n) for n in RANKS}
    for options, ranks in [({}, RANKS), ({"world": 3}, RANKS[:3]), *(({"ranks": n}, (n,)) for n in RANKS)]:
        said = check(program, 400_000, **options)
        for kind in ("peer", "counter", "wait", "overlap"):
            mine = [o for o in said if o.kind == kind]
            if mine and all(o.status == PROVEN for o in mine):
                assert not any(wrong[n][kind] for n in ranks), (kind, options)
            for o in mine:
                if o.status == REFUTED:
                    assert all(wrong[n][kind] for n in ranks), (str(o.finding()), options)
