"""The tile programs of the collectives: a tensor is a row of numbers, cut into pieces of ``Q``.

Piece p belongs to block p % blocks, on every rank: what one rank's block puts, the same block of another rank
awaits, so no block waits for all others of its rank. Puts go on beside each other (``blocking=False``) and
begin at the own neighbour, so that no rank is everyone's first target. A put is a whole piece, since each one
ends in a signal; a piece is added ``P`` numbers at a time, which lie in registers. Sums are float32's (of
float64 its own), in rank order.
"""

from __future__ import annotations

from typing import Any

import tilescale.language as T
from tilescale.language.dtypes import BITS
from tilescale.ops.activations import activated


def vector(dtype: str) -> int:
    """Numbers of 16 bytes. Rows that other ranks write are whole vectors long, whatever those that they are
    copies of begin and end at: what crosses goes 16 bytes at a time."""
    return 128 // BITS[dtype]


def added_as(dtype: str) -> str:
    """The dtype of sums."""
    return "float64" if dtype == "float64" else "float32"


def pieces_of(extent: Any, Q: int, block: Any, blocks: int) -> Any:
    """How many pieces of so many numbers a block has."""
    return T.max(0, T.ceildiv(T.ceildiv(extent, Q) - block, blocks))


def shares(b: Any, blocks: int, givers: int) -> tuple[Any, int, Any, int]:
    """A block's number among those that put, how many they are, and the same of those that take what arrives:
    all do both, or the first ``givers`` put, so that the links are busy while the others write."""
    return (b, givers, b - givers, blocks - givers) if givers else (b, blocks, b, blocks)


def carry(P: int, blocks: int, threads: int, dtype: str) -> Any:
    """C = A, rows of whole vectors, ``P`` numbers of a block at a time."""
    m = T.dynamic("m", multiple_of=vector(dtype))

    @T.prim_func
    def copied(A: T.Tensor((m,), dtype), C: T.Tensor((m,), dtype)):
        with T.Kernel(blocks, threads=threads) as b:
            for p in T.serial(pieces_of(m, P, b, blocks)):
                at = (p * blocks + b) * P
                T.copy(A[at : at + P], C[at : at + P])

    return copied


def gather(
    world: int, Q: int, blocks: int, threads: int, dtype: str, align: int, direct: bool, givers: int = 0
) -> Any:
    """C[r] = rank r's A. A (m,), C (world, n), G (world, w): m ≤ n ≤ w, known to the call; m and n are
    multiples of ``align``, w of a vector. ``direct``: C is G, which peers reach; else what arrives in G is
    copied on. ``givers``: `shares`."""
    n, m = T.dynamic("n", multiple_of=align), T.dynamic("m", multiple_of=align)
    w = T.dynamic("w", multiple_of=vector(dtype))

    @T.macro
    def body(A, G, arrived, C):
        with T.Kernel(blocks, threads=threads, awaited=True) as b:
            put, puts, take, takes = shares(b, blocks, givers)
            with T.Scale("device") as (rank, size):
                if put < puts:
                    for p in T.serial(pieces_of(n, Q, put, puts)):
                        at = (p * puts + put) * Q
                        for hop in T.serial(1, size):
                            T.copy(
                                A[at : at + Q],
                                G[rank, at : at + Q],
                                dst=(rank + hop) % size,
                                signal=arrived[rank, put],
                                blocking=False,
                            )
                if take >= 0:
                    for p in T.serial(pieces_of(n, Q, take, takes)):
                        at = (p * takes + take) * Q
                        T.copy(A[at : at + Q], (G if direct else C)[rank, at : at + Q])
                    for p in T.serial(pieces_of(n, Q, take, takes)):
                        piece = p * takes + take
                        at = piece * Q
                        for hop in T.serial(1, size):
                            source = (rank - hop + size) % size
                            T.wait(arrived[source, piece % puts], piece // puts + 1)
                            if not direct:
                                T.copy(G[source, at : at + Q], C[source, at : at + Q])

    @T.prim_func
    def all_gather(
        A: T.Tensor((m,), dtype),
        G: T.SymmTensor((world, w), dtype),
        arrived: T.Signal((world, givers or blocks)),
        C: T.Tensor((world, n), dtype),
    ):
        body(A, G, arrived, C)

    @T.prim_func
    def all_gather_direct(
        A: T.Tensor((m,), dtype),
        G: T.SymmTensor((world, n), dtype),
        arrived: T.Signal((world, givers or blocks)),
    ):
        body(A, G, arrived, None)

    return all_gather_direct if direct else all_gather


def gather_by_packets(world: int, P: int, blocks: int, threads: int, dtype: str, align: int) -> Any:
    """The same in packets, which need no signal, and no flags where a launch begins and ends. A block has
    ``P`` numbers of each rank; box (world, blocks · (P + 4)) is at least as wide as C, and has a row's length
    behind each block's numbers: nothing else would show that ranks brought different shapes."""
    n, m = T.dynamic("n", multiple_of=align), T.dynamic("m", multiple_of=align)

    @T.prim_func
    def all_gather(
        A: T.Tensor((m,), dtype),
        box: T.Packets((world, blocks * (P + 4)), dtype),
        C: T.Tensor((world, n), dtype),
    ):
        with T.Kernel(blocks, threads=threads) as b, T.Scale("device") as (rank, _):
            mine, all = T.alloc_fragment((P,), dtype), T.alloc_fragment((world, P), dtype)
            long, lengths = T.alloc_fragment((4,), dtype), T.alloc_shared((world, 4), dtype)
            T.fill(long, n)
            T.copy(A[b * P], mine)
            T.put_packets(mine, box[rank, b * P])
            T.put_packets(long, box[rank, blocks * P + b * 4])
            T.get_packets(box[0:world, b * P : (b + 1) * P], all)
            T.get_packets(box[0:world, blocks * P + b * 4 : blocks * P + (b + 1) * 4], lengths)
            for r in T.serial(world):
                T.device_assert(lengths[r, 0] == n, "ranks gather different shapes; rows= says how many rows")
            T.copy(all, C[0, b * P])

    return all_gather


@T.macro
def hand_out(
    A: Any, parts: Any, n: Any, Q: int, b: Any, blocks: int, rank: Any, size: Any, given: Any, blocking: bool
):
    """Puts this block's pieces of each rank's ``n`` numbers of A to the rank that adds them."""
    for p in T.serial(pieces_of(n, Q, b, blocks)):
        at = (p * blocks + b) * Q
        for hop in T.serial(1, size):
            owner = (rank + hop) % size
            T.copy(
                A[owner * n + at : owner * n + at + Q],
                parts[rank, at : at + Q],
                dst=owner,
                signal=given,
                blocking=blocking,
            )


@T.macro
def add_parts(parts: Any, own: Any, own_at: Any, at: Any, P: int, rank: Any, part: Any, acc: Any):
    """acc = Σ over ranks, in order, of parts[r, at : at + P], of which this rank's are own[own_at …]. Each
    rank's numbers have registers of their own in ``part``, so that all are read at once."""
    for r in range(len(part)):
        if r == rank:
            T.copy(own[own_at : own_at + P], part[r])
        else:
            T.copy(parts[r, at : at + P], part[r])
    T.clear(acc)
    for r in range(len(part)):
        for i in T.Parallel(P):
            acc[i] += T.cast(part[r][i], acc.dtype)


@T.macro
def finished(acc: Any, add: Any, at: Any, activation: str):
    """acc = act(acc + add), where the numbers are from place ``at`` on of rows as long as ``add``."""
    if add is not None or activation:
        for i in T.Parallel(*acc.shape):
            x = acc[i] if add is None else acc[i] + add[(at + i) % add.shape[0]]
            acc[i] = activated(x, activation)


@T.macro
def added(parts: Any, acc: Any):
    """acc = Σ over ranks, in order, of their parts, in float32: packets have no float64."""
    T.clear(acc)
    for i in T.Parallel(parts.shape[1]):
        for r in T.serial(parts.shape[0]):
            acc[i] += T.cast(parts[r, i], "float32")


def scatter_sum(
    world: int, P: int, Q: int, blocks: int, threads: int, dtype: str, align: int, out: str, bias: int,
    activation: str, givers: int = 0,
) -> Any:  # fmt: skip
    """C = act(Σ over ranks of their X[rank · n …] + bias), where n is ``steps`` times ``align``. X (t,),
    parts (world, w), C (m,): m ≤ n ≤ w, t ≤ world · n, w a multiple of a vector. ``bias``: so many numbers,
    again and again; 0: none. ``givers``: `shares`."""
    m, t = (T.dynamic(x, multiple_of=align) for x in "mt")
    w = T.dynamic("w", multiple_of=vector(dtype))

    @T.prim_func
    def reduce_scatter(
        X: T.Tensor((t,), dtype),
        parts: T.SymmTensor((world, w), dtype),
        add: T.Tensor((max(1, bias),), out),
        arrived: T.Signal((world, givers or blocks)),
        C: T.Tensor((m,), out),
        steps: T.int32,
    ):
        with T.Kernel(blocks, threads=threads, awaited=True) as b:
            put, puts, take, takes = shares(b, blocks, givers)
            part = [T.alloc_fragment((P,), dtype) for _ in range(world)]
            acc = T.alloc_fragment((P,), added_as(dtype))
            n = steps * align
            with T.Scale("device") as (rank, size):
                if put < puts:
                    hand_out(X, parts, n, Q, put, puts, rank, size, arrived[rank, put], False)
                if take >= 0:
                    for p in T.serial(pieces_of(n, Q, take, takes)):
                        piece = p * takes + take
                        for hop in T.serial(1, size):
                            T.wait(arrived[(rank - hop + size) % size, piece % puts], piece // puts + 1)
                        for s in T.serial(Q // P):
                            at = piece * Q + s * P
                            if at < m:
                                add_parts(parts, X, rank * n + at, at, P, rank, part, acc)
                                finished(acc, add if bias else None, at, activation)
                                T.copy(acc, C[at])

    return reduce_scatter


def scatter_arrived(
    world: int, P: int, blocks: int, threads: int, dtype: str, align: int, out: str, bias: int,
    activation: str, inplace: bool,
) -> Any:  # fmt: skip
    """What is left of `scatter_sum` where engines have put the others' numbers into ``parts`` (world, m), of
    rank number ``rank``, whose own are ``own`` (m,): ``count`` times P numbers of the result, from first · P
    on. ``inplace``: own takes them."""
    m = T.dynamic("m", multiple_of=align)

    @T.macro
    def body(own, parts, add, rank, first, count, C):
        with T.Kernel(blocks, threads=threads) as b:
            part = [T.alloc_fragment((P,), dtype) for _ in range(world)]
            acc = T.alloc_fragment((P,), added_as(dtype))
            for p in T.serial(pieces_of(count, 1, b, blocks)):
                at = (first + p * blocks + b) * P
                add_parts(parts, own, at, at, P, rank, part, acc)
                finished(acc, add if bias else None, at, activation)
                T.copy(acc, C[at])

    mine, parts = T.Tensor((m,), dtype), T.Tensor((world, m), dtype)
    add, number = T.Tensor((max(1, bias),), out), T.int32

    @T.prim_func
    def reduce_scatter_arrived(
        own: mine, parts: parts, add: add, rank: number, first: number, count: number, C: T.Tensor((m,), out)
    ):
        body(own, parts, add, rank, first, count, C)

    @T.prim_func
    def reduce_scatter_arrived_in_place(
        own: mine, parts: parts, add: add, rank: number, first: number, count: number
    ):
        body(own, parts, add, rank, first, count, own)

    return reduce_scatter_arrived_in_place if inplace else reduce_scatter_arrived


def scatter_by_packets(
    world: int, P: int, blocks: int, threads: int, dtype: str, align: int, out: str, bias: int,
    activation: str,
) -> Any:  # fmt: skip
    """The same of equal parts X (world, n), in dense packets, as `by_packets`."""
    n = T.dynamic("n", multiple_of=align)

    @T.prim_func
    def reduce_scatter(
        X: T.Tensor((world, n), dtype),
        box: T.Packets((world, blocks * P), dtype, dense=True),
        add: T.Tensor((max(1, bias),), out),
        C: T.Tensor((n,), out),
    ):
        with T.Kernel(blocks, threads=threads) as b, T.Scale("device") as (rank, _):
            mine = [T.alloc_fragment((P,), dtype) for _ in range(world)]
            parts, acc = T.alloc_fragment((world, P), dtype), T.alloc_fragment((P,), "float32")
            for hop in range(world):  # the next one first, this one last; all are read at once
                T.copy(X[(rank + 1 + hop) % world, b * P], mine[hop])
            for hop in range(world):
                T.put_packets(mine[hop], box[rank, b * P], dst=(rank + 1 + hop) % world)
            T.get_packets(box[0:world, b * P : (b + 1) * P], parts)
            added(parts, acc)
            finished(acc, add if bias else None, b * P, activation)
            T.copy(acc, C[b * P])

    return reduce_scatter


def one_shot(
    world: int, P: int, Q: int, blocks: int, threads: int, dtype: str, align: int, out: str, bias: int,
    activation: str, inplace: bool,
) -> Any:  # fmt: skip
    """C = act(Σ of all ranks' A + bias), each rank adding everyone's whole A: one trip, for small ones.
    ``inplace``: A takes the sum, which a block writes when it has put its pieces."""
    t, w = T.dynamic("t", multiple_of=align), T.dynamic("w", multiple_of=vector(dtype))

    @T.macro
    def body(A, parts, add, arrived, C):
        with T.Kernel(blocks, threads=threads, awaited=True) as b:
            part = [T.alloc_fragment((P,), dtype) for _ in range(world)]
            acc = T.alloc_fragment((P,), added_as(dtype))
            with T.Scale("device") as (rank, size):
                for p in T.serial(pieces_of(t, Q, b, blocks)):
                    at = (p * blocks + b) * Q
                    for hop in T.serial(1, size):
                        T.copy(
                            A[at : at + Q],
                            parts[rank, at : at + Q],
                            dst=(rank + hop) % size,
                            signal=arrived[b],
                        )
                T.wait(arrived[b], pieces_of(t, Q, b, blocks) * (size - 1))
                for p, s in T.grid(pieces_of(t, Q, b, blocks), Q // P):
                    at = (p * blocks + b) * Q + s * P
                    if at < t:
                        add_parts(parts, A, at, at, P, rank, part, acc)
                        finished(acc, add if bias else None, at, activation)
                        T.copy(acc, C[at])

    X, parts, add = T.Tensor((t,), dtype), T.SymmTensor((world, w), dtype), T.Tensor((max(1, bias),), out)
    flags = T.Signal((blocks,))

    @T.prim_func
    def all_reduce(A: X, parts: parts, add: add, arrived: flags, C: T.Tensor((t,), out)):
        body(A, parts, add, arrived, C)

    @T.prim_func
    def all_reduce_in_place(A: X, parts: parts, add: add, arrived: flags):
        body(A, parts, add, arrived, A)

    return all_reduce_in_place if inplace else all_reduce


def by_packets(
    world: int, P: int, blocks: int, threads: int, dtype: str, align: int, out: str, bias: int,
    activation: str, inplace: bool,
) -> Any:  # fmt: skip
    """The same in dense packets, which need no signal, and no flags where a launch begins and ends: one trip,
    for the smallest. A block has ``P`` numbers; box (world, blocks · P) is at least as long as A."""
    t = T.dynamic("t", multiple_of=align)

    @T.macro
    def body(A, box, add, C):
        with T.Kernel(blocks, threads=threads) as b, T.Scale("device") as (rank, _):
            mine, parts = T.alloc_fragment((P,), dtype), T.alloc_fragment((world, P), dtype)
            acc = T.alloc_fragment((P,), "float32")
            T.copy(A[b * P], mine)
            T.put_packets(mine, box[rank, b * P])
            T.get_packets(box[0:world, b * P : (b + 1) * P], parts)
            added(parts, acc)
            finished(acc, add if bias else None, b * P, activation)
            T.copy(acc, C[b * P])

    X, add = T.Tensor((t,), dtype), T.Tensor((max(1, bias),), out)
    box = T.Packets((world, blocks * P), dtype, dense=True)

    @T.prim_func
    def all_reduce(A: X, box: box, add: add, C: T.Tensor((t,), out)):
        body(A, box, add, C)

    @T.prim_func
    def all_reduce_in_place(A: X, box: box, add: add):
        body(A, box, add, A)

    return all_reduce_in_place if inplace else all_reduce


def two_shot(
    world: int, P: int, Q: int, blocks: int, threads: int, dtype: str, align: int, out: str, bias: int,
    activation: str, inplace: bool,
) -> Any:  # fmt: skip
    """The same in two trips, for large ones: rank r adds the numbers from r · n on and hands the sums out.
    n, a multiple of Q, times world is at least t."""
    t, n = T.dynamic("t", multiple_of=align), T.dynamic("n", multiple_of=Q)

    @T.macro
    def body(A, parts, sums, add, given, done, C):
        with T.Kernel(blocks, threads=threads, awaited=True) as b:
            part = [T.alloc_fragment((P,), dtype) for _ in range(world)]
            acc = T.alloc_fragment((P,), added_as(dtype))
            whole = T.alloc_fragment((P,), out)
            with T.Scale("device") as (rank, size):
                hand_out(A, parts, n, Q, b, blocks, rank, size, given[b], inplace)
                T.wait(given[b], pieces_of(n, Q, b, blocks) * (size - 1))
                for p in T.serial(pieces_of(n, Q, b, blocks)):
                    for s in T.serial(Q // P):
                        at = (p * blocks + b) * Q + s * P
                        add_parts(parts, A, rank * n + at, at, P, rank, part, acc)
                        finished(acc, add if bias else None, rank * n + at, activation)
                        T.copy(acc, whole)
                        T.copy(whole, C[rank * n + at])
                        T.copy(whole, sums[rank, at])
                    low = (p * blocks + b) * Q
                    for hop in T.serial(1, size):
                        T.copy(
                            sums[rank, low : low + Q],
                            sums[rank, low : low + Q],
                            dst=(rank + hop) % size,
                            signal=done[b],
                            blocking=False,
                        )
                T.wait(done[b], pieces_of(n, Q, b, blocks) * (size - 1))
                for p in T.serial(pieces_of(n, Q, b, blocks)):
                    at = (p * blocks + b) * Q
                    for hop in T.serial(1, size):
                        owner = (rank + hop) % size
                        T.copy(sums[owner, at : at + Q], C[owner * n + at : owner * n + at + Q])

    X, parts, sums = T.Tensor((t,), dtype), T.SymmTensor((world, n), dtype), T.SymmTensor((world, n), out)
    add, flags = T.Tensor((max(1, bias),), out), T.Signal((blocks,))

    @T.prim_func
    def all_reduce(
        A: X, parts: parts, sums: sums, add: add, given: flags, done: flags, C: T.Tensor((t,), out)
    ):
        body(A, parts, sums, add, given, done, C)

    @T.prim_func
    def all_reduce_in_place(A: X, parts: parts, sums: sums, add: add, given: flags, done: flags):
        body(A, parts, sums, add, given, done, A)

    return all_reduce_in_place if inplace else all_reduce


def two_shot_by_packets(
    world: int, P: int, pieces: int, room: int, threads: int, dtype: str, align: int, out: str, bias: int,
    activation: str, inplace: bool,
) -> Any:  # fmt: skip
    """The same in dense packets, in both trips: no signal, no release, no flags. A block of ``blocks`` has
    ``pieces`` of ``P`` numbers of each rank's, n = blocks · pieces · P, and world · n is at least t. Boxes
    (world, ``room``) are at least n wide. What a rank has itself goes through its own boxes too, so that one
    wait is for all, with all loads under way at once."""
    t = T.dynamic("t", multiple_of=align)

    @T.macro
    def body(A, parts, sums, add, C, blocks):
        with T.Kernel(blocks, threads=threads) as b, T.Scale("device") as (rank, _):
            mine = [T.alloc_fragment((P,), dtype) for _ in range(world)]
            part, whole = T.alloc_fragment((world, P), dtype), T.alloc_fragment((world, P), out)
            acc, total = T.alloc_fragment((P,), "float32"), T.alloc_fragment((P,), out)
            n = blocks * (pieces * P)
            for k in T.serial(pieces):
                at = (b * pieces + k) * P
                for hop in range(world):  # the next one first, this one last; all are read at once
                    T.copy(A[(rank + 1 + hop) % world * n + at], mine[hop])
                for hop in range(world):
                    T.put_packets(mine[hop], parts[rank, at], dst=(rank + 1 + hop) % world)
            for k in T.serial(pieces):
                at = (b * pieces + k) * P
                T.get_packets(parts[0:world, at : at + P], part)
                added(part, acc)
                finished(acc, add if bias else None, rank * n + at, activation)
                T.copy(acc, total)
                for hop in range(world):
                    T.put_packets(total, sums[rank, at], dst=(rank + 1 + hop) % world)
            for k in T.serial(pieces):
                at = (b * pieces + k) * P
                T.get_packets(sums[0:world, at : at + P], whole)
                # counted in vectors: of other addresses nvcc (13.0) does not know that they are multiples of
                # 16 bytes, where each thread stores several, and stores words of 4
                first, each = (b * pieces + k) * (P // align), blocks * (pieces * P // align)
                for r, v, i in T.Parallel(world, P // align, align):
                    if (r * each + first + v) * align < t:
                        C[(r * each + first + v) * align + i] = whole[r, v * align + i]

    X, add = T.Tensor((t,), dtype), T.Tensor((max(1, bias),), out)
    parts, sums = (T.Packets((world, room), of, dense=True) for of in (dtype, out))

    @T.prim_func
    def all_reduce(A: X, parts: parts, sums: sums, add: add, C: T.Tensor((t,), out), blocks: T.int32):
        body(A, parts, sums, add, C, blocks)

    @T.prim_func
    def all_reduce_in_place(A: X, parts: parts, sums: sums, add: add, blocks: T.int32):
        body(A, parts, sums, add, A, blocks)

    return all_reduce_in_place if inplace else all_reduce


def spread(world: int, Q: int, blocks: int, threads: int, dtype: str, align: int, relayed: bool) -> Any:
    """A = rank ``root``'s A, on all ranks; it arrives in G (w,), whole vectors. ``relayed``: the root
    puts each piece to one rank, in turn, which puts it to the others: as many bytes leave the root as A has,
    not world − 1 times as many."""
    t, w = T.dynamic("t", multiple_of=align), T.dynamic("w", multiple_of=vector(dtype))

    @T.prim_func
    def broadcast(
        A: T.Tensor((t,), dtype),
        G: T.SymmTensor((w,), dtype),
        arrived: T.Signal((world, blocks)),
        root: T.int32,
    ):
        with T.Kernel(blocks, threads=threads, awaited=True) as b:
            with T.Scale("device") as (rank, size):
                count = pieces_of(t, Q, b, blocks)
                if rank == root:
                    for p in T.serial(count):
                        at = (p * blocks + b) * Q
                        if relayed:
                            to = (root + 1 + p % T.max(size - 1, 1)) % size
                            T.copy(
                                A[at : at + Q],
                                G[at : at + Q],
                                dst=to,
                                signal=arrived[rank, b],
                                blocking=False,
                            )
                        else:
                            for hop in T.serial(1, size):
                                T.copy(
                                    A[at : at + Q],
                                    G[at : at + Q],
                                    dst=(rank + hop) % size,
                                    signal=arrived[rank, b],
                                    blocking=False,
                                )
                elif relayed:
                    # as root counts ranks this one is number `mine`, and has pieces mine, mine + size - 1, …
                    mine = (rank - root - 1 + size) % size
                    for k in T.serial(pieces_of(count, 1, mine, T.max(size - 1, 1))):
                        at = ((mine + k * (size - 1)) * blocks + b) * Q
                        T.wait(arrived[root, b], k + 1)
                        for hop in T.serial(1, size):
                            to = (rank + hop) % size
                            if to != root:
                                T.copy(
                                    G[at : at + Q],
                                    G[at : at + Q],
                                    dst=to,
                                    signal=arrived[rank, b],
                                    blocking=False,
                                )
                        T.copy(G[at : at + Q], A[at : at + Q])
                    for other in T.serial(size - 1):
                        source = (root + 1 + other) % size
                        if source != rank:
                            for k in T.serial(pieces_of(count, 1, other, T.max(size - 1, 1))):
                                at = ((other + k * (size - 1)) * blocks + b) * Q
                                T.wait(arrived[source, b], k + 1)
                                T.copy(G[at : at + Q], A[at : at + Q])
                else:
                    for p in T.serial(count):
                        at = (p * blocks + b) * Q
                        T.wait(arrived[root, b], p + 1)
                        T.copy(G[at : at + Q], A[at : at + Q])

    return broadcast


def spread_by_packets(world: int, P: int, blocks: int, threads: int, dtype: str, align: int) -> Any:
    """The same in packets. Each rank gets one of every other one, the length of its row, so that launches
    need no flags (compiler/passes/packets.py): the root would be launches ahead else. A block has ``P``
    numbers; box (world, blocks · P + 4) is at least as long as A."""
    t = T.dynamic("t", multiple_of=align)

    @T.prim_func
    def broadcast(A: T.Tensor((t,), dtype), box: T.Packets((world, blocks * P + 4), dtype), root: T.int32):
        with T.Kernel(blocks, threads=threads) as b, T.Scale("device") as (rank, size):
            mine = T.alloc_fragment((P,), dtype)
            long, lengths = T.alloc_fragment((4,), dtype), T.alloc_shared((world, 4), dtype)
            if rank == root:
                T.copy(A[b * P], mine)
                for hop in T.serial(1, size):
                    T.put_packets(mine, box[rank, b * P], dst=(rank + hop) % size)
            if b == 0:
                T.fill(long, t)
                T.put_packets(long, box[rank, blocks * P])
            if rank != root:
                T.get_packets(box[root, b * P : (b + 1) * P], mine)
                T.copy(mine, A[b * P])
            if b == 0:
                T.get_packets(box[0:world, blocks * P : blocks * P + 4], lengths)
                for r in T.serial(world):
                    T.device_assert(lengths[r, 0] == t, "ranks broadcast different shapes")

    return broadcast
