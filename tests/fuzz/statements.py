"""Statements of one block: copies, fills, loops over T.Parallel, products, reductions, scans, views, atomics,
control flow."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np

from tests.fuzz import values
from tests.fuzz.expressions import Around, Expressions
from tests.fuzz.programs import Draft, Index, Param, Tile, known
from tests.fuzz.values import FLOATS, INTS, Val

#: (A and B, C) of T.gemm
PRODUCTS = [
    ("float32", "float32"),
    ("float16", "float32"),
    ("float16", "float16"),
    ("bfloat16", "float32"),
    ("bfloat16", "bfloat16"),
    ("float64", "float64"),
    ("float8_e4m3fn", "float32"),
    ("float8_e5m2", "float32"),
    ("float8_e4m3fn", "float16"),
    ("int8", "int32"),
    ("uint8", "int32"),
    ("int32", "int32"),
]


class Statements(Expressions):
    """Draws statements for a draft. Each method writes one and returns whether it could."""

    def __init__(self, draft: Draft):
        super().__init__(draft)
        self.kinds: list[tuple[int, Callable[[], bool]]] = [
            (5, self.load),
            (3, self.move),
            (2, self.fill),
            (10, self.nest),
            (3, self.product),
            (4, self.reduction),
            (2, self.pick),
            (2, self.scan),
            (2, self.view),
            (2, self.atomic),
            (2, self.condition_of_block),
            (3, self.loop),
            (2, self.accumulate),
            (1, self.scalar),
            (1, self.executors),
            (2, self.output),
            (1, self.by_hand),
        ]

    def statement(self) -> None:
        weights = [w for w, _ in self.kinds]
        for _ in range(20):
            if self.rng.choices([k for _, k in self.kinds], weights)[0]():
                return

    def around(self, *loops: Index) -> Around:
        return Around([*loops, *loops, *self.d.indices])

    # -- from and to tensors
    # --------------------------------------------------------------------------------------
    def input(self, dtype: str, shape: tuple[int, ...]) -> tuple[Param, Val]:
        """A tensor that nobody writes, perhaps one that is there already."""
        d, rng = self.d, self.rng
        old = [
            p
            for p in d.params
            if p.val is None and p.kind == "tensor" and p.dtype == dtype and len(p.shape) == len(shape)
        ]
        if old and rng.random() < 0.5:
            made = rng.choice(old)
            return made, known(made.fill, dtype)
        wide = tuple(max(1, n + rng.choice((0, 0, -1, -3, 2, n))) for n in shape)
        fill = d.fill_of(dtype)
        if rng.random() < 0.1 and dtype not in ("bool",):
            steps = ", ".join(str(int(np.prod(wide[k + 1 :])) * 2) for k in range(len(wide)))
            text = f'T.StridedTensor({wide}, ({steps},), "{dtype}")'
            return d.param("A", text, dtype, wide, fill, steps=2), known(fill, dtype)
        if rng.random() < 0.15 and "dm" not in d.scalars:
            return d.param("A", "tensor", dtype, wide, fill, extents=self.dynamic(wide)), known(fill, dtype)
        return d.param("A", "tensor", dtype, wide, fill), known(fill, dtype)

    def dynamic(self, shape: tuple[int, ...]) -> str:
        """The shape as it is declared, one extent known only to the call."""
        axis, symbol = self.rng.randrange(len(shape)), self.d.name("m")
        parts = [f'T.dynamic("{symbol}")' if k == axis else str(n) for k, n in enumerate(shape)]
        return f"({', '.join(parts)},)"

    def offset(self, n: int, extent: int) -> str:
        """Where a tile begins along an axis of a tensor: anywhere, also before it or over its end."""
        at_hand, rng = self.d.indices, self.rng
        if not at_hand or rng.random() < 0.4:
            return str(rng.choice((0, 0, rng.randrange(n), max(0, n - extent))))
        v, c = rng.choice(at_hand), rng.randint(0, 4)
        return rng.choice(
            (
                f"{v.text} * {extent}",
                f"{v.text} * {extent} - {c}",
                f"{v.text} + {c}",
                f"{v.text} - {c}",
                f"({v.text} + {c}) % {n}",
            )
        )

    def base(self, tensor: Param, shape: tuple[int, ...]) -> str:
        """A tile of a tensor: its first element, or a slice."""
        starts = [self.offset(n, e) for n, e in zip(tensor.shape, shape)]
        if self.rng.random() < 0.6:
            return f"{tensor.name}[{', '.join(starts)}]"
        parts = [f"{s}:{s} + {e}" if not s.isdigit() else f"{s}:{int(s) + e}" for s, e in zip(starts, shape)]
        return f"{tensor.name}[{', '.join(parts)}]"

    def load(self) -> bool:
        d, rng = self.d, self.rng
        free = d.writable()
        target = rng.choice(free) if free and rng.random() < 0.4 else None
        if target is None:
            if d.depth_of_loops and rng.random() < 0.5:
                return False
            target = d.tile(d.dtype(), d.shape())
        dtype = target.dtype if rng.random() < 0.7 else d.dtype()
        param, v = self.input(dtype, target.shape)
        made = values.stored(values.join(v, Val(dtype, 0, 0)) or v, target.dtype)
        if made is None:
            return False
        d.emit(f"T.copy({self.base(param, target.shape)}, {target.name})")
        d.wrote(target, made)
        return True

    def move(self) -> bool:
        """Tile to tile, also between parts of them."""
        d, rng = self.d, self.rng
        sources, free = d.readable(), d.writable()
        if not sources:
            return False
        src = rng.choice(sources)
        assert src.val is not None
        if rng.random() < 0.5:
            targets = [t for t in free if t.shape == src.shape and t.memory is not src.memory]
            dst = rng.choice(targets) if targets and rng.random() < 0.7 else d.tile(d.dtype(), src.shape)
            made = values.stored(src.val, dst.dtype)
            if made is not None:
                d.emit(f"T.copy({src.name}, {dst.name})")
                d.wrote(dst, made)
            return made is not None
        targets = [
            t
            for t in free
            if t.val is not None and t.memory is not src.memory and len(t.shape) == len(src.shape)
        ]
        if not targets:
            return False
        dst = rng.choice(targets)
        size = tuple(rng.randint(1, min(a, b)) for a, b in zip(src.shape, dst.shape))
        made = values.stored(src.val, dst.dtype)
        if made is None:
            return False
        d.emit(f"T.copy({self.part(src, size)}, {self.part(dst, size)})")
        d.wrote(dst, made, all_of_it=False)
        return True

    def part(self, tile: Tile, size: tuple[int, ...]) -> str:
        """A part of a tile of that size, somewhere inside."""
        cuts = []
        for n, e in zip(tile.shape, size):
            most = n - e
            fits = [i for i in self.d.indices if 0 <= i.lo and i.hi <= most]
            start = (
                self.rng.choice(fits).text
                if fits and self.rng.random() < 0.3
                else str(self.rng.randint(0, most))
            )
            cuts.append(f"{start}:{int(start) + e}" if start.isdigit() else f"{start}:{start} + {e}")
        return f"{tile.name}[{', '.join(cuts)}]"

    def output(self, tile: Tile | None = None) -> bool:
        """What a tile holds, to where nobody else writes. By a copy, or element by element."""
        d, rng = self.d, self.rng
        if tile is None:
            if not d.once or not d.readable():
                return False
            tile = rng.choice(d.readable())
        assert tile.val is not None
        dtype = tile.dtype if rng.random() < 0.8 else d.dtype()
        made = values.stored(tile.val, dtype)
        if made is None:
            dtype, made = tile.dtype, tile.val
        *outer, inner = d.blocks
        rows = (inner.hi + 1) * tile.shape[0]
        cut = [max(1, n - rng.choice((0, 0, 0, 1, 2))) for n in (rows, *tile.shape[1:])]
        shape = (*(i.hi + 1 for i in outer), *cut)
        out = d.param("O", "tensor", dtype, shape, "zero", written=values.join(made, Val(dtype, 0, 0)))
        leads = [i.text for i in outer]
        n = tile.shape[0]
        if rng.random() < 0.75:
            starts = ", ".join([*leads, f"{inner.text} * {n}", *["0"] * (len(tile.shape) - 1)])
            d.emit(f"T.copy({tile.name}, {out.name}[{starts}])")
            return True
        loops = [d.name("i") for _ in tile.shape]
        where = ", ".join([*leads, f"{inner.text} * {n} + {loops[0]}", *loops[1:]])
        with d.inside(
            f"for {', '.join(loops)} in T.{rng.choice(('Parallel', 'Parallel', 'grid'))}({', '.join(map(str, tile.shape))}):"
        ):
            d.emit(f"{out.name}[{where}] = {tile.name}[{', '.join(loops)}]")
        return True

    def fill(self) -> bool:
        d, rng = self.d, self.rng
        free = d.writable()
        if not free or (rng.random() < 0.3 and not d.depth_of_loops):
            free = [d.tile(d.dtype(), d.shape())]
        tile = rng.choice(free)
        if rng.random() < 0.3:
            d.emit(f"T.clear({tile.name})")
            d.wrote(tile, Val(tile.dtype, 0, 0))
            return True
        text, v = self.value(tile.dtype, self.around(), 1)
        made = values.stored(v, tile.dtype)
        if made is None:
            return False
        if tile.val is not None and rng.random() < 0.3:
            size = tuple(rng.randint(1, n) for n in tile.shape)
            d.emit(f"T.fill({self.part(tile, size)}, {text})")
            d.wrote(tile, made, all_of_it=False)
            return True
        d.emit(f"T.fill({tile.name}, {text})")
        d.wrote(tile, made)
        return True

    # -- loops over elements
    # --------------------------------------------------------------------------------------
    def nest(self) -> bool:
        """A T.Parallel loop that writes one or two tiles, element by element."""
        d, rng = self.d, self.rng
        free = d.writable()
        if free and rng.random() < 0.6:
            tile = rng.choice(free)
        elif d.depth_of_loops and free:
            return False
        else:
            tile = d.tile(d.dtype(), d.shape())
        order = list(range(len(tile.shape)))
        if rng.random() < 0.2:
            rng.shuffle(order)
        loops = [Index(d.name("i"), 0, n - 1) for n in tile.shape]
        head = rng.choice(("T.Parallel",) * 6 + ("T.grid",))
        extents = ", ".join(str(tile.shape[k]) for k in order)
        where = f"{tile.name}[{', '.join(i.text for i in loops)}]"
        around = self.around(*loops)
        around.hidden.append(tile.memory)
        if rng.random() < 0.35:
            dtype = d.dtype()
            around.inputs.append(self.input(dtype, tile.shape))
        with d.inside(f"for {', '.join(loops[k].text for k in order)} in {head}({extents}):"):
            if tile.val is not None and rng.random() < 0.5:
                around.named.append((where, tile.val))
            if rng.random() < 0.3:
                dtype = d.dtype()
                text, v = self.value(dtype, around, 2)
                name = d.name("x")
                d.emit(f"{name} = {text}")
                around.named.append((name, v))
            made = self._assigned(tile, where, around)
        d.wrote(tile, made)
        return True

    def _assigned(self, tile: Tile, where: str, around: Around) -> Val:
        """Stores to ``where``: plainly, in the branches of an if, or in one branch alone."""
        d, rng = self.d, self.rng
        old = tile.val
        if rng.random() < 0.75:
            return self._store(tile, where, around)
        test, _ = self.condition(around)
        with d.inside(f"if {test}:"):
            first = self._store(tile, where, around)
        if old is not None and rng.random() < 0.5:
            made = values.join(first, old)
        else:
            with d.inside("else:"):
                made = values.join(first, self._store(tile, where, around))
        assert made is not None
        return made

    def _store(self, tile: Tile, where: str, around: Around) -> Val:
        rng = self.rng
        for _ in range(6):
            other = tile.dtype if rng.random() < 0.85 else self.d.dtype()
            text, v = self.value(other, around)
            made = values.stored(v, tile.dtype)
            if made is not None:
                self.d.emit(
                    f"{where} = {text}"
                    if other == tile.dtype
                    else f'{where} = T.cast({text}, "{tile.dtype}")'
                )
                return made
        self.d.emit(f"{where} = 1")
        return Val(tile.dtype, 1, 1)

    def by_hand(self) -> bool:
        """Sums in the lanes of a nest: memory of a lane's own, a serial loop inside."""
        d, rng = self.d, self.rng
        sources = [
            t for t in d.readable() if len(t.shape) == 2 and t.dtype in ("float32", "float16", "int32")
        ]
        if not sources or d.depth_of_loops:
            return False
        src = rng.choice(sources)
        assert src.val is not None
        rows, depth = src.shape
        wide = "int32" if src.dtype == "int32" else "float32"
        made = values.total(replace(src.val, dtype=wide), depth, wide) if wide == "float32" else None
        if wide == "int32" and src.val.most * depth < 2**31:
            made = Val("int32", depth * min(src.val.lo, 0), depth * max(src.val.hi, 0))
        if made is None:
            return False
        tile = d.tile(wide, (rows,))
        i, k, own = d.name("i"), d.name("k"), d.name("own")
        with d.inside(f"for {i} in T.Parallel({rows}):"):
            d.emit(f'{own} = T.alloc_local((1,), "{wide}")')
            d.emit(f"{own}[0] = 0")
            with d.inside(f"for {k} in T.{rng.choice(('serial', 'unroll'))}({depth}):"):
                d.emit(f'{own}[0] = {own}[0] + T.cast({src.name}[{i}, {k}], "{wide}")')
            d.emit(f"{tile.name}[{i}] = {own}[0]")
        d.wrote(tile, made)
        return True

    # -- whole tiles
    # ----------------------------------------------------------------------------------------------
    def product(self) -> bool:
        d, rng = self.d, self.rng
        dtype, acc = rng.choice(PRODUCTS)
        m, n, k = (rng.choice((1, 4, 8, 16, 17)) for _ in range(3))
        left = [t for t in d.readable(dtype) if len(t.shape) == 2]
        across, down = rng.random() < 0.3, rng.random() < 0.3
        if left and rng.random() < 0.6:
            a = rng.choice(left)
            k, m = a.shape if across else a.shape[::-1]
        else:
            a = self._drawn(dtype, (k, m) if across else (m, k))
        b = self._drawn(dtype, (n, k) if down else (k, n))
        assert a.val is not None and b.val is not None
        held = [
            t
            for t in d.writable(acc)
            if t.shape == (m, n) and t.val is not None and t.memory not in (a.memory, b.memory)
        ]
        c = rng.choice(held) if held and rng.random() < 0.5 else d.tile(acc, (m, n))
        clear = c.val is None or rng.random() < 0.3
        made: Val | None
        if acc == "int32":
            most = a.val.most * b.val.most * k + (0 if clear or c.val is None else c.val.most)
            made = Val("int32", -most, most) if most < 2**31 else None
        else:
            made = values.product(a.val, b.val, k, acc, None if clear else c.val)
        if made is None:
            return False
        more = [f"transpose_{x}=True" for x, yes in (("A", across), ("B", down)) if yes] + [
            "clear_accum=True"
        ] * clear
        if rng.random() < 0.2:
            more.append(f"policy=T.GemmWarpPolicy.{rng.choice(('Square', 'FullRow', 'FullCol'))}")
        d.emit(f"T.gemm({', '.join([a.name, b.name, c.name, *more])})")
        d.wrote(c, made)
        return True

    def _drawn(self, dtype: str, shape: tuple[int, ...]) -> Tile:
        """A tile with an input's elements."""
        tile = self.d.tile(dtype, shape)
        fill = "few" if dtype in INTS else self.rng.choice(("small", "small", "real", "positive"))
        param = self.d.param("A", "tensor", dtype, shape, fill)
        self.d.emit(f"T.copy({param.name}, {tile.name})")
        self.d.wrote(tile, known(fill, dtype))
        return tile

    def reduction(self) -> bool:
        d, rng = self.d, self.rng
        sources = [t for t in d.readable() if t.dtype != "bool" and len(t.shape) > 1]
        if not sources:
            return False
        src = rng.choice(sources)
        axis = rng.randrange(len(src.shape))
        kinds = ["sum", "max", "min", "abssum", "absmax", "prod"] + ["bitand", "bitor", "bitxor"] * (
            src.dtype in INTS
        )
        op = rng.choice(kinds)
        shape = tuple(n for k, n in enumerate(src.shape) if k != axis)
        dtype = (
            src.dtype
            if rng.random() < 0.7
            else rng.choice(("float32", "float64") if src.dtype in FLOATS else ("int32", "int64"))
        )
        targets = [t for t in d.writable(dtype) if t.shape == shape and t.memory is not src.memory]
        dst = rng.choice(targets) if targets and rng.random() < 0.5 else d.tile(dtype, shape)
        clear = dst.val is None or rng.random() < 0.7
        made = self._reduced(src, dst, op, src.shape[axis], clear)
        if made is None:
            return False
        dim = axis if rng.random() < 0.5 else axis - len(src.shape)
        how = (
            f"T.reduce_{op}({src.name}, {dst.name}, dim={dim}"
            if rng.random() < 0.7
            else f'T.reduce({src.name}, {dst.name}, "{op}", {dim}'
        )
        if "T.reduce(" in how:
            how = f"T.reduce_{op}({src.name}, {dst.name}, {dim}"
        d.emit(f"{how}{'' if clear else ', clear=False'})")
        d.wrote(dst, made)
        return True

    def _reduced(self, src: Tile, dst: Tile, op: str, count: int, clear: bool) -> Val | None:
        v, before = src.val, None if clear else dst.val
        assert v is not None
        if src.dtype in INTS:
            return self._reduced_integers(v, before, op, count, dst.dtype)
        wide = "float64" if "float64" in (src.dtype, dst.dtype) else "float32"
        v = replace(v, dtype=wide)
        before = None if before is None else replace(before, dtype=wide)
        if op.startswith("abs"):
            v = replace(v, lo=0.0, hi=v.most)
        if op.endswith("sum"):
            made = values.total(v, count, wide, before)
        elif op == "prod":
            made = v
            for _ in range(count - 1):
                made = None if made is None else values.arithmetic("*", made, v)
                made = (
                    None
                    if made is None
                    else replace(made, err=made.err + made.fused if made.q is None else made.err)
                )
            if before is not None and made is not None:
                made = values.arithmetic("*", made, before)
            made = (
                None
                if made is None
                else replace(made, err=made.err + (made.fused if made.q is None else 0) * 2)
            )
        else:
            made = v if before is None else values.join(v, before)
        return None if made is None else values.stored(made, dst.dtype)

    def _reduced_integers(self, v: Val, before: Val | None, op: str, count: int, dtype: str) -> Val | None:
        v = values.stored(v, dtype) or values.whole(dtype)
        lo, hi = int(v.lo), int(v.hi)
        if op.startswith("abs"):
            lo, hi = 0, max(abs(lo), abs(hi))
            if values.integer(dtype, lo, hi) is None:
                return None
        held = (0, 0) if before is None else (int(before.lo), int(before.hi))
        if op.endswith("sum"):
            return values.integer(dtype, count * min(lo, 0) + held[0], count * max(hi, 0) + held[1])
        if op == "prod":
            most = max(abs(lo), abs(hi), 1) ** count * max(1, abs(held[0]), abs(held[1]))
            return values.integer(dtype, -most if lo < 0 or held[0] < 0 else 0, most)
        if op.startswith("bit"):
            return values.whole(dtype)
        return Val(dtype, lo, hi) if before is None else Val(dtype, min(lo, held[0]), max(hi, held[1]))

    def pick(self) -> bool:
        """The greatest or the least of each line, or several, and where they stand: of values that all targets
        have alike, or else the places would differ."""
        d, rng = self.d, self.rng
        sources = [t for t in d.readable() if t.val is not None and t.val.same]
        if not sources:
            return False
        src = rng.choice(sources)
        shape, source = list(src.shape), src.name
        if rng.random() < 0.25:  # a part of it, from whose beginning places are counted
            first = [rng.randrange(n) for n in shape]
            shape = [rng.randint(1, n - at) for n, at in zip(shape, first)]
            source += f"[{', '.join(f'{at}:{at + n}' for at, n in zip(first, shape))}]"
        word = rng.choice(("argmax", "argmin", "topk"))
        axis = len(shape) - 1 if word == "topk" else rng.randrange(len(shape))
        count = rng.randint(1, min(4, shape[axis])) if word == "topk" else 1
        kept = [count] if word == "topk" or rng.random() < 0.2 else []
        left = tuple(shape[:axis] + kept + shape[axis + 1 :]) or (1,)
        values_to = self._target(src.dtype, left, src)
        places_to = self._target("int32", left, src, values_to)
        if word == "topk":
            how = f"k={count}" if rng.random() < 0.5 else str(count)
        else:
            dim = axis if rng.random() < 0.5 else axis - len(shape)
            how = f"dim={dim}" if rng.random() < 0.5 else str(dim)
            how = "" if dim == -1 and rng.random() < 0.5 else how
        d.emit(f"T.{word}({', '.join(filter(None, (source, values_to.name, places_to.name, how)))})")
        assert src.val is not None
        d.wrote(values_to, src.val)
        d.wrote(places_to, Val("int32", 0, shape[axis] - 1))
        return True

    def _target(self, dtype: str, shape: tuple[int, ...], *apart: Tile) -> Tile:
        """A tile to be written, perhaps one that is there already, in other memory than ``apart``."""
        there = [
            t
            for t in self.d.writable(dtype)
            if t.shape == shape and not any(t.memory is x.memory for x in apart)
        ]
        return self.rng.choice(there) if there and self.rng.random() < 0.5 else self.d.tile(dtype, shape)

    def scan(self) -> bool:
        d, rng = self.d, self.rng
        sources = [t for t in d.writable() if t.val is not None and t.dtype != "bool"]
        if not sources:
            return False
        tile = rng.choice(sources)
        v = tile.val
        assert v is not None
        axis, op = rng.randrange(len(tile.shape)), rng.choice(("sum", "sum", "max"))
        if op == "max":
            made: Val | None = v
        elif tile.dtype in INTS:
            n = tile.shape[axis]
            made = values.integer(
                tile.dtype, int(v.lo if v.lo > 0 else n * v.lo), int(v.hi if v.hi < 0 else n * v.hi)
            )
        else:
            wide = values.compute(tile.dtype)
            summed = values.total(replace(v, dtype=wide), tile.shape[axis], wide)
            made = None if summed is None else values.stored(summed, tile.dtype)
        if made is None:
            return False
        to = d.tile(tile.dtype, tile.shape) if rng.random() < 0.4 else tile
        where = "" if to is tile else f", {to.name}"
        d.emit(f"T.cum{op}({tile.name}{where}, dim={axis}{', reverse=True' if rng.random() < 0.4 else ''})")
        d.wrote(to, values.join(made, v) or made)
        return True

    def view(self) -> bool:
        d, rng = self.d, self.rng
        if not d.tiles:
            return False
        old = rng.choice(d.tiles)
        size = int(np.prod(old.shape))
        dtype = old.dtype
        if dtype in INTS and rng.random() < 0.4:
            dtype = rng.choice(INTS)
        width = {"8": 1, "16": 2, "32": 4, "64": 8}
        before, after = (width[x.lstrip("uint")] if x in INTS else 1 for x in (old.dtype, dtype))
        if size * before % after:
            return False
        count = size * before // after
        shapes = [(a, count // a) for a in range(1, count + 1) if count % a == 0] + [(count,)]
        shape = rng.choice(shapes)
        name = d.name("t")
        text = (
            f'T.view({old.name}, {shape}, "{dtype}")'
            if dtype != old.dtype or rng.random() < 0.5
            else f"T.reshape({old.name}, {shape})"
        )
        d.emit(f"{name} = {text}")
        d.tiles.append(Tile(name, dtype, shape, old.scope, old.memory))
        return True

    # -- what blocks share
    # ----------------------------------------------------------------------------------------
    def atomic(self) -> bool:
        """Updates of a tensor that all blocks share; their order must not show."""
        d, rng = self.d, self.rng
        dtype, kind = (
            rng.choice(("int32", "int64", "uint32", "float32", "float64")),
            rng.choice(("add", "add", "max", "min")),
        )
        n = rng.choice((1, 3, 8))
        loops = [Index(d.name("i"), 0, rng.choice((1, 4, 16)) - 1)]
        around = self.around(*loops)
        text, v = self.value(dtype, around, 2)
        if dtype in FLOATS and not v.same:
            return False
        count = d.repeats * (loops[0].hi + 1)
        made: Val | None = values.join(v, Val(dtype, 0, 0))
        if kind == "add":
            if dtype in FLOATS:
                made = None if v.q is None or v.fused else values.total(v, count, dtype)
                made = made if made is not None and made.same else None
            else:
                made = values.integer(dtype, count * min(int(v.lo), 0), count * max(int(v.hi), 0))
        if made is None or v.special:
            return False
        out = d.param("G", "tensor", dtype, (n,), "zero", written=made)
        with d.inside(f"for {loops[0].text} in T.{rng.choice(('Parallel', 'serial'))}({loops[0].hi + 1}):"):
            d.emit(f"T.atomic_{kind}({out.name}[{self.index(n, around)}], {text})")
        return True

    # -- control flow
    # ---------------------------------------------------------------------------------------------
    def condition_of_block(self) -> bool:
        d = self.d
        if d.depth_of_loops > 1 or not d.indices:
            return False
        test, _ = self.condition(self.around())
        before = {id(t.memory): t.memory.val for t in d.tiles}
        with d.inside(f"if {test}:"), self._nested(once=False):
            self._body(2)
        if self.rng.random() < 0.4:
            then = {id(t.memory): t.memory.val for t in d.tiles}
            for t in d.tiles:
                t.memory.val = before.get(id(t.memory))
            with d.inside("else:"), self._nested(once=False):
                self._body(2)
            before = then
        for t in d.tiles:
            t.memory.val = _either(before.get(id(t.memory)), t.memory.val)
        return True

    @contextlib.contextmanager
    def _nested(self, *, once: bool) -> Iterator[None]:
        """Tiles allocated inside are not seen outside."""
        d = self.d
        tiles, outer = list(d.tiles), d.once
        d.once = d.once and once
        d.depth_of_loops += 1
        yield
        d.depth_of_loops -= 1
        d.once, d.tiles = outer, tiles

    def _body(self, most: int) -> None:
        for _ in range(self.rng.randint(1, most)):
            self.statement()

    def loop(self) -> bool:
        """A loop over statements. Tiles that it writes are written anew in each round, before anyone reads
        them."""
        d, rng = self.d, self.rng
        if d.depth_of_loops > 1:
            return False
        trips, v = rng.randint(1, 4), d.name("k")
        kind = rng.choice(
            ("serial", "serial", "unroll", "Pipelined", "Pipelined", "range", "while", "number")
        )
        head = {
            "serial": f"for {v} in T.serial({trips}):",
            "unroll": f"for {v} in T.unroll({trips}):",
            "range": f"for {v} in range({trips}):",
            "Pipelined": f"for {v} in T.Pipelined({trips}, num_stages={rng.randint(0, 3)}):",
            "while": f"while {v} < {trips}:",
            "number": f"for {v} in T.serial(n_{v}):",
        }[kind]
        if kind == "number":
            d.scalars[f"n_{v}"] = trips
        if kind == "while":
            d.emit(f'{v} = T.alloc_var("int32", 0)')
        d.pipelined = d.pipelined or kind == "Pipelined"
        fresh = [t for t in d.writable() if rng.random() < 0.5]
        before = {id(t.memory): t.memory.val for t in d.tiles}
        froze = [t.memory for t in d.tiles if not t.memory.frozen]
        for t in d.tiles:
            t.memory.frozen = True
        for t in fresh:
            t.memory.frozen, t.memory.val = False, None
        outer = d.repeats
        d.repeats *= trips
        with d.inside(head), self._nested(once=False):
            d.indices.append(Index(v, 0, trips - 1, constant=kind == "range"))
            self._body(3)
            d.indices.pop()
            if kind == "while":
                d.emit(f"{v} += 1" if rng.random() < 0.5 else f"{v} = {v} + 1")
        d.repeats = outer
        for m in froze:
            m.frozen = False
        for t in fresh:  # not wholly written in the loop: perhaps in part
            if t.memory.val is None and not self._touched(t):
                t.memory.val = before[id(t.memory)]
        return True

    def _touched(self, tile: Tile) -> bool:
        names = [t.name for t in self.d.tiles if t.memory is tile.memory]
        return any(name in line for line in self.d.lines for name in names)

    def accumulate(self) -> bool:
        """A pipelined loop of products, the shape of every GEMM."""
        d, rng = self.d, self.rng
        dtype, acc = rng.choice(PRODUCTS)
        m, n, k, rounds = rng.choice((8, 16)), rng.choice((8, 12, 16)), rng.choice((4, 8)), rng.randint(2, 4)
        fill = "few" if dtype in INTS else rng.choice(("small", "real"))
        depth = rounds * k - rng.choice((0, 0, 1, 3))
        one = known(fill, dtype)
        made: Val | None
        if acc == "int32":
            made = Val("int32", -depth * 81, depth * 81)
        else:  # rounded to the accumulator's dtype in each round
            made = values.product(one, one, k, acc, None)
            for _ in range(rounds - 1):
                made = None if made is None else values.product(one, one, k, acc, made)
        if made is None or d.depth_of_loops:
            return False
        A = d.param("A", "tensor", dtype, (m, depth), fill)
        B = d.param("A", "tensor", dtype, (depth, n), fill)
        a, b, c = (
            d.tile(dtype, (m, k), "shared"),
            d.tile(dtype, (k, n), "shared"),
            d.tile(acc, (m, n), "fragment"),
        )
        d.emit(f"T.clear({c.name})")
        v = d.name("k")
        with d.inside(f"for {v} in T.Pipelined({rounds}, num_stages={rng.randint(0, 3)}):"):
            d.emit(f"T.copy({A.name}[0, {v} * {k}], {a.name})")
            d.emit(f"T.copy({B.name}[{v} * {k}, 0], {b.name})")
            d.emit(f"T.gemm({a.name}, {b.name}, {c.name})")
        d.pipelined = True
        for tile, v2 in ((a, one), (b, one), (c, made)):
            d.wrote(tile, values.join(v2, Val(tile.dtype, 0, 0)) or v2)
        return True

    def scalar(self) -> bool:
        """A mutable cell: set, changed in a loop or under a condition, read."""
        d, rng = self.d, self.rng
        if d.depth_of_loops:
            return False
        name, dtype = d.name("v"), rng.choice(("int32", "int64", "int32", "float32", "float16"))
        text, v = self.value(dtype, self.around(), 1)
        made = values.stored(v, dtype)
        if made is None:
            return False
        d.emit(f'{name} = T.alloc_var("{dtype}", {text})')
        if rng.random() < 0.5:
            test, _ = self.condition(self.around())
            with d.inside(f"if {test}:"):
                d.emit(f"{name} = 1" if dtype not in FLOATS else f"{name} = {name} * 1")
            made = values.join(made, Val(dtype, 1, 1))
        tile = d.tile(dtype, (rng.choice((1, 4, 16)),))
        d.emit(f"T.fill({tile.name}, {name})")
        assert made is not None
        d.wrote(tile, made)
        return True

    def executors(self) -> bool:
        """Warps or threads that each write a part of a tile."""
        d, rng = self.d, self.rng
        if d.depth_of_loops:
            return False
        scale = rng.choice(("warp", "thread", "warp"))
        count = THREADS // (32 if scale == "warp" else 1)
        width = rng.choice((1, 4)) if scale == "thread" else rng.choice((4, 16, 33))
        tile = d.tile(rng.choice(("float32", "int32", "float16")), (count, width), "shared")
        w, n = d.name("w"), d.name("n")
        with d.inside(f'with T.Scale("{scale}") as ({w}, {n}):'):
            i = Index(d.name("i"), 0, width - 1)
            around = self.around(Index(w, 0, count - 1), i)
            # of the block's fragments a part of its threads has a part, but of those of one element
            around.hidden += [
                tile.memory,
                *(t.memory for t in d.tiles if t.scope == "fragment" and np.prod(t.shape) > 1),
            ]
            with d.inside(f"for {i.text} in T.{rng.choice(('Parallel', 'serial'))}({width}):"):
                made = self._store(tile, f"{tile.name}[{w}, {i.text}]", around)
        d.wrote(tile, made)
        return True


THREADS = 64


def _either(a: Val | None, b: Val | None) -> Val | None:
    """What is known of memory that one of two branches left behind; nothing, where they left it as different
    dtypes."""
    return values.join(a, b) if a is not None and b is not None and a.dtype == b.dtype else None
