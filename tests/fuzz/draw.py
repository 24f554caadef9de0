"""A seed → a program of one rank."""

from __future__ import annotations

import random

from tests.fuzz.programs import Draft, Index, Program
from tests.fuzz.statements import THREADS, Statements
from tests.fuzz.values import Val


def draw(seed: int, most: int = 9) -> Program:
    """A well-formed program: what it reads is written, what blocks write does not meet, what it computes has
    known bounds."""
    d = Draft(random.Random(seed))
    s = Statements(d)
    kind = d.rng.choice(("1", "1", "2", "2", "3", "persistent", "one"))
    head, blocks = _grid(d, kind)
    d.blocks, d.indices = blocks, list(blocks)
    for b in blocks:
        d.repeats *= b.hi + 1
    if kind == "persistent":
        x, y = blocks
        d.depth += 1
        loop = f"for {y.text}, {x.text} in T.Persistent(({y.hi + 1}, {x.hi + 1}), {PERSISTENT}, b):"
        d.lines.append("        " + loop)
    for _ in range(d.rng.randint(2, most)):
        s.statement()
    _outputs(d, s)
    return Program(seed, module(d, head, f"seed {seed}"), d.params, d.scalars, 1, d.pipelined)


PERSISTENT = 3


def _grid(d: Draft, kind: str) -> tuple[str, tuple[Index, ...]]:
    """The launch, and the blocks' numbers, slowest first."""
    x, y, z = (d.rng.randint(1, 3) for _ in range(3))
    if kind == "one":
        return f"with T.Kernel(1, threads={THREADS}) as bx:", (Index("bx", 0, 0),)
    if kind == "1":
        return f"with T.Kernel({x}, threads={THREADS}) as bx:", (Index("bx", 0, x - 1),)
    if kind == "2":
        return f"with T.Kernel({x}, {y}, threads={THREADS}) as (bx, by):", (
            Index("by", 0, y - 1),
            Index("bx", 0, x - 1),
        )
    if kind == "3":
        blocks = (Index("bz", 0, z - 1), Index("by", 0, y - 1), Index("bx", 0, x - 1))
        return f"with T.Kernel({x}, {y}, {z}, threads={THREADS}) as (bx, by, bz):", blocks
    return f"with T.Kernel({PERSISTENT}, threads={THREADS}) as b:", (Index("bx", 0, x), Index("by", 0, y))


def _outputs(d: Draft, s: Statements, most: int = 6) -> None:
    """Shows what the last tiles hold."""
    seen: list[object] = []
    for tile in reversed(d.readable()):
        if tile.memory not in seen and len(seen) < most:
            seen.append(tile.memory)
            s.output(tile)
    if not any(p.val is not None for p in d.params):  # nothing was left to be seen: at least one tile
        tile = d.tile("int32", (4,))
        d.emit(f"T.fill({tile.name}, 3)")
        d.wrote(tile, Val("int32", 3, 3))
        s.output(tile)


def module(d: Draft, head: str, title: str) -> str:
    """The text of the Python module."""
    params = [f"        {p.name}: {p.declared}," for p in d.params] + [
        f"        {name}: T.int32," for name in d.scalars
    ]
    return "\n".join(
        [
            f'"""{title}"""',
            "",
            "import tilescale.language as T",
            "",
            "",
            "@T.prim_func",
            "def main(",
            *params,
            "):",
            "    " + head,
            *d.lines,
            "",
        ]
    )
