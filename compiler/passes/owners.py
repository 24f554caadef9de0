"""Who touches which elements of memory, counted: for every thread and iteration the index that it names."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import gcd, prod
from typing import Any

import numpy as np

from tilescale.compiler.ir import numeric
from tilescale.compiler.ir.nests import Element, Nest
from tilescale.compiler.ir.numbers import constant
from tilescale.compiler.ir.program import TileProgram
from tilescale.compiler.ir.scales import SCALES
from tilescale.compiler.layout.match import Loop
from tilescale.compiler.layout.matrices import matrices, writers
from tilescale.compiler.tvm_compat import ir, structural_walk, sym, tirx

#: coordinates are packed into one number, so many bits each
COORDINATE = 20
#: iterations of a nest beyond which nobody counts who touches what: nests of tiles have fewer
KNOWN = 1 << 22


@dataclass(frozen=True)
class Owners:
    """Who touches which elements: ``ids`` sorted, the one thread of each, or -1 where several do. Relative to
    ``origin``, the parts of the indices that are the same for all threads, which depend on ``depends``.
    ``steps``: what each of those parts is known to be a multiple of (0: a constant); ``spans``: below what
    the rest of the index stays."""

    ids: Any
    threads: Any
    origin: tuple[str, ...]
    depends: frozenset[Any]
    steps: tuple[int, ...] = ()
    spans: tuple[int, ...] = ()

    def comparable(self, other: Owners, stale: frozenset[Any]) -> bool:
        """Whether equal ids, and no others, are equal elements, though ``stale`` variables have other values
        for ``other``: then as well where tiles are as far apart as they are long, or farther, since an
        element has one place in such a tile."""
        if self.origin != other.origin or self.depends != other.depends:
            return False
        if not self.depends & stale:
            return True
        both = (
            zip(self.steps, self.spans, other.spans, strict=True)
            if self.steps and other.steps
            else [(1, 2, 2)]
        )
        return all(step == 0 or max(mine, theirs) <= step for step, mine, theirs in both)


@dataclass(frozen=True)
class OwnCode:
    """What the names of ``T.Scale("thread")`` regions stand for, of ``threads`` threads: ``index``, the
    thread's index; ``rounds``, loops with the values that they take; ``names``, all that is each thread's
    own."""

    threads: int
    index: frozenset[Any]
    rounds: dict[Any, Any]
    names: frozenset[Any]

    @staticmethod
    def of(body: Any, threads: int) -> OwnCode:
        """That of a program's regions."""
        index: set[Any] = set()
        rounds: dict[Any, Any] = {}
        names: set[Any] = set()

        def bound(s: Any) -> None:
            names.add(s.var)
            if isinstance(s.value, ir.Call) and s.value.op.name == "ts.scale_index":
                if str(s.value.args[0].value) == "thread":
                    index.add(s.var)

        def loop(s: Any) -> None:
            names.add(s.loop_var)
            low, extent = constant(s.min), constant(s.extent)
            if low is not None and extent is not None and 0 < extent <= KNOWN:
                rounds[s.loop_var] = np.arange(low, low + extent)

        def region(s: Any) -> None:
            if s.attr_key == "ts.scale" and SCALES[int(s.value.value)] == "thread":
                structural_walk(s.body, (tirx.Bind, bound))
                structural_walk(s.body, (tirx.For, loop))

        structural_walk(body, (tirx.AttrStmt, region))
        return OwnCode(threads, frozenset(index), rounds, frozenset(names))


def numbering(buffer: Any) -> str:
    """How a buffer's elements are numbered: a T.view numbers the same memory otherwise."""
    return f"{buffer.ty.dtype}{buffer.ty.shape}"


def stored_by(program: TileProgram, nest: Nest, loop: Loop | None, a: Element) -> Any:
    """The threads that write what a store's threads hold, where it may go by stmatrix (layout/matrices.py);
    None where it does not."""
    made = matrices(nest, loop, program.layouts.get(a.buffer), program.target)
    return None if made is None or loop is None else writers(loop, made)


def owners_of(
    nest: Nest, loop: Loop | None, a: Element, analyzer: Any = None, by: Any = None
) -> Owners | None:
    """Who touches what by an access of a nest; None where that is not known before the kernel runs.
    ``analyzer``: knows variables. ``by``: who does it for whom, where that is somebody else (`stored_by`)."""
    if loop is None or not a.indices or prod(loop.extents) > KNOWN:
        return None
    values, inside = loop.values
    env = dict(zip(loop.vars, values, strict=True))
    parts = [_split(e, loop.vars, env) for e in a.indices]
    threads = np.broadcast_to(np.arange(inside.shape[0])[:, None] if by is None else by, inside.shape)
    first = first_holders(loop)[:, None] if a.mode != "read" or nest.alone else True
    return _counted(a, parts, inside, first, threads, analyzer or sym.Analyzer())


def owners_by_index(a: Element, own: OwnCode, analyzer: Any) -> Owners | None:
    """Who touches what by an access of a thread's own code, by the thread's index in what it names; None
    where that is not known before the kernel runs. What stands under a condition counts as if it did not.
    ``analyzer``: knows variables, and that the thread's index is below ``own.threads``."""
    indices = [analyzer.simplify(e) for e in a.indices]
    used = set().union(*map(numeric.variables, indices))
    turns = [v for v in own.rounds if v in used]
    many = prod(len(own.rounds[v]) for v in turns)
    if not indices or many * own.threads > KNOWN:
        return None
    rounds = np.meshgrid(*(own.rounds[v] for v in turns), indexing="ij")
    threads = np.arange(own.threads)[:, None]
    env = {v: r.reshape(1, -1) for v, r in zip(turns, rounds, strict=True)}
    env |= dict.fromkeys(own.index, threads)
    inside = np.ones((own.threads, many), bool)
    parts = [_by_terms(e, env, own.names) for e in indices]
    return _counted(a, parts, inside, True, np.broadcast_to(threads, inside.shape), analyzer)


def _counted(
    a: Element, parts: list[Any], inside: Any, first: Any, threads: Any, analyzer: Any
) -> Owners | None:
    """``parts``: of each index its number in each of ``inside`` (thread, round), the rest, and what that
    depends on. ``first``: of whom it counts; ``threads``: who touches it then."""
    ids = np.zeros(inside.shape, np.int64)
    origin, depends, steps, spans = [numbering(a.buffer)], set(), [], []
    for part in parts:
        if part is None or len(parts) * COORDINATE > 60:
            return None
        number, rest, used = part
        steps.append(_step(rest, analyzer))
        number = np.broadcast_to(np.asarray(number), inside.shape)
        there = number[inside]  # a layout may have room for more iterations than there are
        spans.append(int(there.max()) + 1 if there.size and there.min() >= 0 else 1 << COORDINATE)
        number = number + (1 << COORDINATE - 1)
        if (number < 0).any() or (number >> COORDINATE).any():
            return None
        ids = (ids << COORDINATE) + number
        origin.append("" if rest is None else str(rest))
        depends |= used
    inside = inside & first
    flat, who = ids[inside], threads[inside]
    unique, where = np.unique(flat, return_inverse=True)
    low = np.full(len(unique), 1 << 30)
    high = np.full(len(unique), -1)
    np.minimum.at(low, where, who)
    np.maximum.at(high, where, who)
    return Owners(
        unique, np.where(low == high, low, -1), tuple(origin), frozenset(depends), tuple(steps), tuple(spans)
    )


def first_holders(loop: Loop) -> Any:
    """The threads that stand for all copies of an iteration: those that write memory. Bool, one a thread."""
    threads = (np.arange(loop.fragment.threads) - loop.fragment.first_thread) % loop.fragment.threads
    first = np.ones(loop.fragment.threads, bool)
    for p in loop.thread_digits:
        if p.axis is None:
            first &= threads // p.stride % p.extent == 0
    return first


def _step(rest: Any, analyzer: Any) -> int:
    """What an expression is known to be a multiple of; 0 for a constant."""
    if rest is None:
        return 0
    found = analyzer.modular_set(rest)
    return gcd(int(found.coeff), int(found.base)) if int(found.coeff) else 0


def _split(e: Any, variables: tuple[Any, ...], env: dict[Any, Any]) -> tuple[Any, Any, set[Any]] | None:
    """An index as a number for each thread and round, and the rest, which is the same for all (None:
    nothing), with what it depends on."""
    try:
        return numeric.evaluate(e, env), None, set()
    except numeric.Unknown:
        pass
    used = numeric.variables(e)
    if None in used:
        return None
    if not used & set(variables):
        return 0, sym.Analyzer().simplify(e), used
    found = sym.detect_linear_equation(e, list(variables))
    parts = list(found) if found is not None else []
    if len(parts) != len(variables) + 1 or any(not isinstance(c, tirx.IntImm) for c in parts[:-1]):
        return None
    number = sum((int(c.value) * env[v] for c, v in zip(parts[:-1], variables, strict=True)), 0)
    rest = sym.Analyzer().simplify(parts[-1])
    return number, rest, numeric.variables(rest)


def _by_terms(e: Any, env: dict[Any, Any], own: frozenset[Any]) -> tuple[Any, Any, set[Any]] | None:
    """The same of a thread's own index, a sum of which each term has one value for all threads or is known of
    each: (i · 2048 + thread · 8) // 128 is i · 16 + thread // 16 once simplified. ``own``: names that are no
    part of the rest."""
    number: Any = 0
    rest: Any = None
    depends: set[Any] = set()
    for sign, term in _terms(e, 1):
        used = numeric.variables(term)
        if None in used:
            return None
        try:
            number = number + sign * numeric.evaluate(term, env)
            continue
        except numeric.Unknown:
            pass
        if used & own:
            return None
        more = term if sign > 0 else tirx.IntImm(str(term.ty), -1) * term
        rest, depends = more if rest is None else rest + more, depends | used
    return number, rest, depends


def _terms(e: Any, sign: int) -> Iterator[tuple[int, Any]]:
    """The terms of a sum, each with its sign."""
    if isinstance(e, (tirx.Add, tirx.Sub)):
        yield from _terms(e.a, sign)
        yield from _terms(e.b, sign if isinstance(e, tirx.Add) else -sign)
    else:
        yield sign, e
