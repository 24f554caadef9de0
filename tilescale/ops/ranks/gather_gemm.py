"""``all_gather_matmul(x, w)``: C = concat(x of all ranks) · w in one kernel, where each rank holds rows of x
and columns of w.

A block first begins its puts of this rank's rows to everyone (its own heap too), then multiplies one tile of
C after another. A tile waits for exactly the pieces that it reads; tiles of the own rows come first, then
those of the next ranks' in the order in which they send. Small products, which fill no wave of tiles, are
computed apart: `all_gather`, then `matmul`. Where it is asked for copy engines bring the others' rows, one
rank's after another's, beside the products of those that are there.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

import tilescale.language as T
from tilescale.comm.backend import Team
from tilescale.errors import TileValueError
from tilescale.language.dtypes import BITS
from tilescale.ops import fp8_gemm, gemm, host
from tilescale.ops.activations import check_turns, turns_in_torch
from tilescale.ops.case import generator, normal, random_like
from tilescale.ops.gated import gated_columns, in_turns
from tilescale.ops.gated_gemm import gated_product
from tilescale.ops.gemm_kernels import ceil_div, finish, finish_gated, load, load_b, panelled, results
from tilescale.ops.prepared import Plan
from tilescale.ops.ranks import fp8, gemm_engine
from tilescale.ops.ranks.case import Case, Expected, RankOp
from tilescale.ops.ranks.gather import all_gather
from tilescale.ops.ranks.gemms import (
    biased,
    called,
    checked,
    chosen,
    configured,
    constants,
    counted,
    knobs,
    tiles,
    worthwhile,
)
from tilescale.ops.ranks.groups import Group, filled, gather_into, number_of, rows_of, share, team_of, total
from tilescale.ops.ranks.workspace import Workspace, workspace


@dataclass(frozen=True)
class Config:
    """How it is computed. ``fused``: in one kernel, or apart; ``engine``: apart, where copy engines bring the
    others' rows while the own ones are multiplied; ``pull``: each rank reads the others' rows, or writes its
    own to them. Then: tiles, stages of the ring, threads of a block, blocks that stay, rows of tiles in a
    panel; ``high`` × ``wide``: numbers of x that one copy moves; ``groups``: of pieces along k, each with a
    counter of its own; ``abreast``: of those that are put tiles of the own rows await the last rank's, too,
    so that tiles that share columns of w read them at the same time; ``warps``: of a block that move
    pieces."""

    fused: bool = True
    pull: bool = False
    BM: int = 128
    BN: int = 256
    BK: int = 64
    stages: int = 4
    threads: int = 256
    blocks: int = 132
    panel: int = 8
    high: int = 64  # divides BM
    wide: int = 512
    groups: int = 1
    abreast: bool = False
    engine: bool = False
    warps: int = 2


#: bytes of x that one copy moves, and where few rows are gathered, so that all blocks have some of the first
#: group; rows of it that tuning tries
PIECE, SMALL_PIECE, HIGH = 64 << 10, 8 << 10, (1, 2, 4, 8, 16)


@functools.cache
def choose(M: int, N: int, K: int, world: int, dtype: str, units: int = 132) -> Config:
    """For M rows in all and a rank's N columns. By a model (`gemms.worthwhile`, `gemms.tiles`).

    Few rows are put in groups along k, so that every tile has soon something to begin with: 512 × 14336 ×
    8192 on 4 H200 took 202 µs in 8 groups, 213 in 4 and 241 in 2, the product alone 184; 512 × 28672 × 8192
    on 2 took 391 in 4, 410 apart, 382 alone (2026-11-26). More are pulled, whose loads wait for their data
    and do not queue in front of the product's: on one GPU, without links, pulls take 0.52 of the time of puts
    at 8192 × 2560 × 8192, 0.78 at 4096 × 5504 × 4096 and 1.08 at 512 × 14336 × 8192
    (tests/bench/results/gather_alone.json).

    Where tiles of the own rows run ahead of the others by more than the L2 cache holds, each rank's rows read
    w from memory anew. ``abreast`` keeps them together: on H100 (2026-11-27) 256 × 20416 × 11456 took 316 µs
    without and 214 with it on two ranks (apart 223), 512 × 28672 × 8192 390 and 351 (360), and 512 × 14336 ×
    8192 on four 217 and 189 (213), in pieces of 8 KB; in pieces of 4 KB 248 and 195.

    Pieces are whole rows, or a group's part of rows: where both sides of a copy are one run of bytes a thread
    has 8 accesses under way, else 4. On 4 H200 that is the difference between 596 and 530 µs at 8192 × 2560 ×
    8192, where the product alone took 513."""
    few = M <= 1024
    groups = 1 if K < 2048 or not few else min(ceil_div(K, 1024), 8)
    pull = dtype != "float32" and not few  # kernels of tensor cores have warps to spare
    fused = worthwhile(M, N, K, dtype)
    cut = tiles(M, N, K, dtype, units)
    wide = K if groups == 1 else ceil_div(K, groups * cut["BK"]) * cut["BK"]
    most = max(1, (SMALL_PIECE if few else PIECE) * 8 // (wide * BITS[dtype]))
    high = max(h for h in range(1, cut["BM"] + 1) if cut["BM"] % h == 0 and h <= most)
    return Config(fused, pull, groups=groups, abreast=groups > 1, high=high, wide=wide, **cut)


# ---- the kernel


def in_order(rows: int, run: int, groups: int) -> Callable[[Any, int], tuple[Any, Any, Any, Any]]:
    """The order in which pieces cross, that in which tiles need them: a number to the group along k, which of
    so many ranks, which of their ``rows`` pieces down and of the group's ``run`` pieces along k. A group of
    all ranks' rows comes before the next group: tiles that share columns of w are computed side by side, and
    begin with the first group of whoever's rows they have. What can be one number alone is that number: so
    it is known that whole rows, one behind another, are one run of bytes."""

    def of(number: Any, ranks: int) -> tuple[Any, Any, Any, Any]:
        group = number // (ranks * rows * run) if groups > 1 else 0
        rest = number % (ranks * rows * run) if groups > 1 else number
        return group, rest // (rows * run), rest % (rows * run) // run, rest % run if run > 1 else 0

    return of


def begun(tile: Any, BM: int, M: int, each: int, high: int) -> Any:
    """How many pieces of everyone's rows, ``high`` of ``each`` rank's, begin in a row of tiles."""
    low, stop, per = tile * BM, T.min(tile * BM + BM, M), ceil_div(each, high)
    before = low // each * per + T.ceildiv(low % each, high)
    return stop // each * per + T.ceildiv(stop % each, high) - before


def gather_gemm(
    M: int, N: int, K: int, world: int, BM: int, BN: int, BK: int, stages: int, threads: int, blocks: int,
    panel: int, high: int, wide: int, groups: int, abreast: bool, warps: int, dtype: str, out: str,
    trans_b: bool, bias: bool, activation: str, gate: str = "", kept: bool = False,
) -> Any:  # fmt: skip
    """C (M, N) = act(concat(A) · op(W) + bias): A (share(M, world), K), of which the last ranks' last rows do
    not count; W (K, N) or (N, K); X, which all ranks reach, has the others' A when the launch ends. ``gate``:
    Y (M, N / 2) is that function of half of the columns times the others, see `finish_gated`; C is written
    only where it is ``kept``."""
    each, tall, parts = share(M, world), ceil_div(M, BM), ceil_div(K, wide)
    run, per = ceil_div(parts, groups), ceil_div(each, high)  # pieces: along k of a group, of a rank's rows
    every, turn_of = per * run, in_order(per, run, groups)
    b_shape, b_tile = ((N, K), (BN, BK)) if trans_b else ((K, N), (BK, BN))
    c_shape, y_shape = results(M, N, gate, kept)
    crossing = int(each % BM > 0)  # a piece may reach from the row of tiles it begins in into the next one
    hops = world - 1 + crossing  # a tile with rows of several ranks takes all of them from X

    @T.macro
    def put(A, X, here, rows, row, col, first, dst):
        """``rows`` rows of A from (row, col) on to ``dst``, with a signal for the row of tiles they begin
        in."""
        T.copy(
            A[row : row + rows, col : col + wide],
            X[first + row : first + row + rows, col : col + wide],
            dst=dst,
            signal=here[(first + row) // BM, col // (run * wide)],
            blocking=False,
        )

    @T.prim_func
    def ag_gemm(
        A: T.Tensor((each, K), dtype),
        X: T.SymmTensor((M, K), dtype),
        W: T.Tensor(b_shape, dtype),
        add: T.Tensor((N if bias else 1,), out),
        here: T.Signal((tall, groups)),
        C: T.Tensor(c_shape, out),
        Y: T.Tensor(y_shape, out),
    ):
        with (
            T.Kernel(blocks, threads=threads, awaited=True, comm_warps=warps) as b,
            T.Scale("device") as (rank, n),
        ):
            first, last = rank * each, each // high * high
            for step in T.serial(ceil_div(groups * hops * every, blocks)):
                piece = step * blocks + b
                group, whose, row, part = turn_of(piece, hops)
                hop, row, col = whose + 1 - crossing, row * high, (group * run + part) * wide
                if piece < groups * hops * every and group * run + part < parts and first + row < M:
                    # bounds that show that a put ends inside: spare warps make those alone
                    if last and row < last:
                        put(A, X, here, high, T.min(row, last - high), col, first, (rank - hop + n) % n)
                    if each % high and row >= last:
                        put(A, X, here, each % high, last, col, first, (rank - hop + n) % n)
            x, w = T.alloc_shared((BM, BK), dtype), T.alloc_shared(b_tile, dtype)
            acc = T.alloc_fragment((BM, BN), "float32")
            for tile in T.Persistent(tall * ceil_div(N, BN), blocks, b):
                i, j = panelled(tile, tall, ceil_div(N, BN), panel)
                start = T.ceildiv(first, BM) + crossing
                at, last = (start + i) % tall, (start + tall - 1) % tall  # own rows first
                above, owner = T.max(at - 1, 0), at * BM // each
                T.clear(acc)
                for group in T.serial(groups):
                    pieces = T.min(run, parts - group * run)
                    if crossing or owner != rank:  # acquires every piece that reaches into these rows
                        T.wait(here[at, group], begun(at, BM, M, each, high) * pieces)
                    if crossing:
                        T.wait(here[above, group], begun(above, BM, M, each, high) * pieces)
                    if abreast and not crossing and owner == rank and last * BM // each != rank:
                        T.wait(here[last, group], begun(last, BM, M, each, high) * pieces)
                    low, stop = group * run * wide, T.min((group + 1) * run * wide, K)
                    for k in T.Pipelined(T.ceildiv(stop - low, BK), num_stages=stages):
                        if crossing or owner != rank:
                            T.copy(X[at * BM, low + k * BK], x)
                        else:
                            T.copy(A[at * BM - first, low + k * BK], x)
                        load_b(W, w, j * BN, low + k * BK, trans_b)
                        T.gemm(x, w, acc, transpose_B=trans_b)
                if gate:
                    finish_gated(acc, add if bias else None, C, Y, at * BM, j * BN, gate, kept)
                else:
                    finish(acc, add if bias else None, C, at * BM, j * BN, activation, False)

    return ag_gemm


def pull_gemm(
    M: int, N: int, K: int, world: int, BM: int, BN: int, BK: int, stages: int, threads: int, blocks: int,
    panel: int, high: int, wide: int, groups: int, warps: int, dtype: str, out: str, trans_b: bool,
    bias: bool, activation: str, gate: str = "", kept: bool = False,
) -> Any:  # fmt: skip
    """The same, where each rank reads the others' rows: of X (M, K) it has its own when the launch begins,
    and all when it ends."""
    each, tall, parts = share(M, world), ceil_div(M, BM), ceil_div(K, wide)
    run = ceil_div(parts, groups)  # pieces along k of a group
    every, turn_of = ceil_div(each, high) * run, in_order(ceil_div(each, high), run, groups)
    b_shape, b_tile = ((N, K), (BN, BK)) if trans_b else ((K, N), (BK, BN))
    c_shape, y_shape = results(M, N, gate, kept)
    crossing = int(each % BM > 0)  # a tile may have rows of several ranks

    def begun(tile: Any, rank: Any) -> Any:
        """Counts the pieces of others' rows that begin in a row of tiles."""

        def above(row: Any) -> Any:
            every = row // each * ceil_div(each, high) + T.ceildiv(row % each, high)
            return every - T.ceildiv(T.min(T.max(row - rank * each, 0), each), high)

        return above(T.min(tile * BM + BM, M)) - above(tile * BM)

    @T.macro
    def pull(X, here, rows, at, col, src):
        """``rows`` rows of X from (at, col) on, with a signal for the row of tiles they begin in."""
        theirs, told = X[at : at + rows, col : col + wide], here[at // BM, col // (run * wide)]
        T.copy(theirs, theirs, src=src, signal=told, blocking=False)

    @T.prim_func
    def ag_gemm(
        X: T.SymmTensor((M, K), dtype),
        W: T.Tensor(b_shape, dtype),
        add: T.Tensor((N if bias else 1,), out),
        here: T.Signal((tall, groups)),
        C: T.Tensor(c_shape, out),
        Y: T.Tensor(y_shape, out),
    ):
        with T.Kernel(blocks, threads=threads, comm_warps=warps) as b, T.Scale("device") as (rank, n):
            for step in T.serial(ceil_div(groups * (world - 1) * every, blocks)):
                piece = step * blocks + b
                group, whose, row, part = turn_of(piece, world - 1)
                owner, row, col = (rank + 1 + whose) % world, row * high, (group * run + part) * wide
                inside = piece < groups * (world - 1) * every and group * run + part < parts
                if inside and owner * each + row < M:
                    if row + high <= each:
                        pull(X, here, high, owner * each + row, col, owner % n)
                    if each % high and row + high > each:
                        pull(X, here, each % high, owner * each + row, col, owner % n)
            x, w = T.alloc_shared((BM, BK), dtype), T.alloc_shared(b_tile, dtype)
            acc = T.alloc_fragment((BM, BN), "float32")
            for tile in T.Persistent(tall * ceil_div(N, BN), blocks, b):
                i, j = panelled(tile, tall, ceil_div(N, BN), panel)
                at = (T.ceildiv(rank * each, BM) + crossing + i) % tall  # own rows first
                above = T.max(at - 1, 0)
                T.clear(acc)
                for group in T.serial(groups):
                    pieces = T.min(run, parts - group * run)
                    if crossing or at * BM // each != rank:  # every piece that reaches into these rows
                        T.wait(here[at, group], begun(at, rank) * pieces)
                    if crossing:
                        T.wait(here[above, group], begun(above, rank) * pieces)
                    low, stop = group * run * wide, T.min((group + 1) * run * wide, K)
                    for k in T.Pipelined(T.ceildiv(stop - low, BK), num_stages=stages):
                        load(X, W, x, w, at * BM, j * BN, low + k * BK, False, trans_b)
                        T.gemm(x, w, acc, transpose_B=trans_b)
                if gate:
                    finish_gated(acc, add if bias else None, C, Y, at * BM, j * BN, gate, kept)
                else:
                    finish(acc, add if bias else None, C, at * BM, j * BN, activation, False)

    return ag_gemm


# ---- what people call


@host.checked
def all_gather_matmul(
    x: torch.Tensor,
    w: torch.Tensor,
    bias: torch.Tensor | None = None,
    activation: str = "",
    *,
    scale_x: torch.Tensor | None = None,
    scale_w: torch.Tensor | None = None,
    gate: str = "",
    group: Group = None,
    rows: int | None = None,
    out: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    config: Config | None = None,
) -> torch.Tensor:
    """act(concat(x of all ranks) · w + bias) on every rank, with its own w; float32 sums, the same bits from
    run to run. Collective.

    Args:
        x: this rank's rows (m, K) of bfloat16, float16 or float32. w: this rank's columns (K, N), contiguous
            or the transpose of something contiguous; N is alike on all ranks.
        bias: (N,) of the result's dtype. activation: "relu", "gelu" (by erf) or "silu".
        scale_x, scale_w: of 8-bit floats, as `fp8_matmul` takes them for x and w: float32, one number
            each, x's alike on all ranks, or one a block of 128; the steps are taken one after the other then.
        gate: "silu", "gelu" (by erf) or "relu", in place of an activation: the first of a gated layer, whose
            columns come in turn, eight of the gate and eight that it scales. The result is (rows, N / 2).
        group: who takes part, see `groups.team_of`; all ranks without.
        rows: all ranks' m together, split as torch.chunk does; without it every rank has as many.
        out: (rows, N), or (rows, N / 2), contiguous, takes the result. out_dtype: of the result; x's without,
            or float32.
        config: how the work is done, where the choice by the shape is not wanted; alike on all ranks.

    Raises:
        TileValueError, TileTypeError: shapes, dtypes or groups that do not fit.
    """
    team = team_of(group)
    if fp8.asked(x, scale_x, scale_w, config, "all_gather_matmul"):
        assert scale_x is not None and scale_w is not None
        if not gate:
            return fp8.gathered(x, w, scale_x, scale_w, bias, activation, team, group, rows, out, out_dtype)
        check_turns("all_gather_matmul", w.shape[1], activation, gate)
        c = fp8.gathered(x, w, scale_x, scale_w, bias, "", team, group, rows, None, out_dtype)
        return gated_columns(c, gate, out)
    how: dict[str, Any] = {"rows": rows, "out": out, "out_dtype": out_dtype, "config": config}
    return product_and_rows(x, w, bias, activation, gate=gate, group=group, **how)[0]


def product_and_rows(
    x: torch.Tensor,
    w: torch.Tensor,
    bias: torch.Tensor | None = None,
    activation: str = "",
    *,
    gate: str = "",
    kept: bool = False,
    group: Group = None,
    rows: int | None = None,
    out: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    config: Config | None = None,
    whole: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """`all_gather_matmul` without scales; the gathered x (M, K), which may lie in the group's symmetric
    memory: it is there until the group's next operation; and with ``gate``, where it is ``kept``, the product
    itself (M, N), of the result's dtype. ``whole``: this rank's own rows are wanted in the gathered x, too;
    without it they may be missing."""
    team = team_of(group)
    space, rows = workspace(team), None if rows is None else number_of(rows, "rows")
    key = None
    if config is None:
        key = called("all_gather_matmul", x, w, bias, out, activation, rows, out_dtype, whole, gate, kept)
    plan = space.plans.of(
        key, lambda: _plan(team, x, w, bias, activation, rows, out, out_dtype, config, whole, gate, kept)
    )
    made = plan.result(out, x)
    c = made.new_empty(made.shape[0], 2 * made.shape[1]) if gate and kept else None
    return made, plan.run(space, x, w, bias, made, c, group), c


def _plan(
    team: Team, x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None, activation: str,
    rows: int | None, out: torch.Tensor | None, out_dtype: torch.dtype | None, config: Config | None,
    whole: bool, gate: str, kept: bool,
) -> Plan:  # fmt: skip
    """What `product_and_rows` does: of the team's memory, x, w, the bias, the result, the product of a gate
    where it is kept, and the group. It gives the gathered x."""
    given = checked("all_gather_matmul", x, w, bias, activation, out, out_dtype)
    M, N, K = total(rows, given.rows, team, "x"), given.N, given.K
    world, dtype, trans_b, own_rows = team.size, x.dtype, given.trans_b, given.rows
    if gate:
        check_turns("all_gather_matmul", N, activation, gate)
    result = (M, N // 2 if gate else N), given.out
    host.taking(out, *result)
    if M == 0:
        return Plan(*result, lambda space, x, w, bias, made, c, group: x.contiguous())
    how = Config(fused=False)
    if world > 1:
        how = counted(config or configured(team, "all_gather_matmul", choose, M, given, K), Config)
    if how.engine or not how.fused:
        form = given._replace(x=None, w=None)  # a plan keeps no tensor alive

        def apart(
            space: Workspace, x: torch.Tensor, w: torch.Tensor, bias: Any, made: torch.Tensor, c: Any,
            group: Group,
        ) -> torch.Tensor:  # fmt: skip
            if how.engine:
                product = made if not gate else c if kept else made.new_empty(M, N)
                more = (product, M, bias, activation, space.team, whole)
                gathered: torch.Tensor = gemm_engine.gathered(form.of(x, w), *more)
                if gate:
                    gated_columns(product, gate, made)
                return gathered
            gathered = x.contiguous() if world == 1 else all_gather(x.contiguous(), group=group, rows=M)
            if gate:
                gated_product(gathered, w, bias, gate, product=c, out=made)
            else:
                gemm.matmul(gathered, w, bias, activation, out=made)
            return gathered

        return Plan(*result, apart)
    if how.BM % how.high:
        raise TileValueError(
            f"{how}",
            expected="high that divides BM: tiles await the pieces that begin in their rows, and no others "
            "where a rank's rows are whole tiles",
        )
    deep = ceil_div(ceil_div(K, how.wide), how.groups) * how.wide
    if how.groups > 1 and deep % how.BK:
        text = f"groups of whole steps of BK={how.BK}: of K={K} one has {deep}"
        raise TileValueError(f"{how}", expected=text, hint="wide that is a multiple of BK")
    what = constants(how, given, bias, activation, world, M=M, K=K, gate=gate, kept=kept)
    pull, target, each = what.pop("pull"), host.target_of(x.device), share(M, world)
    if pull:
        del what["abreast"]
    kernel = host.kernel(pull_gemm if pull else gather_gemm, target, **what)
    tall, first = ceil_div(M, how.BM), min(M, team.rank * each)

    def run(
        space: Workspace, x: torch.Tensor, w: torch.Tensor, bias: Any, made: torch.Tensor, c: Any,
        group: Group,
    ) -> torch.Tensor:  # fmt: skip
        (everyone,) = space.tensors(x, ((M, K), dtype))
        here, w = space.counters(tall, how.groups), host.lying(w, trans_b)
        left = (host.absent(made) if c is None else c, made) if gate else (made, host.absent(made))
        if pull:
            everyone.narrow(0, first, own_rows).copy_(x)  # before this rank enters the launch
            kernel(everyone, w, biased(bias, made), here, *left)
            return everyone
        if own_rows < each:  # on the last ranks
            padded = x.new_empty(each, K)
            padded[:own_rows] = x
        else:
            padded = x.contiguous()
        kernel(padded, everyone, w, biased(bias, made), here, *left)
        if whole:  # nobody else writes them, and no later launch touches this rank before it enters it
            everyone.narrow(0, first, own_rows).copy_(x)
        return everyone

    return Plan(*result, run)


# ---- what is right, and what it is measured against


def draw(
    M: int,
    N: int,
    K: int,
    dtype: str = "bfloat16",
    trans_b: bool = False,
    bias: bool = False,
    activation: str = "",
    gate: str = "",
    out: str = "",
    scales: str = "",
    rank: int = 0,
    world: int = 1,
    device: Any = "cpu",
    seed: int = 0,
    **config: Any,
) -> dict[str, Any]:
    """A rank's rows of M, and its N columns; ``config``: fields of a `Config`."""
    if scales:
        mine = rows_of(rank, M, world)
        drawn = fp8.draw(mine, N, K, scales, out, device, seed, rank, common=True) | {"rows": M}
        return drawn | ({"gate": gate} if gate else {})
    g = generator(device, 1000 * seed + rank)
    made: dict[str, Any] = {"x": normal((rows_of(rank, M, world), K), dtype, g), "rows": M}
    made["w"] = normal((N, K), dtype, g, K**-0.5).T if trans_b else normal((K, N), dtype, g, K**-0.5)
    made |= {"gate": gate} if gate else {"activation": activation}
    if bias:
        made["bias"] = normal((N,), out or dtype, g)
    if out:
        made["out_dtype"] = getattr(torch, out)
    if config:
        made["config"] = Config(**config)
    return made


def reference(everyone: list[dict[str, Any]]) -> list[Expected]:
    whole = torch.cat([a["x"] for a in everyone])
    made: list[Expected] = []
    scaled = "scale_x" in everyone[0]
    for a in everyone:
        kind = a.get("out_dtype", torch.bfloat16 if scaled else whole.dtype)
        if scaled:
            scales = [a["scale_x"] for a in everyone]
            product = fp8.reference(a, whole, scales[0] if scales[0].dim() == 1 else torch.cat(scales))
        else:
            own = {k: a[k] for k in ("bias", "activation", "out_dtype") if k in a}
            how = a.get("config", Config(fused=False))  # without one it may be computed apart
            if "gate" in a and how.fused and not how.engine and len(everyone) > 1:
                own["out_dtype"] = torch.float32  # the product itself is not rounded
            (product,) = gemm.reference(whole, a["w"], **own)
        made.append(in_turns(product, a["gate"], kind) if "gate" in a else product)
    return made


def by_library(
    x: torch.Tensor,
    w: torch.Tensor,
    group: Any,
    rows: int | None = None,
    bias: torch.Tensor | None = None,
    activation: str = "",
    gate: str = "",
    **scaled: Any,
) -> Callable[[], Any]:
    """torch.distributed's all-gather, then torch.mm, torch.addmm, or torch._scaled_mm of 8-bit floats; a gate
    by torch's operations."""
    world = torch.distributed.get_world_size(group)
    M = world * x.shape[0] if rows is None else rows
    if "scale_x" in scaled:
        return fp8.gathered_by_library(x, w, M, group, **scaled)
    part = share(M, world)
    whole = x.new_empty(part * world, x.shape[1])
    padded = filled(x, part)
    product = gemm.cublas(whole[:M], w, bias, activation)

    def call() -> Any:
        gather_into(whole, padded, group)
        return turns_in_torch(product(), gate) if gate else product()

    return call


def by_torch(
    x: torch.Tensor, w: torch.Tensor, group: Any, rows: int | None = None, **more: Any
) -> Callable[[], Any]:
    """torch.ops.symm_mem.fused_all_gather_matmul, which takes equal parts on GPUs, without an epilogue."""
    world = torch.distributed.get_world_size(group)
    if (
        x.device.type != "cuda"
        or (rows or 0) % world
        or more.get("bias") is not None
        or more.get("activation")
        or more.get("gate")
        or "scale_x" in more
    ):
        raise NotImplementedError("PyTorch's fused operation takes equal parts on GPUs, and no epilogue")
    import torch.distributed._symmetric_memory as symm_mem

    symm_mem.enable_symm_mem_for_group(group.group_name)
    part = x.contiguous()
    return lambda: torch.ops.symm_mem.fused_all_gather_matmul(part, [w], 0, group.group_name)[1][0]


def alone(
    x: torch.Tensor, w: torch.Tensor, world: int, rows: int | None = None, **scaled: Any
) -> Callable[[], Any]:
    """The library's product of as many rows, without the gather."""
    M = world * x.shape[0] if rows is None else rows
    whole = random_like(x, M, x.shape[1])
    if (scale := scaled.get("scale_x")) is not None:
        scale = scale if scale.dim() == 1 else scale.new_ones(M, scale.shape[1])
        kind = scaled.get("out_dtype", torch.bfloat16)
        return fp8_gemm.scaled_mm(whole, w, scale, scaled["scale_w"], kind)
    return gemm.cublas(whole, w)


_FEW = {
    "BM": 64,
    "BN": 64,
    "BK": 32,
    "stages": 2,
    "threads": 128,
    "blocks": 5,
    "panel": 2,
    "high": 16,
    "wide": 48,
}

OP = RankOp(
    name="all_gather_matmul",
    run=all_gather_matmul,
    draw=draw,
    reference=reference,
    **chosen(choose),
    knobs=knobs(
        ({"pull": True}, {"pull": False}),
        tuple({"groups": n} for n in (1, 2, 4, 8)),
        ({"abreast": True}, {"abreast": False}),
        tuple({"high": h} for h in HIGH),
    ),
    cases=(
        *(
            Case({**_FEW, **shape}, small=True)
            for shape in (
                {"M": 384, "N": 72, "K": 104},
                {"M": 128, "N": 64, "K": 64, "bias": True, "activation": "gelu"},
                {"M": 100, "N": 72, "K": 50, "dtype": "float32", "trans_b": True},
                {"M": 77, "N": 40, "K": 33, "dtype": "float16", "bias": True, "out": "float32"},
                {"M": 2, "N": 30, "K": 20, "activation": "silu"},
                {"M": 150, "N": 72, "K": 200, "wide": 32, "groups": 3, "bias": True},
                {"M": 128, "N": 72, "K": 130, "wide": 64, "groups": 2},
                {"M": 192, "N": 72, "K": 130, "wide": 64, "groups": 2, "abreast": True},
                {"M": 64, "N": 72, "K": 130, "wide": 64, "groups": 2, "abreast": True},
                {"M": 130, "N": 72, "K": 130, "wide": 64, "groups": 2, "abreast": True},
                {"M": 130, "N": 100, "K": 72, "trans_b": True, "high": 64, "wide": 1024, "blocks": 132},
                {"M": 384, "N": 72, "K": 104, "pull": True},
                {"M": 128, "N": 64, "K": 64, "bias": True, "activation": "gelu", "pull": True},
                {"M": 77, "N": 40, "K": 33, "dtype": "float16", "out": "float32", "pull": True},
                {"M": 2, "N": 30, "K": 20, "activation": "silu", "pull": True},
                {"M": 150, "N": 72, "K": 200, "wide": 32, "groups": 3, "bias": True, "pull": True},
                {"M": 130, "N": 100, "K": 72, "trans_b": True, "high": 64, "wide": 1024, "pull": True},
                {"M": 384, "N": 96, "K": 104, "gate": "silu", "bias": True},
                {"M": 77, "N": 48, "K": 33, "dtype": "float16", "gate": "gelu", "out": "float32"},
                {"M": 100, "N": 80, "K": 50, "dtype": "float32", "trans_b": True, "gate": "silu"},
                {"M": 150, "N": 112, "K": 200, "wide": 32, "groups": 3, "gate": "relu", "abreast": True},
                {"M": 384, "N": 96, "K": 104, "gate": "silu", "pull": True},
                {"M": 130, "N": 112, "K": 72, "trans_b": True, "gate": "gelu", "bias": True, "pull": True},
                {"M": 77, "N": 48, "K": 33, "gate": "silu", "bias": True, "engine": True},
                {"M": 192, "N": 72, "K": 104, "bias": True, "activation": "relu", "engine": True},
                {"M": 77, "N": 41, "K": 33, "dtype": "float16", "out": "float32", "engine": True},
                {"M": 2, "N": 30, "K": 20, "trans_b": True, "engine": True},
            )
        ),
        *(
            Case(shape, small=True)
            for shape in (
                {"M": 70, "N": 40, "K": 64},
                {"M": 5, "N": 72, "K": 40, "bias": True, "activation": "relu"},
                {"M": 70, "N": 48, "K": 64, "bias": True, "gate": "silu"},
            )
        ),
        *(
            Case({"M": m, "N": n, "K": k, "scales": scales}, small=True)
            for scales in ("tensor", "blocks")
            for m, n, k in ((77, 72, 144), (2, 40, 272))
        ),
        Case({"M": 33, "N": 40, "K": 100, "scales": "tensor", "out": "float32"}, small=True),
        Case({"M": 33, "N": 48, "K": 144, "scales": "tensor", "gate": "silu"}, small=True),
        *(
            Case({"M": m, "N": n, "K": k, "trans_b": tb})
            for m, n, k in ((5000, 1000, 1000), (1024, 2048, 1024), (3, 1000, 1000), (333, 520, 2056))
            for tb in (False, True)
        ),
        *(
            Case({"M": m, "N": n, "K": k, "trans_b": True, "gate": "silu"})
            for m, n, k in ((5000, 1008, 1000), (1024, 2048, 1024), (333, 528, 2056))
        ),
        *(
            Case({"M": m, "N": n, "K": k}, bar=1.0)
            for m, n, k in (
                (8192, 2560, 8192),
                (4096, 5504, 4096),
                (512, 14336, 8192),
                (2048, 14336, 8192),
                (8192, 14336, 8192),
            )
        ),
    ),
    peers={"library": by_library, "torch": by_torch},
    alone=alone,
    flops=lambda M, N, K, **_: 2.0 * M * N * K,
    remote=lambda world, M, K, dtype="bfloat16", scales="", **_: float(
        (world - 1) * share(M, world) * K * (1 if scales else getattr(torch, dtype).itemsize)
    ),
)
