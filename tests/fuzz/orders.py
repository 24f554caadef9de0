"""Programs that are all order: ranks and blocks that put, pull, signal, wait and meet, right or not; nobody
computes anything.

A program is drawn from exchanges that are right (data with a signal, its acknowledgement, many senders and
one wait, a flag that is polled) and then changed: statements deleted, exchanged or repeated, counts and
comparisons and counters altered. What is wrong with it is for others to say: tests/fuzz/oracle.py by itself,
the simulator under its schedules (tests/fuzz/judge.py).
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

#: parts of the symmetric tensor, counters of the signal, flags
PARTS, COUNTERS, FLAGS = 2, 2, 1


@dataclass(frozen=True)
class Op:
    """One statement.

    kind: put, put and signal, pull, read, write (of ``part``); signal, wait (of ``counter``); barrier; store,
    update, poll, write if (of the rank's own flag). peer: the rank whose memory it is, for put, pull and
    signal. value: what is added, stored or awaited. how: of a signal add or set, of a wait its comparison.
    scale: of a wait.
    """

    kind: str
    part: int = 0
    counter: int = 0
    peer: int = 0
    value: int = 1
    how: str = "add"
    scale: str = "device"

    def text(self, row: str) -> list[str]:
        """Its source; ``row``: where what it reads is kept, a place of its own."""
        part, mine = f"x[{self.part}, 0:2]", f"kept[{row}, 0:2]"
        value, how = (
            self.value,
            f', op="{self.how}"' if self.kind.endswith("signal") else f', cmp="{self.how}"',
        )
        wait = f"T.wait(c[{self.counter}], {value}{how})"
        return {
            "put": [f"T.copy(A, {part}, dst={self.peer})"],
            "put and signal": [
                f"T.copy(A, {part}, dst={self.peer}, signal=c[{self.counter}], value={value})"
            ],
            "pull": [f"T.copy({part}, {mine}, src={self.peer})"],
            "read": [f"T.copy({part}, {mine})"],
            "write": [f"T.copy(A, {part})"],
            "signal": [f"T.signal(c[{self.counter}], {value}{how}, dst={self.peer})"],
            "wait": [wait] if self.scale == "device" else ['with T.Scale("grid"):', f"    {wait}"],
            "barrier": ["T.barrier()"],
            "store": [f"T.atomic_store(f[0], {value})"],
            "update": [f"T.atomic_add(f[0], {value})"],
            "poll": ["seen = 0", "while seen == 0:", "    seen = T.atomic_load(f[0])"],
            "write if": [f"if T.atomic_load(f[0]) == {value}:", f"    T.copy(A, {part})"],
        }[self.kind]


@dataclass(frozen=True)
class Orders:
    """``ops[e]``: what executor e does, block e % blocks of rank e // blocks."""

    seed: int
    ranks: int
    blocks: int
    ops: tuple[tuple[Op, ...], ...]

    def rank(self, executor: int) -> int:
        return executor // self.blocks

    def source(self) -> tuple[str, dict[int, tuple[int, int]]]:
        """A module that defines the kernel ``main``, and which statement stands at each of its lines: the
        executor and its number."""
        longest = max(1, *map(len, self.ops))
        lines = [
            "import tilescale.language as T",
            "",
            "",
            "@T.prim_func",
            "def main(",
            f'    A: T.Tensor((2,), "int32"), x: T.SymmTensor(({PARTS}, 2), "int32"), c: T.Signal(({COUNTERS},)),',
            f'    f: T.Tensor(({FLAGS},), "int32"), kept: T.Tensor(({self.blocks}, {longest}, 2), "int32"),',
            "):",
            f'    with T.Kernel({self.blocks}) as b, T.Scale("device") as (rank, world):',
            '        seen = T.alloc_var("int32")',
        ]
        places: dict[int, tuple[int, int]] = {}
        for executor, ops in enumerate(self.ops):
            rank, block = divmod(executor, self.blocks)
            lines += [f"        if rank == {rank}:", f"            if b == {block}:"]
            for n, op in enumerate(ops):
                for text in op.text(f"{block}, {n}"):
                    lines.append(" " * 16 + text)
                    places[len(lines)] = (executor, n)
            if not ops:
                lines.append(" " * 16 + "pass")
        return "\n".join(lines) + "\n", places


def draw_orders(seed: int, most: int = 18) -> Orders:
    """The program of a seed, of at most so many statements."""
    draw = random.Random(f"orders {seed}")
    ranks = draw.choice((2, 2, 3, 3, 4))
    blocks = 2 if ranks == 2 and draw.random() < 0.4 else 1
    drawn = _Drawn(draw, ranks, blocks)
    for _ in range(draw.randint(1, 4)):
        if sum(map(len, drawn.ops)) + 2 * ranks > most:
            break
        draw.choice(drawn.exchanges)()
    for _ in range(draw.choice((0, 1, 1, 2, 2, 3))):
        drawn.change()
    return Orders(seed, ranks, blocks, tuple(map(tuple, drawn.ops)))


class _Drawn:
    """A program being drawn."""

    def __init__(self, draw: random.Random, ranks: int, blocks: int):
        self.draw, self.ranks, self.blocks = draw, ranks, blocks
        self.ops: list[list[Op]] = [[] for _ in range(ranks * blocks)]
        self.sent: dict[tuple[int, int], int] = {}  # (rank, counter) → what its additions come to
        self.exchanges = [
            self.message,
            self.message,
            self.message,
            self.many,
            self.pulled,
            self.barrier,
            self.exact,
        ]
        if blocks > 1:
            self.exchanges += [self.flag, self.flag, self.flag, self.near]

    def executor(self, rank: int) -> int:
        return rank * self.blocks + self.draw.randrange(self.blocks)

    def two(self) -> tuple[int, int]:
        """Two ranks."""
        a, b = self.draw.sample(range(self.ranks), 2)
        return a, b

    def add(self, rank: int, counter: int, value: int = 1) -> int:
        """An addition to a counter is drawn; what must have come by then."""
        self.sent[rank, counter] = self.sent.get((rank, counter), 0) + value
        return self.sent[rank, counter]

    def put(self, to: int, part: int, counter: int, value: int) -> list[Op]:
        """Data and its signal, in one statement or in two."""
        if self.draw.random() < 0.6:
            return [Op("put and signal", part, counter, to, value)]
        return [Op("put", part, peer=to), Op("signal", counter=counter, peer=to, value=value)]

    # -- exchanges
    # ------------------------------------------------------------------------------------------------
    def message(self) -> None:
        """Data for one reader, who may acknowledge it; then the sender may use the place again."""
        (a, b), part, counter = self.two(), self.draw.randrange(PARTS), self.draw.randrange(COUNTERS)
        sender, reader, value = self.executor(a), self.executor(b), self.draw.choice((1, 1, 2))
        self.ops[sender] += self.put(b, part, counter, value)
        self.ops[reader] += [
            Op("wait", counter=counter, value=self.add(b, counter, value), how="ge"),
            Op("read", part),
        ]
        if self.draw.random() < 0.4:
            back = self.draw.randrange(COUNTERS)
            self.ops[reader].append(Op("signal", counter=back, peer=a))
            self.ops[sender] += [
                Op("wait", counter=back, value=self.add(a, back), how="ge"),
                Op("put", part, peer=b),
            ]

    def many(self) -> None:
        """Several senders, a part or the same counter each, and one who waits for all."""
        reader_rank, counter = self.draw.randrange(self.ranks), self.draw.randrange(COUNTERS)
        senders = [r for r in range(self.ranks) if r != reader_rank][:PARTS]
        total = 0
        for part, rank in enumerate(senders):
            total = self.add(reader_rank, counter)
            self.ops[self.executor(rank)] += self.put(reader_rank, part, counter, 1)
        reader = self.executor(reader_rank)
        self.ops[reader] += [
            Op("wait", counter=counter, value=total, how=self.draw.choice(("ge", "ge", "eq"))),
            Op("read", 0),
        ]

    def pulled(self) -> None:
        """A part is announced and fetched by another rank."""
        (a, b), part, counter = self.two(), self.draw.randrange(PARTS), self.draw.randrange(COUNTERS)
        self.ops[self.executor(a)] += [Op("write", part), Op("signal", counter=counter, peer=b)]
        self.ops[self.executor(b)] += [
            Op("wait", counter=counter, value=self.add(b, counter), how="ge"),
            Op("pull", part, peer=a),
        ]

    def barrier(self) -> None:
        for ops in self.ops:
            ops.append(Op("barrier"))

    def exact(self) -> None:
        """Somebody waits for one value of a counter that others may carry past it."""
        rank, counter = self.draw.randrange(self.ranks), self.draw.randrange(COUNTERS)
        for other in self.draw.sample(
            [r for r in range(self.ranks) if r != rank], self.draw.randint(1, min(2, self.ranks - 1))
        ):
            for _ in range(self.draw.randint(1, 2)):
                self.add(rank, counter)
                self.ops[self.executor(other)].append(Op("signal", counter=counter, peer=rank))
        value = self.draw.randint(1, self.sent[rank, counter])
        self.ops[self.executor(rank)].append(Op("wait", counter=counter, value=value, how="eq"))

    def flag(self) -> None:
        """Blocks of a rank through a flag: stored and polled, counted, or looked at once."""
        rank, part = self.draw.randrange(self.ranks), self.draw.randrange(PARTS)
        one, other = self.draw.sample(range(rank * self.blocks, (rank + 1) * self.blocks), 2)
        last = Op(self.draw.choice(("store", "update")))
        self.ops[one] += [Op("write", part), last]
        self.ops[other] += self.draw.choice(
            ([Op("poll"), Op("read", part)], [Op("write if", part)], [Op("write if", part, value=2)])
        )

    def near(self) -> None:
        """Blocks of a rank through a counter, at the scale of the grid."""
        rank, part, counter = (
            self.draw.randrange(self.ranks),
            self.draw.randrange(PARTS),
            self.draw.randrange(COUNTERS),
        )
        one, other = self.draw.sample(range(rank * self.blocks, (rank + 1) * self.blocks), 2)
        self.ops[one] += [Op("write", part), Op("signal", counter=counter, peer=rank)]
        self.ops[other] += [
            Op("wait", counter=counter, value=self.add(rank, counter), how="ge", scale="grid"),
            Op("read", part),
        ]

    # -- changes
    # --------------------------------------------------------------------------------------------------
    def change(self) -> None:
        """Something that may be wrong."""
        draw = self.draw
        ops = draw.choice([ops for ops in self.ops if ops])
        n = draw.randrange(len(ops))
        op, what = ops[n], draw.randrange(8)
        if what == 0:
            del ops[n]
        elif what == 1 and n + 1 < len(ops):
            ops[n], ops[n + 1] = ops[n + 1], ops[n]
        elif what == 2:
            ops.insert(draw.randint(0, len(ops)), op)
        elif what == 3 and op.kind in ("wait", "signal", "put and signal"):
            ops[n] = replace(op, value=max(1, op.value + draw.choice((-1, 1))))
        elif what == 4 and op.kind == "wait":
            ops[n] = replace(op, how=draw.choice(("eq", "eq", "ne", "le", "gt")))
        elif what == 5 and op.kind == "signal":
            ops[n] = replace(op, how="set")
        elif what == 6:
            ops[n] = replace(op, counter=draw.randrange(COUNTERS), part=draw.randrange(PARTS))
        else:
            ops[n] = replace(op, peer=draw.randrange(self.ranks))
