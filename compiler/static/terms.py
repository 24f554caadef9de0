"""Integer terms over symbolic ranks, blocks, loop variables and extents: polynomials of atoms, in one normal
form.

An atom is a variable with bounds, a quotient, a remainder by a symbolic divisor, a minimum, a maximum, a
choice, a bitwise function of two terms, or something that nothing is known of (a value read from memory).
Atoms are numbered as they are made, so that an atom's parts and bounds have lower numbers than the atom
itself. Arithmetic is that of the integers: indices are taken not to wrap.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

Monomial = tuple[int, ...]


class Unevaluable(Exception):
    """A term that hangs on a value that is not known, or a division by zero."""


class Poly:
    """A polynomial of atoms with integer coefficients; immutable."""

    __slots__ = ("terms", "_key")

    def __init__(self, terms: dict[Monomial, int]):
        self.terms = terms
        self._key: tuple[Any, ...] | None = None

    @property
    def key(self) -> tuple[Any, ...]:
        if self._key is None:
            self._key = tuple(sorted(self.terms.items()))
        return self._key

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Poly) and self.terms == other.terms

    def __hash__(self) -> int:
        return hash(self.key)

    @property
    def const(self) -> int | None:
        """Its value where it is a number."""
        if not self.terms:
            return 0
        if len(self.terms) == 1 and () in self.terms:
            return self.terms[()]
        return None

    @property
    def atoms(self) -> set[int]:
        return {a for m in self.terms for a in m}

    def __add__(self, other: Poly | int) -> Poly:
        return self.plus(other, 1)

    def __sub__(self, other: Poly | int) -> Poly:
        return self.plus(other, -1)

    def plus(self, other: Poly | int, factor: int) -> Poly:
        """``self + factor * other``."""
        out = dict(self.terms)
        for m, c in number(other).terms.items():
            made = out.get(m, 0) + factor * c
            if made:
                out[m] = made
            else:
                out.pop(m, None)
        return Poly(out)

    def __neg__(self) -> Poly:
        return Poly({m: -c for m, c in self.terms.items()})

    def __mul__(self, other: Poly | int) -> Poly:
        out: dict[Monomial, int] = {}
        for m, c in self.terms.items():
            for m2, c2 in number(other).terms.items():
                joined = tuple(sorted(m + m2)) if m and m2 else m or m2
                made = out.get(joined, 0) + c * c2
                if made:
                    out[joined] = made
                else:
                    out.pop(joined, None)
        return Poly(out)

    def split(self, atom: int) -> tuple[Poly, Poly] | None:
        """``(c, rest)`` with ``self = c * atom + rest``; None where the atom occurs in a square."""
        c: dict[Monomial, int] = {}
        rest: dict[Monomial, int] = {}
        for m, k in self.terms.items():
            times = m.count(atom)
            if times == 0:
                rest[m] = k
            elif times == 1:
                c[tuple(a for a in m if a != atom)] = k
            else:
                return None
        return Poly(c), Poly(rest)

    def divided(self, d: int) -> tuple[Poly, Poly]:
        """``(Q, R)`` with ``self = d * Q + R``: whole multiples of ``d`` apart, the constant of R in 0 …
        d-1."""
        q: dict[Monomial, int] = {}
        r: dict[Monomial, int] = {}
        for m, c in self.terms.items():
            if m == () or c % d == 0:
                whole, left = divmod(c, d)
                if whole:
                    q[m] = whole
                if left:
                    r[m] = left
            else:
                r[m] = c
        return Poly(q), Poly(r)


def number(value: Poly | int) -> Poly:
    return value if isinstance(value, Poly) else Poly({(): value} if value else {})


ZERO, ONE = number(0), number(1)


@dataclass(frozen=True)
class Cond:
    """A condition: kind ``ge`` (term ≥ 0), ``eq`` (term = 0), ``and``, ``or``, ``not`` or ``true``. One of
    which nothing is known is that an unknown value is at least zero."""

    kind: str
    term: Poly | None = None
    parts: tuple[Cond, ...] = ()


TRUE, FALSE = Cond("true"), Cond("not", parts=(Cond("true"),))


def at_least(term: Poly) -> Cond:
    return Cond("ge", term)


def equals(a: Poly, b: Poly | int) -> Cond:
    return Cond("eq", a - b)


def negation(c: Cond) -> Cond:
    if c.kind == "ge":
        assert c.term is not None
        return Cond("ge", -c.term - 1)
    if c.kind == "not":
        return c.parts[0]
    if c.kind in ("and", "or"):
        return Cond("or" if c.kind == "and" else "and", parts=tuple(negation(p) for p in c.parts))
    return Cond("not", parts=(c,))


def conjuncts(c: Cond) -> list[Cond]:
    return [x for p in c.parts for x in conjuncts(p)] if c.kind == "and" else [] if c.kind == "true" else [c]


@dataclass
class Atom:
    """One atom. kind: var, div, mod, min, max, ite, fun, opaque. role of a var: rank, ranks, block, exec,
    loop, lane, extent, own extent, arg, unclear."""

    kind: str
    args: tuple[Any, ...] = ()
    name: str = ""
    role: str = ""
    low: Poly | None = None
    high: Poly | None = None
    nest: int = 0
    #: what the author calls it, where a loop counts from zero in steps of one and the author's does not:
    #: (name, value)
    shown: tuple[str, Poly] | None = None


#: roles of variables that take every value within their bounds in each launch; the caller of a kernel chooses
#: all others
EXECUTION = ("rank", "block", "exec", "loop", "lane")
#: of these, what each rank's own caller chooses: numbers, and extents of tensors that need not be alike on
#: all ranks
OF_A_RANK = ("arg", "own extent")
_FUN: dict[str, Callable[[int, int], int]] = {
    "^": lambda a, b: a ^ b,
    "&": lambda a, b: a & b,
    "|": lambda a, b: a | b,
}


class Terms:
    """All atoms of one program, and the arithmetic that needs to see them."""

    def __init__(self) -> None:
        self.atoms: list[Atom] = []
        self._known: dict[Any, int] = {}
        self._ranges: dict[int, tuple[int | None, int | None]] = {}
        self._leaves: dict[int, frozenset[int]] = {}
        #: the T.Parallel nest that is being read: values from memory differ between its iterations
        self.nest = 0

    def atom(self, made: Atom) -> Poly:
        self.atoms.append(made)
        return Poly({(len(self.atoms) - 1,): 1})

    def var(self, name: str, role: str, low: Poly | int | None = 0, high: Poly | int | None = None) -> Poly:
        bounds = [None if b is None else number(b) for b in (low, high)]
        return self.atom(Atom("var", (), name, role, bounds[0], bounds[1], self.nest))

    def opaque(self, name: str) -> Poly:
        return self.atom(Atom("opaque", (), name, nest=self.nest))

    def twin(self, k: int, by: dict[int, Poly]) -> Poly:
        """Another variable like ``k``, its bounds with atoms replaced; told apart by a prime."""
        a = self.atoms[k]
        low, high = (None if b is None else self.replace(b, by) for b in (a.low, a.high))
        shown = None
        made = self.atom(Atom(a.kind, (), a.name + "'", a.role, low, high, a.nest))
        if a.shown is not None:
            shown = (a.shown[0] + "'", self.replace(a.shown[1], {**by, k: made}))
            self.atoms[-1].shown = shown
        return made

    def twins(self, atoms: Iterable[int]) -> dict[int, Poly]:
        """Twins of several variables, older before younger: what other executions of a statement have
        instead."""
        by: dict[int, Poly] = {}
        for k in sorted(atoms):
            by[k] = self.twin(k, by)
        return by

    def _shared(self, kind: str, *args: Any) -> Poly:
        key = (kind, *args)
        if key not in self._known:
            self.atom(Atom(kind, args))
            self._known[key] = len(self.atoms) - 1
        return Poly({(self._known[key],): 1})

    # -- arithmetic
    # -----------------------------------------------------------------------------------------------
    def div(self, a: Poly, d: Poly) -> Poly:
        """The quotient, rounded down; unknown where the divisor may not be positive."""
        return self._divmod(a, d)[0]

    def mod(self, a: Poly, d: Poly) -> Poly:
        return self._divmod(a, d)[1]

    def _divmod(self, a: Poly, d: Poly) -> tuple[Poly, Poly]:
        known = d.const
        if known is not None and known > 0:
            if a.const is not None:
                return number(a.const // known), number(a.const % known)
            whole, rest = a.divided(known)
            low, high = self.range(rest)
            if low is not None and high is not None and low // known == high // known:
                return whole + low // known, rest - (low // known) * known
            return whole + self._quotient(rest, known), self._shared("mod", rest, d)
        low, _ = self.range(d)
        if low is None or low < 1:
            return self.opaque("quotient"), self.opaque("remainder")
        whole, rest = self._multiples(a, d)
        low, _ = self.range(rest)
        if low is not None and low >= 0 and self._below(rest, d):
            return whole, rest
        return whole + self._shared("div", rest, d), self._shared("mod", rest, d)

    def _quotient(self, a: Poly, d: int) -> Poly:
        """A quotient that has no simpler form; the quotient of a quotient is one by the product."""
        only = next(iter(a.terms)) if len(a.terms) == 1 else ()
        if len(only) == 1 and a.terms[only] == 1:
            inner = self.atoms[only[0]]
            if inner.kind == "div" and inner.args[1].const is not None:
                return self.div(inner.args[0], inner.args[1] * d)
        return self._shared("div", a, number(d))

    @staticmethod
    def _multiples(a: Poly, d: Poly) -> tuple[Poly, Poly]:
        """``a = d * Q + R``, where d is a single atom (or Q is zero)."""
        only = next(iter(d.terms)) if len(d.terms) == 1 else ()
        if len(only) != 1 or d.terms[only] != 1:
            return ZERO, a
        pair = a.split(only[0])
        return pair if pair is not None else (ZERO, a)

    def _below(self, a: Poly, d: Poly) -> bool:
        low, _ = self.range(d - a)
        if low is not None:
            return low >= 1
        atoms = [self.atoms[m[0]] for m in a.terms if len(m) == 1]
        only = len(a.terms) == 1 and len(atoms) == 1 and next(iter(a.terms.values())) == 1
        return only and atoms[0].high is not None and atoms[0].high == d - 1

    def least(self, a: Poly, b: Poly) -> Poly:
        return self._extreme("min", a, b)

    def greatest(self, a: Poly, b: Poly) -> Poly:
        return self._extreme("max", a, b)

    def _extreme(self, kind: str, a: Poly, b: Poly) -> Poly:
        low, high = self.range(a - b)
        if low is not None and low >= 0:
            return b if kind == "min" else a
        if high is not None and high <= 0:
            return a if kind == "min" else b
        return self._shared(kind, a, b)

    def choice(self, c: Cond, a: Poly, b: Poly) -> Poly:
        return a if c == TRUE or a == b else b if c == FALSE else self._shared("ite", c, a, b)

    def bitwise(self, op: str, a: Poly, b: Poly) -> Poly:
        if a.const is not None and b.const is not None:
            return number(_FUN[op](a.const, b.const))
        mask = b.const if b.const is not None else a.const
        if op == "&" and mask is not None and mask >= 0 and (mask & (mask + 1)) == 0:
            return self.mod(a if b.const is not None else b, number(mask + 1))
        return self._shared("fun", op, a, b)

    def tidy(self, p: Poly) -> Poly:
        """The term with d · (a / d) + a mod d put together to a."""
        for m, c in p.terms.items():
            if len(m) != 1 or (a := self.atoms[m[0]]).kind != "mod":
                continue
            x, d = a.args
            known = d.const
            partner = self._known.get(("div", x, d))
            if known is not None and partner is not None and p.terms.get((partner,)) == c * known:
                return self.tidy(p - Poly({m: c, (partner,): c * known}) + x * c)
        return p

    # -- ranges
    # ---------------------------------------------------------------------------------------------------
    def range(self, p: Poly) -> tuple[int | None, int | None]:
        """Numbers between which a term lies, whatever its atoms are; None where there is no such number."""
        low: int | None = 0
        high: int | None = 0
        for m, c in p.terms.items():
            a, b = (1, 1) if not m else self._product(m)
            if c < 0:
                a, b = b, a
            low = None if low is None or a is None else low + c * a
            high = None if high is None or b is None else high + c * b
        return low, high

    def _product(self, m: Monomial) -> tuple[int | None, int | None]:
        low, high = self._atom_range(m[0])
        for other in m[1:]:
            a, b = self._atom_range(other)
            if None not in (low, high, a, b):
                ends = [x * y for x in (low, high) for y in (a, b)]  # type: ignore[operator]
                low, high = min(ends), max(ends)
            elif low is not None and low >= 0 and a is not None and a >= 0:
                low, high = low * a, None
            else:
                low = high = None
        return low, high

    def _atom_range(self, k: int) -> tuple[int | None, int | None]:
        if k not in self._ranges:
            self._ranges[k] = self._range_of(self.atoms[k])
        return self._ranges[k]

    def _range_of(self, a: Atom) -> tuple[int | None, int | None]:
        if a.kind == "var":
            low = None if a.low is None else self.range(a.low)[0]
            return low, None if a.high is None else self.range(a.high)[1]
        if a.kind in ("min", "max", "ite"):
            (l1, h1), (l2, h2) = self.range(a.args[-2]), self.range(a.args[-1])
            lows, highs = [x for x in (l1, l2) if x is not None], [x for x in (h1, h2) if x is not None]
            if a.kind == "min":
                return (min(lows) if len(lows) == 2 else None), (min(highs) if highs else None)
            if a.kind == "max":
                return (max(lows) if lows else None), (max(highs) if len(highs) == 2 else None)
            return (min(lows) if len(lows) == 2 else None), (max(highs) if len(highs) == 2 else None)
        if a.kind == "div":
            low, high = self.range(a.args[0])
            least, most = self.range(a.args[1])
            if least is not None and least == most:
                return (None if low is None else low // least), (None if high is None else high // least)
            return (0 if low is not None and low >= 0 else None), (
                high if high is not None and high >= 0 else None
            )
        if a.kind == "mod":
            most = self.range(a.args[1])[1]
            return 0, None if most is None else most - 1
        if a.kind == "fun":
            (l1, h1), (l2, h2) = self.range(a.args[1]), self.range(a.args[2])
            if l1 is None or l2 is None or h1 is None or h2 is None or l1 < 0 or l2 < 0:
                return None, None
            return 0, (1 << max(h1, h2).bit_length()) - 1
        return None, None

    # -- values and replacements
    # ----------------------------------------------------------------------------------
    def value(self, p: Poly, env: Mapping[int, int]) -> int:
        """The term's value where ``env`` gives its variables.

        Raises:
            Unevaluable: a variable has no value there.
        """
        total = 0
        for m, c in p.terms.items():
            for a in m:
                c *= self._atom_value(a, env)
            total += c
        return total

    def _atom_value(self, k: int, env: Mapping[int, int]) -> int:
        if k in env:
            return env[k]
        a = self.atoms[k]
        if a.kind in ("div", "mod"):
            x, y = self.value(a.args[0], env), self.value(a.args[1], env)
            if y <= 0:
                raise Unevaluable
            return x // y if a.kind == "div" else x % y
        if a.kind in ("min", "max"):
            return (min if a.kind == "min" else max)(self.value(x, env) for x in a.args)
        if a.kind == "ite":
            return self.value(a.args[1] if self.holds(a.args[0], env) else a.args[2], env)
        if a.kind == "fun":
            return _FUN[a.args[0]](self.value(a.args[1], env), self.value(a.args[2], env))
        raise Unevaluable

    def holds(self, c: Cond, env: Mapping[int, int]) -> bool:
        """Whether a condition holds; raises Unevaluable where nobody knows."""
        if c.kind == "ge":
            assert c.term is not None
            return self.value(c.term, env) >= 0
        if c.kind == "eq":
            assert c.term is not None
            return self.value(c.term, env) == 0
        if c.kind == "and":
            return all(self.holds(p, env) for p in c.parts)
        if c.kind == "or":
            return any(self.holds(p, env) for p in c.parts)
        if c.kind == "not":
            return not self.holds(c.parts[0], env)
        return True

    def replace(self, p: Poly, by: Mapping[int, Poly]) -> Poly:
        """The term with atoms replaced, also inside quotients, choices and the like."""
        if not by:
            return p
        out = ZERO
        for m, c in p.terms.items():
            made = number(c)
            for a in m:
                made = made * self._atom_replaced(a, by)
            out = out + made
        return out

    def _atom_replaced(self, k: int, by: Mapping[int, Poly]) -> Poly:
        if k in by:
            return by[k]
        a = self.atoms[k]
        if a.kind in ("var", "opaque") or not self.leaves(k) & by.keys():
            return Poly({(k,): 1})
        if a.kind in ("div", "mod"):
            x, y = (self.replace(t, by) for t in a.args)
            return self.div(x, y) if a.kind == "div" else self.mod(x, y)
        if a.kind in ("min", "max"):
            return self._extreme(a.kind, *(self.replace(t, by) for t in a.args))
        if a.kind == "ite":
            return self.choice(
                self.replace_cond(a.args[0], by), self.replace(a.args[1], by), self.replace(a.args[2], by)
            )
        return self.bitwise(a.args[0], self.replace(a.args[1], by), self.replace(a.args[2], by))

    def replace_cond(self, c: Cond, by: Mapping[int, Poly]) -> Cond:
        if not by or c.kind == "true":
            return c
        if c.term is not None:
            term = self.replace(c.term, by)
            if term.const is not None:
                return TRUE if (term.const >= 0 if c.kind == "ge" else term.const == 0) else FALSE
            return Cond(c.kind, term)
        return Cond(c.kind, None, tuple(self.replace_cond(p, by) for p in c.parts))

    def leaves(self, k: int) -> frozenset[int]:
        """The variables and unknown values inside an atom, the atom itself included."""
        if k not in self._leaves:
            a, found = self.atoms[k], {k}
            for part in a.args:
                if isinstance(part, Poly):
                    found |= self.leaves_of(part)
                elif isinstance(part, Cond):
                    found |= self.leaves_of_cond(part)
            self._leaves[k] = frozenset(found)
        return self._leaves[k]

    def leaves_of(self, p: Poly) -> set[int]:
        return {x for a in p.atoms for x in self.leaves(a)}

    def leaves_of_cond(self, c: Cond) -> set[int]:
        out = set() if c.term is None else self.leaves_of(c.term)
        for p in c.parts:
            out |= self.leaves_of_cond(p)
        return out

    def with_bounds(self, atoms: Iterable[int]) -> list[int]:
        """The variables and unknown values among ``atoms``, in them, and in their bounds; older before
        younger."""
        seen: set[int] = set()
        work = [x for k in atoms for x in self.leaves(k)]
        while work:
            k = work.pop()
            if k in seen:
                continue
            seen.add(k)
            for bound in (self.atoms[k].low, self.atoms[k].high):
                if bound is not None:
                    work += self.leaves_of(bound) - seen
        return sorted(k for k in seen if self.atoms[k].kind in ("var", "opaque"))

    def is_unknown(self, c: Cond) -> bool:
        """Whether a condition hangs on something that nothing is known of."""
        return any(self.atoms[a].kind == "opaque" for a in self.leaves_of_cond(c))
