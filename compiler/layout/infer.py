"""Which layout every tile of a block gets on a GPU.

Operations come first: each states, best first, the fragments that it can work on (``TileOp.layouts``). Loops
follow the fragments that they index, and pass a layout on to the fragments that have none. What is still free
then takes the cheapest spread (layout/spread.py), largest tile first. Where several operations have choices,
combinations are tried in order of rank, and the one wins in which the fewest accesses are left that need
another thread's element.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import gcd, prod
from typing import Any

from tilescale.compiler.ir.lowerings import lowering
from tilescale.compiler.ir.nests import Element, Nest, nest_of
from tilescale.compiler.ir.operations import REGISTRY, find
from tilescale.compiler.ir.program import TileProgram
from tilescale.compiler.ir.scales import Executor
from tilescale.compiler.ir.source import loc_of
from tilescale.compiler.ir.target import Target
from tilescale.compiler.ir.walks import scalar_reads, walk
from tilescale.compiler.layout import asked, loops
from tilescale.compiler.layout.fragment import Fragment
from tilescale.compiler.layout.loops import bits_of, element_dtype, fragments_of, in_registers
from tilescale.compiler.layout.made import shown
from tilescale.compiler.layout.match import Loop
from tilescale.compiler.layout.spread import best, replicated
from tilescale.compiler.layout.viewed import viewed
from tilescale.compiler.layout.walked import MOST
from tilescale.compiler.tvm_compat import tirx
from tilescale.errors import Loc, TileValueError

#: elements of a tile that every thread holds whole because scalar code reads it; a larger one goes through
#: shared memory for that
REPLICATED = 16
#: combinations of the operations' choices that are tried
TRIES = 64


@dataclass(frozen=True)
class Demand:
    """The layout (mostly a Fragment) that a statement wants for a tile, with what asks for it."""

    buffer: Any
    layout: Any
    what: str
    loc: Loc | None


@dataclass
class Use:
    """A statement and its executor: a nest, an operation, or a scalar statement that reads ``reads``."""

    executor: Executor
    stmt: Any
    nest: Nest | None = None
    call: Any = None
    reads: Sequence[Element] = ()


@dataclass
class Uses:
    """Everything in a kernel that has a say about layouts."""

    threads: int
    target: Target
    owners: dict[Any, Executor] = field(default_factory=dict)
    items: list[Use] = field(default_factory=list)
    #: views of tiles in registers, each with what it views and its place
    views: list[tuple[Any, Any, Loc | None]] = field(default_factory=list)


def gather(program: TileProgram) -> Uses:
    """The uses of a program's tiles."""
    threads = program.launch.threads
    uses = Uses(threads, program.target)
    own = program.hints.get("own", frozenset())  # registers of each thread's own (passes/own_registers.py)
    for s, ex in walk(program.func.body, Executor("block", threads)):
        if isinstance(s, tirx.AllocBuffer):
            uses.owners[s.buffer] = ex.within("thread") if s.buffer in own else ex
            continue
        if isinstance(s, tirx.DeclBuffer):
            if in_registers(s.buffer):
                uses.views.append((s.buffer, s.data.args[0], loc_of(s.span)))
            continue
        nest = nest_of(s)
        if nest is not None:
            uses.items.append(Use(ex, s, nest=nest))
        elif isinstance(s, tirx.Evaluate) and find(s.value) is not None:
            uses.items.append(Use(ex, s, call=s.value, reads=scalar_reads(s)))
        elif found := scalar_reads(s):
            uses.items.append(Use(ex, s, reads=found))
    return uses


class Solver:
    """One combination of the operations' choices, carried through the program."""

    def __init__(self, uses: Uses, fixed: Mapping[Any, Demand]):
        self.uses, self.target = uses, uses.target
        self.demands: dict[Any, Demand] = dict(fixed)
        self.known: dict[Any, Any] = {b: d.layout for b, d in fixed.items()}
        self.free = [b for b in uses.owners if in_registers(b)]

    def executor_of(self, call: Any) -> Executor:
        return next(u.executor for u in self.uses.items if u.call is not None and u.call.same_as(call))

    def demand(self, d: Demand) -> None:
        """Takes a demand, or refuses it where another statement asked for something else.

        Raises:
            TileValueError: shows both demands.
        """
        before = self.demands.get(d.buffer)
        if before is not None and before.layout != d.layout:
            raise conflict(d.buffer, before, d)
        self.demands[d.buffer] = d
        self.known[d.buffer] = d.layout

    def settle(self) -> None:
        """Gives every tile in registers a layout."""
        for b in self.free:
            if b.ty.storage_scope == "local.var":
                self.known.setdefault(b, replicated(_shape(b), self.uses.owners[b].threads))
        self._read_below()
        self._follow_fixed_loops()
        self.propagate()
        for u in self.uses.items:  # scalars are computed by every thread: what they read is wanted by all
            for a in u.reads:
                if not in_registers(a.buffer) or a.buffer not in self.uses.owners or a.buffer in self.known:
                    continue
                if prod(_shape(a.buffer)) <= REPLICATED or a.buffer.ty.storage_scope == "local":
                    self.known[a.buffer] = replicated(_shape(a.buffer), self.uses.owners[a.buffer].threads)
        self.propagate()
        while left := [b for b in self.free if b not in self.known]:
            # a tile that is walked along has fewer ways to lie
            largest = max(left, key=lambda b: (bool(self._grains(b)), prod(_shape(b))))
            self.known[largest] = self.cheapest(largest)
            self.propagate()

    def _read_below(self) -> None:
        """Small fragments of which some of their threads read single elements, in a narrower scope, are held
        by all (see tile_owners); so is memory of T.alloc_local that they read in any way."""
        for u in self.uses.items:
            read = (
                u.reads
                if u.nest is None
                else [
                    a
                    for a in fragments_of(u.nest)
                    if a.mode == "read" and (not u.nest.vars or a.buffer.ty.storage_scope == "local")
                ]
            )
            for a in read:
                owner = self.uses.owners.get(a.buffer)
                if owner is not None and owner.threads != u.executor.threads and in_registers(a.buffer):
                    self.known.setdefault(a.buffer, replicated(_shape(a.buffer), owner.threads))

    def propagate(self) -> None:
        """Until nothing changes: operations and loops that know one layout pass it on."""
        changed = True
        while changed:
            before = len(self.known)
            for view, held, _ in self.uses.views:
                self._through_view(view, held)
                self._through_view(held, view)
            for u in self.uses.items:
                if u.nest is not None:
                    self._through_nest(u)
                elif u.call is not None:
                    for choice in lowering(u.call, self.target).layouts(u.call, self):
                        for d in choice:
                            self.known.setdefault(d.buffer, d.layout)
                        break
            changed = len(self.known) > before

    def _through_view(self, view: Any, held: Any) -> None:
        """What the layout of a tile says of a view of it, or the other way round."""
        if view in self.known or not isinstance(self.known.get(held), Fragment):
            return
        made = viewed(self.known[held], bits_of(held), bits_of(view), _shape(held), _shape(view))
        if made is not None:
            self.known[view] = made

    def _follow_fixed_loops(self) -> None:
        """Tiles that nobody else decides lie as the loops run that the author fixed: what they write, then
        what they read once."""
        fixed = [
            (u, u.nest, loop)
            for u in self.uses.items
            if u.nest is not None and (loop := asked.loop_of(u.nest)) is not None
        ]
        for reads_ in (False, True):
            for u, nest, loop in fixed:
                for a in fragments_of(nest):
                    made = self._as_it_runs(u, a, loop) if (a.mode == "read") == reads_ else None
                    if made is not None and (not reads_ or made.copies == loop.fragment.copies):
                        self.demand(
                            Demand(a.buffer, made, f"{nest.what}(loop_layout=…)", loc_of(nest.node.span))
                        )

    def _through_nest(self, u: Use) -> None:
        assert u.nest is not None
        accesses = fragments_of(u.nest)
        unknown = [a for a in accesses if a.buffer not in self.known and self._mine(a.buffer, u)]
        decided = u.nest.layout or any(
            a.buffer in self.known and _decides(u.nest, a, self.known[a.buffer]) for a in accesses
        )
        if not unknown or not decided:
            return
        loop, _ = loops.choose(u.nest, self.known, u.executor.threads)
        if loop is None:
            return
        for a in unknown:
            if (made := self._as_it_runs(u, a, loop)) is not None:
                self.known[a.buffer] = made

    def _as_it_runs(self, u: Use, a: Element, loop: Loop) -> Fragment | None:
        """The layout of a tile that has none yet, by a loop that touches it."""
        if a.buffer in self.known or not self._mine(a.buffer, u):
            return None
        made = loops.from_loop(u.nest, a, loop) if u.nest is not None else None
        return made if made is not None and made.threads == self.uses.owners[a.buffer].threads else None

    def _mine(self, buffer: Any, u: Use) -> bool:
        return buffer in self.uses.owners and self.uses.owners[buffer] == u.executor

    def _grains(self, buffer: Any) -> dict[int, int]:
        """The axes of a tile along which loops outside or inside of the nests walk (layout/walked.py)."""
        found: dict[int, int] = {}
        for nest in (u.nest for u in self.uses.items if u.nest is not None and u.nest.vars):
            for a in nest.accesses:
                if a.buffer.same_as(buffer):
                    for axis, grain in loops.grains(nest, a).items():
                        found[axis] = gcd(found.get(axis, 0), grain)
        return found

    def cheapest(self, buffer: Any) -> Fragment:
        """The spread of a tile that nothing else decides: along the axis on which its copies walk memory,
        mindful of reductions."""
        shape, bits = _shape(buffer), bits_of(buffer)
        along, widest, reduced = len(shape) - 1, 0, []
        for u in self.uses.items:
            if u.nest is not None:
                memory = [a for a in u.nest.accesses if not in_registers(a.buffer)]
                mine = [a for a in u.nest.accesses if a.buffer.same_as(buffer)]
                # one number for all iterations, read from memory, says nothing of the tile
                if mine and memory and (walk := loops.contiguous(u.nest)) is not None:
                    k, run = walk
                    axes = [
                        x
                        for x, e in enumerate(mine[0].indices)
                        if (loops.plain_index(e, u.nest.vars) or (-1, 0))[0] == k
                    ]
                    if (
                        axes
                    ):  # in elements of the memory: a float32 tile of half floats has eight to an access
                        along, widest = axes[0], max(1, min(widest or run, run))
            elif (
                u.call is not None
                and REGISTRY[u.call.op.name].folds
                and u.call.args[0].source.same_as(buffer)
            ):
                reduced.append(int(u.call.attrs["axis"]) % len(shape))
        threads, wave = self.uses.owners[buffer].threads, self.uses.target.wave
        width = widest or 128 // bits
        if grains := self._grains(buffer):
            made = best(shape, threads, bits, along, width, tuple(reduced), wave, grains)
            if made.slots * bits <= 32 * MOST:
                return made
        return best(shape, threads, bits, along, width, tuple(reduced), wave)

    def misfits(self) -> float:
        """How many elements the accesses name that need another thread's: what has to go through shared
        memory."""
        total = 0.0
        for u in self.uses.items:
            if u.nest is not None:
                _, bad = loops.choose(u.nest, self.known, u.executor.threads)
                total += sum(prod(_shape(a.buffer)) for a, _ in bad)
        return total


def _decides(nest: Nest, a: Element, layout: Any) -> bool:
    """The same before all is known: one number that is written does not, either."""
    return loops.decides(nest, a, layout) and prod(layout.shape) > 1


def _shape(buffer: Any) -> tuple[int, ...]:
    return tuple(int(e) for e in buffer.ty.shape)


def conflict(buffer: Any, first: Demand, second: Demand) -> TileValueError:
    """The refusal of two demands that cannot both be met."""
    where = f"{first.loc.file}:{first.loc.line}" if first.loc else "elsewhere"
    return TileValueError(
        f"{buffer.name} is wanted in two layouts: {second.what} here wants {shown(second.layout)}, "
        f"{first.what} at {where} wants "
        f"{shown(first.layout)}",
        loc=second.loc,
        expected="one layout for a tile",
        hint=f"T.copy({buffer.name}, other) into a second {'fragment' if in_registers(buffer) else 'tile'} "
        "between the two",
    )


def infer(program: TileProgram, annotated: Mapping[Any, Demand] | None = None) -> dict[Any, Any]:
    """A layout for every tile in registers.

    Raises:
        TileValueError: two statements demand different layouts of one tile, and neither has another choice.
    """
    uses = gather(program)
    _check_threads(uses)
    fixed = dict(annotated or {})
    choices: list[list[list[Demand]]] = []
    asking = Solver(uses, fixed)
    for u in uses.items:
        how = lowering(u.call, uses.target)
        ranked = list(how.layouts(u.call, asking)) if how.demands else []
        if ranked:
            choices.append(ranked)
    found: Solver | None = None
    least, refusal = 0.0, None
    tries = 0
    for combination in _combinations(choices):
        made = Solver(uses, fixed)
        try:
            for d in itertools.chain.from_iterable(combination):
                made.demand(d)
        except TileValueError as error:
            refusal = refusal or error
            continue
        tries += 1
        made.settle()
        price = made.misfits()
        if found is None or price < least:
            found, least = made, price
        if not price or tries == TRIES:
            break
    if found is None:
        raise refusal if refusal is not None else TileValueError("no layout was found", loc=program.loc)
    for view, held, where in uses.views:
        if view not in found.known:
            raise TileValueError(
                f"a view of {held.name} of {_shape(held)} {element_dtype(held)} as {_shape(view)} "
                f"{element_dtype(view)}: the elements that "
                f"become one do not lie side by side in one thread, {shown(found.known[held])}",
                loc=where,
                expected="a view that changes the last axis alone, of a tile whose neighbours lie in one "
                "thread",
                hint="T.alloc_shared, or T.reinterpret of each element",
            )
    _check_fixed_loops(found)
    return found.known


def _check_threads(uses: Uses) -> None:
    """Every loop that the author fixed is spread over the threads that run it."""
    for u in uses.items:
        loop = asked.loop_of(u.nest) if u.nest is not None else None
        if loop is None or loop.fragment.threads == u.executor.threads:
            continue
        times, over = divmod(u.executor.threads, loop.fragment.threads)
        raise TileValueError(
            f"loop_layout is over {loop.fragment.threads} threads, and the {u.executor.name} here has "
            f"{u.executor.threads}",
            loc=loc_of(u.stmt.span),
            expected=f"a T.Fragment over all {u.executor.threads} threads",
            hint=f"T.Fragment(…, replicate={times}), whose copies run the same iterations"
            if times > 1 and not over
            else None,
        )


def _check_fixed_loops(found: Solver) -> None:
    """Every loop that the author fixed finds what it touches in its own threads.

    Raises:
        TileValueError: shows what the loop and what the tile's other statements ask for.
    """
    for u in found.uses.items:
        loop = asked.loop_of(u.nest) if u.nest is not None else None
        if u.nest is None or loop is None:
            continue
        for a, why in loops.choose(u.nest, found.known, u.executor.threads)[1]:
            b, loc, held, what = (
                a.buffer,
                loc_of(u.stmt.span),
                found.known[a.buffer],
                f"{u.nest.what}(loop_layout=…)",
            )
            made = loops.from_loop(u.nest, a, loop)
            if made is not None:
                raise conflict(
                    b,
                    found.demands.get(b, Demand(b, held, "what else touches it", None)),
                    Demand(b, made, what, loc),
                )
            raise TileValueError(
                f"{b.name} lies as {shown(held)}, and {what} runs its iterations as {shown(loop.fragment)}: "
                f"{why}",
                loc=loc,
                expected="iterations where the elements lie",
                hint=f"no loop_layout, or {b.name} in shared memory",
            )


def _combinations(choices: list[list[list[Demand]]]) -> Iterator[tuple[list[Demand], ...]]:
    """Combinations of one alternative of each: the best of each, then those in which all are cut alike (what
    one product leaves is mostly what the next one takes), then all by the sum of their ranks."""
    if not choices:
        yield ()
        return
    first = tuple(0 for _ in choices)
    named = [{c[0].what: k for k, c in reversed(list(enumerate(ranked)))} for ranked in choices]
    alike = [tuple(n[what] for n in named) for what in named[0] if all(what in n for n in named)]
    ranks = itertools.islice(itertools.product(*[range(len(c)) for c in choices]), 4096)
    for pick in dict.fromkeys((first, *sorted(alike, key=sum), *sorted(ranks, key=sum))):
        yield tuple(c[k] for c, k in zip(choices, pick, strict=True))
