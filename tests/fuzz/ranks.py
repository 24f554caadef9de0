"""Programs of several ranks, in orders that are right by construction: phases that each take a block's tile
somewhere and bring another.

Every phase has memory and counters of its own, so none waits for what an earlier one left behind; rings use
theirs again, behind acknowledgements. All values are exact, whatever the order of arrival.
"""

from __future__ import annotations

import random
from collections.abc import Callable

from tests.fuzz import values
from tests.fuzz.draw import module
from tests.fuzz.programs import Draft, Index, Program, Tile, exact_step
from tests.fuzz.statements import THREADS, Statements
from tests.fuzz.values import FLOATS, Val


def draw_ranks(seed: int, ranks: int, most: int = 5) -> Program:
    """A program for that many ranks."""
    d = Draft(random.Random(f"{seed} of {ranks}"), dims=(1, 3, 4, 8, 9))
    phases = Phases(d, ranks)
    for _ in range(d.rng.randint(1, most)):
        phases.phase()
    head = f"with T.Kernel({phases.blocks}, threads={THREADS}) as b:"
    return Program(
        seed, module(d, head, f"seed {seed} of {ranks} ranks"), d.params, d.scalars, ranks, d.pipelined
    )


class Phases:
    """Draws phases. ``x``: the tile that the next one starts from, the block's own."""

    def __init__(self, d: Draft, ranks: int):
        self.d, self.rng, self.ranks = d, d.rng, ranks
        self.blocks = d.rng.randint(1, 3)
        self.dtype = d.rng.choice(
            ("int32", "int64", "float32", "float16", "bfloat16", "uint32", "int8", "float64")
        )
        self.shape = d.shape(2, 80)
        block = Index("b", 0, self.blocks - 1)
        d.blocks = (block,)
        # ranks differ in their data: every rank draws inputs of its own
        fill = "small" if self.dtype in FLOATS else "few"
        start = d.param("A", "tensor", self.dtype, (self.blocks, *self.shape), fill)
        d.depth += 1
        d.lines.append('        with T.Scale("device") as (rank, world):')
        d.indices = [block, Index("rank", 0, ranks - 1), Index("(world - 1)", ranks - 1, ranks - 1)]
        self.x = d.tile(self.dtype, self.shape, "shared")
        d.emit(f"T.copy({start.name}[b, 0:{self.shape[0]}, 0:{self.shape[1]}], {self.x.name})")
        q = exact_step(self.dtype) if self.dtype in FLOATS else 0
        d.wrote(self.x, Val(self.dtype, 0 if self.dtype[0] == "u" else -9, 9, q))
        self.kinds: list[Callable[[], None]] = [
            self.put,
            self.put,
            self.put_to_all,
            self.pull,
            self.pull_by_signal,
            self.ring,
            self.grid,
            self.collective,
            self.collective,
            self.set_and_wait,
            self.warps,
            self.local,
        ]

    def phase(self) -> None:
        self.rng.choice(self.kinds)()
        Statements(self.d).output(self.x)
        if self.x.val is None or self.x.val.most > 60:
            self._reduced()

    # -- helpers
    # --------------------------------------------------------------------------------------------------
    def _reduced(self) -> None:
        """Keeps values small, so that they stay exact in every dtype."""
        i, j = self.d.name("i"), self.d.name("j")
        text = f"{self.x.name}[{i}, {j}]"
        with self.d.inside(f"for {i}, {j} in T.Parallel({self.shape[0]}, {self.shape[1]}):"):
            small = (
                f"T.max(T.min({text}, 9), {0 if self.dtype[0] == 'u' else -9})"
                if self.dtype in FLOATS
                else f"{text} % 7"
            )
            self.d.emit(f"{text} = {small}")
        q = self.x.val.q if self.x.val is not None else 0
        self.d.wrote(self.x, Val(self.dtype, 0 if self.dtype[0] == "u" else -9, 9, q))

    def symm(self, *lead: int) -> str:
        return self.d.param("S", "symm", self.dtype, (*lead, *self.shape), "zero").name

    def signal(self, count: int) -> str:
        return self.d.param("s", "signal", "int64", (count,), "counters").name

    def tile(self) -> Tile:
        return self.d.tile(self.dtype, self.shape, "shared")

    def cut(self, *lead: str) -> str:
        return f"[{', '.join([*lead, f'0:{self.shape[0]}', f'0:{self.shape[1]}'])}]"

    def other(self) -> tuple[str, str]:
        """A rank to send to, and the one that sends here then."""
        k = self.rng.randint(0, self.ranks)
        return f"(rank + {k}) % world", f"(rank + {self.ranks * 2 - k}) % world"

    def arrived(self, source: str, val: Val | None = None) -> None:
        """What lies in symmetric memory becomes the tile of the next phase."""
        y = self.tile()
        self.d.emit(f"T.copy({source}, {y.name})")
        made = val or self.x.val
        assert made is not None
        self.d.wrote(y, made)
        self.x = y

    def summed(self, source: Callable[[str], str]) -> None:
        """The sum over ranks ``r`` of ``source(r)``, in rank order."""
        d, v = self.d, self.x.val
        assert v is not None
        total, part, r, i, j = self.tile(), self.tile(), d.name("r"), d.name("i"), d.name("j")
        d.emit(f"T.clear({total.name})")
        with d.inside(f"for {r} in T.serial(world):"):
            d.emit(f"T.copy({source(r)}, {part.name})")
            with d.inside(f"for {i}, {j} in T.Parallel({self.shape[0]}, {self.shape[1]}):"):
                d.emit(f"{total.name}[{i}, {j}] += {part.name}[{i}, {j}]")
        d.wrote(part, v)
        self._wrote_sum(total, v)

    def _wrote_sum(self, tile: Tile, v: Val) -> None:
        n = self.ranks
        made = (
            Val(self.dtype, min(n * v.lo, 0), n * v.hi, v.q)
            if self.dtype in FLOATS
            else values.integer(self.dtype, int(n * v.lo), int(n * v.hi))
        )
        assert made is not None
        self.d.wrote(tile, made)
        self.x = tile

    # -- phases
    # ---------------------------------------------------------------------------------------------------
    def put(self) -> None:
        d, rng = self.d, self.rng
        to, _ = self.other()
        S, s, amount = self.symm(self.blocks), self.signal(self.blocks), rng.randint(1, 3)
        if rng.random() < 0.5:
            d.emit(f"T.copy({self.x.name}, {S}{self.cut('b')}, dst={to}, signal={s}[b], value={amount})")
        else:
            d.emit(f"T.copy({self.x.name}, {S}{self.cut('b')}, dst={to})")
            d.emit(f"T.signal({s}[b], {amount}, dst={to})")
        d.emit(
            rng.choice(
                (
                    f"T.wait({s}[b], {amount})",
                    f'T.wait({s}[b], {amount}, cmp="eq")',
                    f'T.wait({s}[b], 0, cmp="gt")',
                )
            )
        )
        self.arrived(f"{S}{self.cut('b')}")

    def put_to_all(self) -> None:
        d = self.d
        S, s, r = self.symm(self.ranks, self.blocks), self.signal(self.blocks), d.name("r")
        with d.inside(f"for {r} in T.serial(world):"):
            d.emit(
                f"T.copy({self.x.name}, {S}{self.cut('rank', 'b')}, dst=(rank + {r}) % world, signal={s}[b])"
            )
        d.emit(f"T.wait({s}[b], world)")
        self.summed(lambda r: f"{S}{self.cut(r, 'b')}")

    def pull(self) -> None:
        S, (whom, _) = self.symm(self.blocks), self.other()
        self.d.emit(f"T.copy({self.x.name}, {S}{self.cut('b')})")
        self.d.emit("T.barrier()")
        y = self.tile()
        self.d.emit(f"T.copy({S}{self.cut('b')}, {y.name}, src={whom})")
        assert self.x.val is not None
        self.d.wrote(y, self.x.val)
        self.x = y

    def pull_by_signal(self) -> None:
        """Everyone says that its part is there; whoever has heard it from the owner may fetch it."""
        d = self.d
        S, s, (whom, hears) = self.symm(self.blocks), self.signal(self.blocks), self.other()
        d.emit(f"T.copy({self.x.name}, {S}{self.cut('b')})")
        d.emit(f"T.signal({s}[b], dst={hears})")
        d.emit(f"T.wait({s}[b])")
        y = self.tile()
        d.emit(f"T.copy({S}{self.cut('b')}, {y.name}, src={whom})")
        assert self.x.val is not None
        d.wrote(y, self.x.val)
        self.x = y

    def ring(self) -> None:
        """Tiles go round through two slots; a slot is written again once its reader has said so."""
        d, rounds, v = self.d, self.rng.randint(1, 4), self.x.val
        assert v is not None
        S, full, free, k = (
            self.symm(2, self.blocks),
            self.signal(self.blocks),
            self.signal(self.blocks),
            d.name("k"),
        )
        y = self.tile()
        d.emit(f"T.copy({self.x.name}, {y.name})")
        with d.inside(f"for {k} in T.serial({rounds}):"):
            with d.inside(f"if {k} >= 2:"):
                d.emit(f"T.wait({free}[b], {k} - 1)")
            d.emit(
                f"T.copy({y.name}, {S}{self.cut(f'{k} % 2', 'b')}, dst=(rank + 1) % world, signal={full}[b])"
            )
            d.emit(f"T.wait({full}[b], {k} + 1)")
            d.emit(f"T.copy({S}{self.cut(f'{k} % 2', 'b')}, {y.name})")
            d.emit(f"T.signal({free}[b], dst=(rank + world - 1) % world)")
        d.emit(f"T.wait({free}[b], {rounds})")
        d.wrote(y, v)
        self.x = y

    def grid(self) -> None:
        """Blocks of one rank through a tensor."""
        d, v = self.d, self.x.val
        assert v is not None
        W = d.param(
            "W",
            "tensor",
            self.dtype,
            (self.blocks, *self.shape),
            "zero",
            written=values.join(v, Val(self.dtype, 0, 0)),
        )
        d.emit(f"T.copy({self.x.name}, {W.name}{self.cut('b')})")
        with d.inside('with T.Scale("grid") as (own, blocks):'):
            d.emit("T.barrier()")
        self.arrived(f"{W.name}{self.cut(f'(b + {self.rng.randint(0, 2)}) % {self.blocks}')}")

    def collective(self) -> None:
        d, rng, v = self.d, self.rng, self.x.val
        assert v is not None
        kind = rng.choice(("all_gather", "all_to_all", "broadcast", "reduce_scatter", "all_reduce"))
        if kind == "all_gather":
            G = self.symm(self.ranks, self.blocks)
            d.emit(
                f"T.all_gather({self.x.name}, {G}{self.cut('0:world', 'b').replace('0:world', f'0:{self.ranks}')})"
            )
            self.summed(lambda r: f"{G}{self.cut(r, 'b')}")
        elif kind == "broadcast":
            Q = self.symm(self.blocks)
            d.emit(f"T.broadcast({self.x.name}, {Q}{self.cut('b')}, {rng.randrange(self.ranks)})")
            self.arrived(f"{Q}{self.cut('b')}")
        elif kind == "all_reduce":
            Q, op = self.symm(self.blocks), rng.choice(("sum", "max", "min"))
            d.emit(f"T.copy({self.x.name}, {Q}{self.cut('b')})")
            d.emit(f'T.all_reduce({Q}{self.cut("b")}, op="{op}")')
            self.arrived(f"{Q}{self.cut('b')}")
            if op == "sum":
                self._wrote_sum(self.x, v)
        else:
            P, G, r, op = (
                self.symm(self.ranks, self.blocks),
                self.symm(self.ranks, self.blocks),
                d.name("r"),
                rng.choice(("sum", "max", "min")),
            )
            with d.inside(f"for {r} in T.serial(world):"):
                d.emit(f"T.copy({self.x.name}, {P}{self.cut(r, 'b')})")
            whole = self.cut(f"0:{self.ranks}", "b")
            if kind == "all_to_all":
                d.emit(f"T.all_to_all({P}{whole}, {G}{whole})")
                self.summed(lambda r: f"{G}{self.cut(r, 'b')}")
            else:
                y = self.tile()
                d.emit(f'T.reduce_scatter({P}{whole}, {y.name}, op="{op}")')
                d.wrote(y, v)
                self.x = y
                if op == "sum":
                    self._wrote_sum(y, v)

    def set_and_wait(self) -> None:
        """A number instead of a count; it brings nothing but itself."""
        d = self.d
        s, (to, by), base = self.signal(self.blocks), self.other(), self.rng.randint(1, 9)
        d.emit(f'T.signal({s}[b], {base} + rank, op="set", dst={to})')
        d.emit(f'T.wait({s}[b], {base} + {by}, cmp="eq")')

    def warps(self) -> None:
        """Each warp puts its rows, and signals for itself."""
        d = self.d
        count = THREADS // 32
        S, s, (to, _) = self.symm(self.blocks), self.signal(self.blocks), self.other()
        rows = self.shape[0]
        with d.inside('with T.Scale("warp") as (w, n):'):
            i = d.name("i")
            with d.inside(f"for {i} in T.serial({-(-rows // count)}):"):
                with d.inside(f"if {i} * {count} + w < {rows}:"):
                    row = f"{i} * {count} + w"
                    d.emit(
                        f"T.copy({self.x.name}[{row}, 0:{self.shape[1]}], {S}[b, {row}, 0:{self.shape[1]}], dst={to})"
                    )
            d.emit(f"T.signal({s}[b], dst={to})")
        d.emit(f"T.wait({s}[b], {count})")
        self.arrived(f"{S}{self.cut('b')}")

    def local(self) -> None:
        """Arithmetic that tells ranks, blocks and elements apart."""
        d, v = self.d, self.x.val
        assert v is not None
        i, j, y = d.name("i"), d.name("j"), self.tile()
        with d.inside(f"for {i}, {j} in T.Parallel({self.shape[0]}, {self.shape[1]}):"):
            d.emit(
                f'{y.name}[{i}, {j}] = {self.x.name}[{i}, {j}] + T.cast((rank * 2 + b + {i} + {j}) % 5, "{self.dtype}")'
            )
        made = (
            Val(self.dtype, v.lo, v.hi + 4, v.q)
            if self.dtype in FLOATS
            else values.integer(self.dtype, int(v.lo), int(v.hi + 4))
        )
        assert made is not None
        d.wrote(y, made)
        self.x = y
