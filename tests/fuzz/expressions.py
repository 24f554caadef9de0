"""Scalar expressions: what may stand in a T.Parallel loop, an index, a condition; each with what is known of
its value."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from tests.fuzz import values
from tests.fuzz.programs import Draft, Index, Param, Tile
from tests.fuzz.values import FLOATS, FUNCTIONS, INTS, Val
from tilescale.compiler.sim import numerics


@dataclass
class Around:
    """Where an expression stands: the integers at hand, tiles that may not be read (those that the loop
    writes), and names of values."""

    indices: list[Index] = field(default_factory=list)
    hidden: list[object] = field(default_factory=list)
    named: list[tuple[str, Val]] = field(default_factory=list)
    inputs: list[tuple[Param, Val]] = field(default_factory=list)


class Expressions:
    """Draws expressions for a draft."""

    def __init__(self, draft: Draft):
        self.d, self.rng = draft, draft.rng

    # -- indices
    # --------------------------------------------------------------------------------------------------
    def index(self, n: int, around: Around, *, outside: bool = False) -> str:
        """An index of an axis of extent ``n``; inside it unless ``outside`` (then perhaps before or behind
        it)."""
        rng, at_hand = self.rng, around.indices
        if not at_hand or rng.random() < 0.1:
            return str(rng.randrange(n))
        v = rng.choice(at_hand)
        if outside and not v.constant and rng.random() < 0.4:
            return rng.choice(
                (f"{v.text} - {rng.randint(1, 3)}", f"{v.text} + {rng.randint(1, n)}", f"{v.text} * 2 - 1")
            )
        fits = [i for i in at_hand if 0 <= i.lo and i.hi < n]
        if fits and rng.random() < 0.6:
            v = rng.choice(fits)
            return rng.choice((v.text,) * 4 + (f"{n - 1} - {v.text}", f"{v.text} // 2", f"{v.text} >> 1"))
        w, c, k = rng.choice(at_hand), rng.randint(0, 7), rng.randint(1, 3)
        return rng.choice(
            (
                f"({v.text} * {k} + {w.text} + {c}) % {n}",
                f"({v.text} - {c} * {w.text} - {c}) % {n}",
                f"({v.text} ^ {c}) % {n}",
                f"T.max(T.min({v.text} - {c}, {n - 1}), 0)",
                f"({v.text} - {c}) // {k} % {n}",
                f"T.abs({v.text} - {c}) % {n}",
                f"T.if_then_else({v.text} < {n}, T.max({v.text}, 0), {n - 1}) % {n}",
                f"(-{v.text}) % {n}",
            )
        )

    def element(self, tile: Tile | Param, around: Around) -> str:
        outside = isinstance(tile, Param)
        return f"{tile.name}[{', '.join(self.index(n, around, outside=outside) for n in tile.shape)}]"

    # -- values
    # ---------------------------------------------------------------------------------------------------
    def value(self, dtype: str, around: Around, depth: int = 3) -> tuple[str, Val]:
        """An expression of ``dtype``."""
        if depth > 0 and self.rng.random() < 0.85:
            for _ in range(4):
                made = self._compound(dtype, around, depth)
                if made is not None:
                    return made
        return self.leaf(dtype, around)

    def leaf(self, dtype: str, around: Around) -> tuple[str, Val]:
        rng = self.rng
        named = [(text, v) for text, v in around.named if v.dtype == dtype]
        tiles = [t for t in self.d.readable(dtype) if t.memory not in around.hidden]
        inputs = [(p, v) for p, v in around.inputs if p.dtype == dtype]
        choice = rng.random()
        if named and choice < 0.3:
            return rng.choice(named)
        if tiles and choice < 0.75:
            tile = rng.choice(tiles)
            assert tile.val is not None
            return self.element(tile, around), tile.val
        if inputs and choice < 0.9:
            param, v = rng.choice(inputs)
            return self.element(param, around), replace(v, lo=min(v.lo, 0), hi=max(v.hi, 0))
        if dtype == "bool":
            return self.compare(around)
        if around.indices and choice < 0.93:
            i = rng.choice(around.indices)
            made = values.stored(Val("int32", i.lo, i.hi), dtype)
            if made is not None and (dtype in FLOATS or made.hi <= numerics.limits(dtype)[1]):
                return f'T.cast({i.text}, "{dtype}")', made
        if dtype in FLOATS:
            number = rng.randint(-8, 8) / 4 if rng.random() < 0.8 else round(rng.uniform(-2, 2), 3)
            q = 2 if number * 4 == int(number * 4) else None
            made = values.stored(Val("float64", number, number, q), dtype)
            assert made is not None
            return f'T.cast({number}, "{dtype}")', made
        number = rng.randint(0 if dtype[0] == "u" else -9, 9)
        return f'T.cast({number}, "{dtype}")', Val(dtype, number, number)

    def _compound(self, dtype: str, around: Around, depth: int) -> tuple[str, Val] | None:
        if self.rng.random() < 0.12:
            return self._choose(dtype, around, depth)
        if self.rng.random() < 0.15:
            return self._converted(dtype, around, depth)
        if dtype == "bool":
            return self.condition(around, depth)
        return self._float(dtype, around, depth) if dtype in FLOATS else self._int(dtype, around, depth)

    def _choose(self, dtype: str, around: Around, depth: int) -> tuple[str, Val] | None:
        test, _ = self.condition(around, depth - 1)
        (x, a), (y, b) = self.value(dtype, around, depth - 1), self.value(dtype, around, depth - 1)
        made = values.join(a, b)
        return None if made is None else (f"T.if_then_else({test}, {x}, {y})", made)

    def _converted(self, dtype: str, around: Around, depth: int) -> tuple[str, Val] | None:
        other = self.d.dtype()
        if other in ("float8_e4m3fn", "float8_e5m2") and dtype == other:
            return None
        x, v = self.value(other, around, depth - 1)
        made = values.stored(v, dtype)
        return None if made is None else (f'T.cast({x}, "{dtype}")', made)

    def _float(self, dtype: str, around: Around, depth: int) -> tuple[str, Val] | None:
        rng, kind = self.rng, self.rng.random()
        x, a = self.value(dtype, around, depth - 1)
        if kind < 0.25:
            name = rng.choice(list(FUNCTIONS))
            if dtype == "float64" and name.startswith("__"):
                name = name[2:]
            made = values.function(name, a)
            return None if made is None else (f"T.{name}({x})", made)
        if kind < 0.32:
            lo = 0.0 if a.lo <= 0 <= a.hi else min(abs(a.lo), abs(a.hi))
            return rng.choice(
                (
                    (f"(-{x})", replace(a, lo=-a.hi, hi=-a.lo)),
                    (f"T.abs({x})", replace(a, lo=max(lo - a.err, 0), hi=a.most)),
                )
            )
        y, b = self.value(dtype, around, depth - 1)
        if kind < 0.45:
            made = values.join(a, b)
            return None if made is None else (f"T.{rng.choice(('max', 'min'))}({x}, {y})", made)
        if kind < 0.5:
            if not (a.same and b.same) or b.special or a.special or not (b.lo > 0.01 or b.hi < -0.01):
                return None
            return (
                (f"({x} % {y})", Val(dtype, -b.most, b.most, None))
                if dtype in ("float32", "float64")
                else None
            )
        op = rng.choice("++--***/")
        made = values.arithmetic(op, a, b)
        return None if made is None else (f"({x} {op} {y})", made)

    def _int(self, dtype: str, around: Around, depth: int) -> tuple[str, Val] | None:
        rng, bits = self.rng, int(dtype.lstrip("uint"))
        x, a = self.value(dtype, around, depth - 1)
        low, high = numerics.limits(dtype)
        op = rng.choice(
            (
                "+",
                "-",
                "*",
                "//",
                "%",
                "&",
                "|",
                "^",
                "<<",
                ">>",
                "max",
                "min",
                "abs",
                "~",
                "-x",
                "truncdiv",
                "truncmod",
                "popcount",
            )
        )
        lo, hi = int(a.lo), int(a.hi)
        if op == "~":
            return f"(~{x})", values.wrapped(dtype, -hi - 1, -lo - 1) if low < 0 else values.whole(dtype)
        if op in ("abs", "-x"):
            made = (
                values.integer(dtype, -hi, -lo)
                if op == "-x"
                else values.integer(dtype, 0, max(abs(lo), abs(hi)))
            )
            return None if made is None else (f"(-{x})" if op == "-x" else f"T.abs({x})", made)
        if op == "popcount":
            return f"T.popcount({x})", Val(dtype, 0, bits)
        if op in ("<<", ">>"):
            amount = rng.randrange(min(bits, 5))
            if op == ">>":
                return f"({x} >> {amount})", Val(dtype, lo >> amount, hi >> amount)
            made = values.integer(dtype, lo << amount, hi << amount)
            return None if made is None else (f"T.cast({x} << {amount}, {dtype!r})", made)
        if op in ("//", "%", "truncdiv", "truncmod"):
            return self._divided(op, x, lo, hi, dtype, around, depth)
        y, b = self.value(dtype, around, depth - 1)
        lo2, hi2 = int(b.lo), int(b.hi)
        if op in ("max", "min"):
            pick = max if op == "max" else min
            return f"T.{op}({x}, {y})", Val(dtype, pick(lo, lo2), pick(hi, hi2))
        if op in "&|^":
            most = 2 ** max(hi, hi2, -lo - 1, -lo2 - 1, 0).bit_length() - 1
            return f"({x} {op} {y})", Val(
                dtype, 0 if lo >= 0 and lo2 >= 0 else max(-most - 1, low), min(most, high)
            )
        corners = [p * r for p in (lo, hi) for r in (lo2, hi2)]
        bounds = {"+": (lo + lo2, hi + hi2), "-": (lo - hi2, hi - lo2), "*": (min(corners), max(corners))}[op]
        made = values.integer(dtype, *bounds)
        return None if made is None else (f"({x} {op} {y})", made)

    def _divided(
        self, op: str, x: str, lo: int, hi: int, dtype: str, around: Around, depth: int
    ) -> tuple[str, Val] | None:
        rng, high = self.rng, numerics.limits(dtype)[1]
        signed = dtype[0] != "u"
        if rng.random() < 0.5:
            by = rng.choice((2, 3, 4, 5, 7, 8, -3) if signed else (2, 3, 4, 7))
            y, least, most = (f'T.cast({by}, "{dtype}")' if rng.random() < 0.5 else str(by)), by, by
        else:
            y, b = self.value(dtype, around, depth - 1)
            y, least, most = f'T.max({y}, T.cast(1, "{dtype}"))', max(1, int(b.lo)), max(1, int(b.hi))
        if op in ("%", "truncmod"):
            n = max(abs(least), abs(most)) - 1
            made = Val(dtype, -n if op == "truncmod" and lo < 0 or least < 0 else 0, min(n, high))
        else:
            quotients = [p // r for p in (lo, hi) for r in (least, most)]
            made = Val(dtype, min(*quotients, 0), max(*quotients, 0) + (1 if op == "truncdiv" else 0))
            if made.hi > high:
                made = values.whole(dtype)
        return (f"({x} {op} {y})" if op in ("//", "%") else f"T.{op}({x}, {y})"), made

    # -- conditions
    # -----------------------------------------------------------------------------------------------
    def compare(self, around: Around, depth: int = 0) -> tuple[str, Val]:
        rng = self.rng
        for _ in range(4):
            dtype = rng.choice(("int32", "int32", "float32", "float16", self.d.dtype()))
            if dtype == "bool":
                continue
            (x, a), (y, b) = self.value(dtype, around, depth), self.value(dtype, around, depth)
            if a.same and b.same:
                if dtype in FLOATS and rng.random() < 0.15:
                    return f"T.{rng.choice(('isnan', 'isinf', 'isfinite'))}({x})", Val("bool", 0, 1)
                return f"({x} {rng.choice(('<', '<=', '>', '>=', '==', '!='))} {y})", Val("bool", 0, 1)
        i = rng.choice(around.indices).text if around.indices else "1"
        return f"({i} % 2 == 0)", Val("bool", 0, 1)

    def condition(self, around: Around, depth: int = 1) -> tuple[str, Val]:
        rng = self.rng
        if depth <= 0 or rng.random() < 0.6:
            if around.indices and rng.random() < 0.4:
                i = rng.choice(around.indices)
                return rng.choice(
                    (f"({i.text} % 2 == 0)", f"({i.text} < {rng.randint(i.lo, i.hi + 1)})")
                ), Val("bool", 0, 1)
            return self.compare(around, depth - 1)
        (x, _), (y, _) = self.condition(around, depth - 1), self.condition(around, depth - 1)
        return rng.choice((f"({x} and {y})", f"({x} or {y})", f"(not {x})")), Val("bool", 0, 1)


__all__ = ["Around", "Expressions", "INTS"]
