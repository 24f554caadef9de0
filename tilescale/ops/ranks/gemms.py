"""What products of several ranks share: their operands' checks, and how they are cut."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import torch

import tilescale.language as T
from tilescale.comm.backend import Team
from tilescale.errors import TileTypeError, TileValueError
from tilescale.language.dtypes import BITS
from tilescale.ops import fp8_gemm, gemm, host
from tilescale.ops.activations import ACTIVATIONS, IN_TORCH
from tilescale.ops.case import Expected, expected, generator, normal, summed
from tilescale.ops.gemm_kernels import ceil_div
from tilescale.ops.prepared import Plan, signature
from tilescale.ops.ranks import engine, picks
from tilescale.ops.ranks.case import Pick
from tilescale.ops.ranks.groups import number_of, rows_of, share
from tilescale.ops.ranks.workspace import workspace

#: where K · N · M of a rank's product is less, the two steps are taken apart: kernels for few rows, and for
#: shares of k, are faster than one that overlaps
LITTLE = 1 << 28


class Operands(NamedTuple):
    """x's rows, w as its rows lie in memory, whether those are its columns, the extents, the result's
    dtype."""

    x: torch.Tensor
    w: torch.Tensor
    trans_b: bool
    rows: int
    N: int
    K: int
    out: torch.dtype

    def of(self, x: torch.Tensor, w: torch.Tensor) -> Operands:
        """Those of another call that is alike."""
        return self._replace(x=x.contiguous(), w=host.lying(w, self.trans_b))


def checked(
    what: str,
    x: torch.Tensor,
    w: torch.Tensor,
    bias: torch.Tensor | None,
    activation: str,
    out: torch.Tensor | None,
    out_dtype: torch.dtype | None,
    empty: bool = False,
) -> Operands:
    """The operands of a product. ``empty``: this rank may have nothing of k.

    Raises:
        TileValueError, TileTypeError: shapes, dtypes or an activation that do not fit.
    """
    if x.dim() != 2:
        raise TileValueError(f"x of {what} has {x.dim()} axes", expected="a matrix")
    w, trans_b = host.matrix(w, f"w of {what}")
    (rows, K), (K2, N) = x.shape, (w.shape[::-1] if trans_b else w.shape)
    if K != K2:
        raise TileValueError(f"{what} of ({rows}, {K}) by ({K2}, {N})", expected="x (m, K), w (K, N)")
    if x.dtype != w.dtype or host.dtype_name(x) not in gemm.DTYPES:
        raise TileTypeError(
            f"{what} of {host.dtype_name(x)} by {host.dtype_name(w)}",
            expected="one of " + ", ".join(gemm.DTYPES) + " for both",
        )
    if activation not in ACTIVATIONS:
        raise TileValueError(f"activation={activation!r}", expected=", ".join(repr(a) for a in ACTIVATIONS))
    kind = out.dtype if out is not None and out_dtype is None else out_dtype or x.dtype
    if kind not in (x.dtype, torch.float32):
        raise TileTypeError(f"a result of {kind}", expected=f"{x.dtype} or torch.float32")
    if bias is not None and (tuple(bias.shape) != (N,) or bias.dtype != kind):
        raise TileValueError(f"bias is {tuple(bias.shape)} of {bias.dtype}", expected=f"({N},) of {kind}")
    if N == 0 or K == 0 and not empty:
        raise TileValueError(f"{what} of ({rows}, {K}) by ({K}, {N})", expected="N and K of 1 at least")
    return Operands(x.contiguous(), w, trans_b, rows, N, K, kind)


def constants(
    how: Any,
    given: Operands,
    bias: torch.Tensor | None,
    activation: str,
    world: int,
    **more: Any,
) -> dict[str, Any]:
    """What a kernel for both steps is made of: its Config's fields, what its operands are, and ``more``."""
    what = {k: v for k, v in vars(how).items() if k not in ("fused", "engine")}
    what |= {"N": given.N, "world": world, "dtype": host.dtype_name(given.x), "trans_b": given.trans_b}
    return what | {
        "out": host.dtype_of(given.out),
        "bias": bias is not None,
        "activation": activation,
        **more,
    }


def called(
    operation: str, x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor | None,
    *said: Any,
) -> tuple[Any, ...]:  # fmt: skip
    """What a call of a product is known by."""
    return operation, signature(x), signature(w), signature(bias), signature(out), *said


def added_up(
    what: str, plan: Callable[..., Plan], team: Team, x: torch.Tensor, w: torch.Tensor,
    bias: torch.Tensor | None, activation: str, inner: int | None, out: torch.Tensor | None,
    out_dtype: torch.dtype | None, config: Any,
) -> torch.Tensor:  # fmt: skip
    """A product whose parts ranks add, as ``plan`` prepares it, of these arguments from ``team`` on."""
    space, inner = workspace(team), inner if inner is None else number_of(inner, "inner", least=1)
    key = called(what, x, w, bias, out, activation, inner, out_dtype) if config is None else None
    made = space.plans.of(key, lambda: plan(team, x, w, bias, activation, inner, out, out_dtype, config))
    c = made.result(out, x)
    made.run(space, x, w, bias, c)
    return c


def nothing(space: Any, x: Any, w: Any, bias: Any, c: Any) -> None:
    """What a product of no rows does."""


def alone_there(activation: str) -> Callable[..., None]:
    """What a product does of one rank: of a team's memory, x, w, the bias and the result."""

    def run(space: Any, x: torch.Tensor, w: torch.Tensor, bias: Any, c: torch.Tensor) -> None:
        gemm.matmul(x, w, bias, activation, out=c)

    return run


def by_copies(how: Callable[..., None], given: Operands, M: int, activation: str) -> Callable[..., None]:
    """What a product does whose parts engines move, as ``how`` says: of a team's memory, x, w, the bias and
    the result."""
    form = given._replace(x=None, w=None)  # a plan keeps no tensor alive

    def run(space: Any, x: torch.Tensor, w: torch.Tensor, bias: Any, c: torch.Tensor) -> None:
        how(form.of(x, w), c, M, bias, activation, space.team)

    return run


def configured(
    team: Team, operation: str, choose: Callable[..., Any], M: int, given: Operands, K: int
) -> Any:
    """What was measured for all M rows, this rank's N columns and K of the inner extent, or as ``choose``
    says."""
    x, dtype = given.x, host.dtype_name(given.x)
    model = choose(M, given.N, K, team.size, dtype, host.units(x.device))
    kept = picks.found(team, operation, x.device, M=M, N=given.N, K=K, dtype=dtype)
    return picks.applied(kept, model, x.device)


#: fields of a Config that may be zero: none of these stages, runs and warps
_NONE = ("stages", "lead", "warps")


def counted(how: Any, kind: type) -> Any:
    """A Config of this kind, whose numbers count something.

    Raises:
        TileTypeError, TileValueError: something else, or a number that is none, or too small.
    """
    if not isinstance(how, kind):
        raise TileTypeError(
            f"config is {type(how).__module__}.{type(how).__qualname__}",
            expected=f"a {kind.__module__}.{kind.__qualname__}",
        )
    for name, value in vars(how).items():
        least = int(name not in _NONE)
        if not isinstance(value, int):
            raise TileTypeError(f"{name}={value!r} of a {kind.__name__}", expected="an int")
        if not isinstance(value, bool) and value < least:
            raise TileValueError(f"{name}={value} of a {type(how).__name__}", expected=f"{least} at least")
    return how


def chosen(choose: Callable[..., Any], inner: bool = False) -> dict[str, Any]:
    """`RankOp.ways`, `pick`, `base`, `asked` and `shape_of` of a product whose steps are one kernel, apart,
    or beside copy engines where they reach the others' memory, as ``choose`` says for M, N, K, the world, the
    dtype and the multiprocessors. ``inner``: K is split over the ranks."""

    def choice(world: int, M: int, N: int, K: int, dtype: str, units: int) -> Any:
        return choose(M, N, share(K, world) if inner else K, world, dtype, units)

    def ways(
        world: int, M: int, N: int, K: int, dtype: str = "bfloat16", units: int = 132, scales: str = "",
        **_: Any,
    ) -> dict[str, dict[str, Any]]:  # fmt: skip
        if scales:
            return {"apart": {}}
        picked = choice(world, M, N, K, dtype, units)
        found = {w: {"config": replace(picked, fused=w == "fused")} for w in ("fused", "apart")}
        if engine.able():
            found["engine"] = {"config": replace(picked, fused=False, engine=True)}
        return found

    def pick(
        world: int,
        M: int,
        N: int,
        K: int,
        dtype: str = "bfloat16",
        units: int = 132,
        kept: Any = None,
        scales: str = "",
        **words: Any,
    ) -> Pick:
        if scales:
            return Pick("apart", None)
        picked = choice(world, M, N, K, dtype, units)
        fields = {name: value for name, value in words.items() if hasattr(picked, name)}
        picked = type(picked)(**fields) if fields else replace(picked, **(kept or {}))
        if picked.engine:
            return Pick("engine", None)
        return Pick("fused", picked.blocks) if picked.fused else Pick("apart", None)

    def base(
        world: int, M: int, N: int, K: int, dtype: str = "bfloat16", units: int = 132, **_: Any
    ) -> dict[str, Any]:
        return dict(vars(choice(world, M, N, K, dtype, units)))

    def asked(fields: dict[str, Any]) -> dict[str, Any]:
        return {"config": replace(choose(1, 1, 1, 2, "bfloat16"), **fields)}

    def shape_of(world: int, M: int, N: int, K: int, dtype: str = "bfloat16", **_: Any) -> dict[str, Any]:
        return {"M": M, "N": N, "K": share(K, world) if inner else K, "dtype": dtype}

    return {"ways": ways, "pick": pick, "base": base, "asked": asked, "shape_of": shape_of}


def knobs(*more: tuple[dict[str, Any], ...]) -> Callable[..., tuple[tuple[dict[str, Any], ...], ...]]:
    """`RankOp.knobs` of a product: in one kernel, apart or beside copy engines, tiles, rows of tiles
    in a panel, then ``more``."""

    def of(world: int, M: int, N: int, units: int = 132, **_: Any) -> tuple[tuple[dict[str, Any], ...], ...]:
        cuts = tuple(
            {
                "BM": BM,
                "BN": BN,
                "threads": threads,
                "stages": stages,
                "blocks": min(units, ceil_div(M, BM) * ceil_div(N, BN)),
            }
            for (BM, BN), (_, threads, stages) in gemm.TILES.items()
        )
        ways = [{"fused": True, "engine": False}, {"fused": False, "engine": False}]
        if engine.able():
            ways.append({"fused": False, "engine": True})
        return (tuple(ways), cuts, tuple({"panel": n} for n in (4, 8, 16)), *more)

    return of


def biased(bias: torch.Tensor | None, c: torch.Tensor) -> torch.Tensor:
    """The bias, in order, or a number that a kernel without one takes in its place and does not read."""
    return host.absent(c) if bias is None else bias.contiguous()


def tiles(M: int, N: int, K: int, dtype: str, units: int) -> dict[str, Any]:
    """Tiles for M × N that stay on ``units`` multiprocessors: those that take the least time in whole waves,
    by what one GPU was measured with (`gemm.TILES`)."""
    if dtype == "float32":
        cut = {"BM": 64, "BN": 64, "BK": 32, "stages": 3, "threads": 128}
    else:
        found = []
        for (BM, BN), (step, threads, stages) in gemm.TILES.items():
            waves = ceil_div(ceil_div(M, BM) * ceil_div(N, BN), units)
            cut = {"BM": BM, "BN": BN, "BK": 64, "stages": stages, "threads": threads}
            found.append((waves * step, -BN, cut))
        cut = min(found, key=lambda f: f[:2])[2]
    blocks = min(units, ceil_div(M, cut["BM"]) * ceil_div(N, cut["BN"]))
    return {**cut, "blocks": blocks}


def even(count: int, blocks: int) -> int:
    """Blocks, ``blocks`` at most, that take ``count`` tiles in as few waves, and as many tiles each."""
    return ceil_div(count, ceil_div(count, blocks))


def worthwhile(M: int, N: int, K: int, dtype: str) -> bool:
    """Whether so much is computed that one kernel for both steps may pay, of rows that TMA fetches and
    stores: whole vectors of 16 bytes. Of others `matmul` writes operands anew, and collectives write vectors:
    on 2 H100 M = 2141, N = 7287, K = 26026 took 6.8 ms fused, 0.80 apart, 3.2 by NCCL and cuBLAS."""
    vector = 128 // BITS[dtype]
    return M >= 128 and M * N * K >= LITTLE and N % vector == 0 and K % vector == 0


# ---- products whose inner extent is split


def inner_of(inner: int | None, mine: int, team: Team) -> tuple[int, int]:
    """A rank's share of all ranks' inner extent, and 0 where all have that many; else what all shares are
    multiples of, 8 at most.

    Raises:
        TileTypeError, TileValueError: ``inner`` is no number of columns, or this rank has another share.
    """
    if inner is None:
        return mine, 0
    inner = number_of(inner, "inner", least=1)
    want = rows_of(team.rank, inner, team.size)
    if mine != want:
        raise TileValueError(
            f"x has {mine} columns on rank {team.rank} of {team.size}, of inner={inner} in all",
            expected=f"{want}: rank r has columns from r·{share(inner, team.size)} on, as torch.chunk does",
        )
    each = share(inner, team.size)
    return each, 0 if each * team.size == inner else math.gcd(8, each, inner)


def told(given: Operands, inner: int | None, team: Team) -> Operands:
    """The operands with w in an order that all ranks know: of a single row of it, or none, strides do not say
    which one the others have, so all have rows then."""
    if inner is None or not given.trans_b or rows_of(team.size - 1, inner, team.size) > 1:
        return given
    return given._replace(w=given.w.T.contiguous(), trans_b=False)


def depth(K: int, align: int) -> dict[str, Any]:
    """What a kernel knows of the inner extent that `inner_of` found."""
    return {"K": K if align == 0 else None, "align": max(1, align)}


def product(x: torch.Tensor, w: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    """A rank's part, rounded to ``dtype``, x's without."""
    if x.shape[1] == 0:
        return x.new_zeros(x.shape[0], w.shape[1], dtype=dtype)
    made: torch.Tensor = gemm.matmul(x, w, out_dtype=dtype)
    return made


# ---- partial tiles, and the order of tiles


def packed_shape(BM: int, BN: int, b_tile: tuple[int, int]) -> tuple[int, int]:
    """The shape in which a partial tile (BM, BN) crosses to its owner: pieces, each a tile of w's shape, so
    that it can come back through the stages of the operands' ring."""
    return BM * BN // b_tile[1], b_tile[1]


def packed_of(what: str, how: Any, trans_b: bool) -> tuple[int, int]:
    """`packed_shape` of a Config.

    Raises:
        TileValueError: its tiles have no such pieces.
    """
    if how.BM % how.BK or how.BM % 16 or how.BN % 16 or how.BK % 8:
        raise TileValueError(
            f"{what} with {how}",
            expected="BM a multiple of BK and of 16, BN of 16, BK of 8: parts come in pieces",
        )
    return packed_shape(how.BM, how.BN, (how.BN, how.BK) if trans_b else (how.BK, how.BN))


def _spot(q: Any, lane: Any, s: Any, high: int) -> tuple[Any, Any]:
    """The element of a tile ``high`` blocks of 16 × 16 high that is number s of a lane's 8 in block q, blocks
    counted down the columns: as a warp has them after a product on tensor cores (PTX ISA 9.0, "wgmma", the
    fragment of D). There a thread's 8 elements are 16 bytes side by side, and a warp's are 512."""
    row = q % high * 16 + s // 2 % 2 * 8 + lane // 4
    return row, q // high * 16 + s // 4 * 8 + lane % 4 * 2 + s % 2


@T.macro
def store_packed(acc: Any, to: Any, hop: Any, number: Any):
    """to[hop, number] = acc, rounded, in the order of `_spot`."""
    BM, BN = acc.shape
    width = to.shape[3]
    for q, lane, s in T.Parallel(BM * BN // 256, 32, 8):
        to[hop, number, (q * 256 + lane * 8) // width, (q * 256 + lane * 8) % width + s] = acc[
            _spot(q, lane, s, BM // 16)
        ]


@T.macro
def load_packed(acc: Any, frm: Any, hop: Any, number: Any):
    """acc = frm[hop, number], which `store_packed` made."""
    BM, BN = acc.shape
    width = frm.shape[3]
    for q, lane, s in T.Parallel(BM * BN // 256, 32, 8):
        acc[_spot(q, lane, s, BM // 16)] = T.cast(
            frm[hop, number, (q * 256 + lane * 8) // width, (q * 256 + lane * 8) % width + s], "float32"
        )


@T.macro
def add_parts(acc: Any, parts: Any, w: Any, arrived: Any, number: Any, others: int, stages: int):
    """acc += parts[0, number] + … + parts[others - 1, number], in this order, when all have arrived. Their
    pieces come through w: they take the stages behind the tile's own steps of k. Whoever fills them acquires
    the others' puts by the wait in front of the first piece; all later ones come behind it in its order."""
    BM, BN = acc.shape
    rows, width = w.shape
    for piece in range(BM * BN // (rows * width)):
        for hop in T.Pipelined(others, num_stages=stages):
            if piece == 0:
                if hop == 0:
                    T.wait(arrived[number], others)
            T.copy(parts[hop, number, piece * rows : (piece + 1) * rows, 0:width], w)
            for q, lane, s in T.Parallel(rows * width // 256, 32, 8):
                acc[_spot(piece * (rows * width // 256) + q, lane, s, BM // 16)] += T.cast(
                    w[(q * 256 + lane * 8) // width, (q * 256 + lane * 8) % width + s], "float32"
                )


@T.macro
def turn(place: Any, count: int, run: int, lead: int, world: int):
    """How far the owner is (0: this rank itself) and the tile's number of its ``count``, at a place of the
    order in which all ranks take their tiles: runs of ``run`` tiles go round the other ranks, the next one
    first, so that no two ranks put to one; behind ``lead`` runs each world-th one is an own one, and when the
    others' are done all are. Numbers of ``count`` and more are no tile.

    Why nobody waits for ever. Own run g stands behind lead + (world - 1) · g runs of others, or all of them;
    with lead ≥ world - 1 the runs g of all distances are among them. All ranks have the same order, so what
    an own tile waits for is computed at earlier places. A block takes its places in rising order, and all
    blocks are resident: of all places that are not done, in all ranks, the first waits for none such."""
    runs, q = ceil_div(count, run), place // run
    before = T.max((q - lead + world - 1) // world, 0)  # own runs in front of this one
    nth = q - before  # of the others'
    over = nth >= (world - 1) * runs
    own = over or (q >= lead and (q - lead) % world == 0)
    hop = T.if_then_else(own, 0, 1 + nth % (world - 1))
    nth = T.if_then_else(over, q - (world - 1) * runs, T.if_then_else(own, before, nth // (world - 1)))
    return hop, nth * run + place % run


def in_turn(count: int, blocks: int, world: int, soon: bool = False) -> dict[str, Any]:
    """The fields of a Config that say in which order ``count`` tiles of each rank are taken: runs of up to 32
    that leave few places without a tile, and three waves of others' tiles before the first own one. Of two
    ranks runs of up to 16 and one wave and a half: measured on 2 H100 (4096 × 4096 × 10752 277 → 268 µs).
    ``soon``: own tiles have a way to go when they are finished, so in few waves they come as early on more
    ranks, too: 2048 × 8192 × 28672 on 4 H200 469 → 447 µs; in 16 waves that made 717 760, in one 138 150."""
    few = soon and blocks < count * world < 8 * blocks
    most, waves = (16, 1.5) if world == 2 or few else (32, 3.0)
    run = count if count <= most else min(range(most // 2, most + 1), key=lambda r: (-count % r, -r))
    return {"run": run, "lead": ceil_div(int(waves * blocks), run)}


def places(count: int, run: int, world: int) -> int:
    """How many places `turn` has."""
    return ceil_div(count, run) * run * world


def lead_of(count: int, run: int, lead: int, world: int) -> int:
    """Runs of others' tiles in front of the first own one: ``lead`` where it can be."""
    return max(world - 1, min(lead, (world - 1) * ceil_div(count, run)))


def draw_inner(
    M: int, N: int, K: int, dtype: str, trans_b: bool, bias: bool, activation: str, out: str, rank: int,
    world: int, device: Any, seed: int,
) -> dict[str, Any]:  # fmt: skip
    """All rows, and a rank's share of K."""
    g, mine = generator(device, 1000 * seed + rank), rows_of(rank, K, world)
    made: dict[str, Any] = {"x": normal((M, mine), dtype, g), "inner": K}
    made["w"] = normal((N, mine), dtype, g, K**-0.5).T if trans_b else normal((mine, N), dtype, g, K**-0.5)
    made |= bias_of(bias, N, out or dtype, device, seed) | {"activation": activation}
    if out:
        made["out_dtype"] = getattr(torch, out)
    return made


def bias_of(bias: bool, N: int, dtype: str, device: Any, seed: int) -> dict[str, Any]:
    """A bias that is alike on all ranks, or none."""
    return {"bias": normal((N,), dtype, generator(device, 1000 * seed + 999))} if bias else {}


def reference_sum(everyone: list[dict[str, Any]]) -> Expected:
    """act(Σ over ranks of x · w + bias), whole, where each rank's part may be rounded to x's dtype (in one
    kernel the owner's is not)."""
    first = everyone[0]
    small = "scale_x" in first
    kind = first.get("out_dtype", torch.bfloat16) if small else first["x"].dtype
    bias, activation = first.get("bias"), first["activation"]
    total = noise = magnitude = torch.zeros((), dtype=torch.float64)
    for a in everyone:
        x, w = a["x"].double(), a["w"].double()
        if small and x.shape[1]:
            of = fp8_gemm.reference(a["x"], a["w"], a["scale_x"], a["scale_w"], kind)[0]
            part, once = of.value, of.allowed
        else:
            part, size = x @ w, x.abs() @ w.abs()
            once = expected(part, kind, noise=summed(size, x.shape[1] + 1)).allowed
        total, noise, magnitude = total + part, noise + once, magnitude + part.abs() + once
    if bias is not None:
        total, magnitude = total + bias.double(), magnitude + bias.double().abs()
    noise = (noise + summed(magnitude, len(everyone) + 1)) * 1.13
    noise = noise + (total.abs() * 2.0**-21 if activation else 0.0)
    return expected(IN_TORCH[activation](total), first.get("out_dtype", kind), noise=noise)


def library_sum(
    x: torch.Tensor,
    w: torch.Tensor,
    group: Any,
    bias: torch.Tensor | None,
    activation: str,
    add: Callable[..., Callable[[], Any]],
    scaled: dict[str, Any],
) -> Callable[[], Any]:
    """torch.mm, or torch._scaled_mm where there are scales, then the library's sum over ranks, then the
    epilogue."""
    small = "scale_x" in scaled
    kind = scaled.get("out_dtype", torch.bfloat16) if small else x.dtype
    part = x.new_empty(x.shape[0], w.shape[1], dtype=kind)
    product = fp8_gemm.scaled_mm(x, w, scaled["scale_x"], scaled["scale_w"], kind) if small else None
    reduced, act = add(part, group), IN_TORCH[activation]

    def call() -> Any:
        if product is not None:
            part.copy_(product())
        else:
            torch.mm(x, w, out=part)
        got = reduced()
        return act(got if bias is None else got + bias)

    return call


def alone(x: torch.Tensor, w: torch.Tensor, world: int, **scaled: Any) -> Callable[[], Any]:
    """The library's product of a rank's part, which nobody adds."""
    assert world
    if "scale_x" in scaled:
        kind = scaled.get("out_dtype", torch.bfloat16)
        return fp8_gemm.scaled_mm(x, w, scaled["scale_x"], scaled["scale_w"], kind)
    return gemm.cublas(x, w)
