"""``rotary_heads(h, cos, sin, …)``: a product of queries, keys and values, cut into heads as attention takes
them, queries and keys turned by their places (Su et al., "RoFormer", 2021), and the way back of gradients.
One kernel each, which reads and writes everything once.

A row of the product has the heads of a token: of each key head its query heads, itself, its value.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

import tilescale.language as T
from tilescale.errors import TileTypeError, TileValueError
from tilescale.ops import host
from tilescale.ops.case import Case, Expected, Op, expected, generator, normal
from tilescale.ops.rows import BYTES, error

DTYPES = ("bfloat16", "float16", "float32", "float64")
#: numbers of a block's tile, and its threads
TILE, THREADS = 4096, 128


# ---- the kernels


def turned_heads(kv: int, each: int, dim: int, dtype: str, turned: bool, back: bool) -> Any:
    """Q (B, kv · each, L, dim), K and V (B, kv, L, dim) of H (B, L, kv · (each + 2), dim), with cosines and
    sines (P, L, dim / 2), P being 1 or B; ``back``: H of the gradients of the others, turned back."""
    B, L, P = T.dynamic("B"), T.dynamic("L"), T.dynamic("P")
    acc, half, slots = "float64" if dtype == "float64" else "float32", dim // 2, kv * (each + 2)
    rows = max(1, TILE // dim)

    @T.macro
    def move(H, X, cos, sin, at, batch, slot, head, angle):
        """A tile of a head: of rows ``at`` and on. ``angle``: whose cosines; None: nothing is turned."""
        x, y = (T.alloc_fragment((rows, half), acc) for _ in range(2))
        for i, j in T.Parallel(rows, half):
            x[i, j] = T.cast(X[batch, head, at + i, j] if back else H[batch, at + i, slot, j], acc)
            y[i, j] = T.cast(
                X[batch, head, at + i, half + j] if back else H[batch, at + i, slot, half + j], acc
            )
        if angle is not None:
            for i, j in T.Parallel(rows, half):
                c, s = cos[angle, at + i, j], -sin[angle, at + i, j] if back else sin[angle, at + i, j]
                first = x[i, j]
                x[i, j] = first * c - y[i, j] * s
                y[i, j] = y[i, j] * c + first * s
        for part, shift in ((x, 0), (y, half)):
            for i, j in T.Parallel(rows, half):
                if back:
                    H[batch, at + i, slot, shift + j] = T.cast(part[i, j], dtype)
                else:
                    X[batch, head, at + i, shift + j] = T.cast(part[i, j], dtype)

    @T.prim_func
    def rotary_heads(
        H: T.Tensor((B, L, slots, dim), dtype),
        cos: T.Tensor((P, L, half), acc),
        sin: T.Tensor((P, L, half), acc),
        Q: T.Tensor((B, kv * each, L, dim), dtype),
        K: T.Tensor((B, kv, L, dim), dtype),
        V: T.Tensor((B, kv, L, dim), dtype),
    ):
        with T.Kernel(T.ceildiv(L, rows), slots, B, threads=THREADS) as (bx, slot, batch):
            head, k = slot // (each + 2), slot % (each + 2)
            angle = batch % P if turned else None
            if k < each:
                move(H, Q, cos, sin, bx * rows, batch, slot, head * each + T.min(k, each - 1), angle)
            if k == each:
                move(H, K, cos, sin, bx * rows, batch, slot, head, angle)
            if k == each + 1:
                move(H, V, cos, sin, bx * rows, batch, slot, head, None)

    return rotary_heads


# ---- what people call


def _launch(
    h: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cos: Any, sin: Any, back: bool
) -> None:
    B, kv, L, dim = k.shape
    acc = torch.promote_types(h.dtype, torch.float32)
    angles = [_angles(t, B, L, dim, acc, h.device) for t in (cos, sin)]
    if 0 in h.shape:
        return
    what = {"kv": kv, "each": q.shape[1] // kv, "dim": dim, "dtype": host.dtype_name(h)}
    args = (h.view(B, L, -1, dim), *angles, q, k, v)
    host.launch(turned_heads, args, **what, turned=cos is not None, back=back)


def _angles(
    t: torch.Tensor | None, B: int, L: int, dim: int, acc: torch.dtype, device: torch.device
) -> torch.Tensor:
    """(1 or B, L, dim / 2) of cosines or sines.

    Raises:
        TileValueError: another shape.
    """
    if t is None:  # not read
        return torch.empty(1, L, dim // 2, dtype=acc, device=device)
    t = t[None] if t.dim() == 2 else t
    if t.dim() != 3 or t.shape[0] not in (1, B) or t.shape[1] != L or t.shape[2] not in (dim, dim // 2):
        raise TileValueError(
            f"cosines or sines {tuple(t.shape)}", expected=f"(L, dim or dim / 2), or {B} of them, L={L}"
        )
    return t[..., : dim // 2].to(acc).contiguous()


@host.checked
def rotary_heads(
    h: torch.Tensor,
    cos: torch.Tensor | None = None,
    sin: torch.Tensor | None = None,
    *,
    heads: int,
    kv_heads: int,
    batch: int = 1,
    out: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Queries, keys and values of ``batch`` sequences of L tokens; queries and keys turned: (x, y) of halves
    become (x · cos − y · sin, y · cos + x · sin), computed in float32 (float64 of float64) and rounded once.

    Args:
        h: (batch · L, (heads + 2 · kv_heads) · dim) of bfloat16, float16, float32 or float64, contiguous: of
            each key head its heads / kv_heads query heads, itself, its value. dim is even.
        cos, sin: (L, dim / 2), or (batch, L, dim / 2); of a last axis of dim the first half counts. None:
            nothing is turned.
        out: takes the results.

    Returns:
        q (batch, heads, L, dim), k and v (batch, kv_heads, L, dim).

    Raises:
        TileValueError, TileTypeError: shapes or dtypes that do not fit.
    """
    if host.dtype_name(h) not in DTYPES:
        raise TileTypeError(f"rotary_heads of {host.dtype_name(h)}", expected="one of " + ", ".join(DTYPES))
    parts = heads + 2 * kv_heads
    fits = h.dim() == 2 and h.is_contiguous() and batch > 0 and h.shape[0] % batch == 0
    if (
        not fits
        or kv_heads < 1
        or heads % kv_heads
        or h.shape[1] % (2 * parts)
        or (cos is None) != (sin is None)
    ):
        raise TileValueError(
            f"rotary_heads of {tuple(h.shape)}, heads={heads}, kv_heads={kv_heads}, batch={batch}",
            expected="(batch · L, (heads + 2 · kv_heads) · an even dim), contiguous; cos and sin, or none",
        )
    L, dim = h.shape[0] // batch, h.shape[1] // parts
    shapes = ((batch, heads, L, dim), (batch, kv_heads, L, dim), (batch, kv_heads, L, dim))
    given = out or (None, None, None)
    q, k, v = (host.result(o, s, h.dtype, h) for o, s in zip(given, shapes, strict=True))
    _launch(h, q, k, v, cos, sin, back=False)
    return q, k, v


@host.checked
def rotary_heads_backward(
    dq: torch.Tensor,
    dk: torch.Tensor,
    dv: torch.Tensor,
    cos: torch.Tensor | None = None,
    sin: torch.Tensor | None = None,
    *,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """The gradient of `rotary_heads` by h, of those by its results, contiguous.

    Raises:
        TileValueError, TileTypeError: shapes or dtypes that do not fit.
    """
    if host.dtype_name(dq) not in DTYPES or dk.dtype != dq.dtype or dv.dtype != dq.dtype:
        raise TileTypeError(
            f"rotary_heads_backward of {dq.dtype}, {dk.dtype}, {dv.dtype}", expected="one dtype"
        )
    fits = dq.dim() == dk.dim() == 4 and dk.shape == dv.shape and dq.shape[1] % dk.shape[1] == 0
    if not fits or not all(t.is_contiguous() for t in (dq, dk, dv)) or (cos is None) != (sin is None):
        raise TileValueError(
            f"rotary_heads_backward of {tuple(dq.shape)}, {tuple(dk.shape)}, {tuple(dv.shape)}",
            expected="(batch, heads, L, dim) and (batch, kv_heads, L, dim) twice, contiguous",
        )
    B, kv, L, dim = dk.shape
    h = host.result(out, (B * L, (dq.shape[1] + 2 * kv) * dim), dq.dtype, dq)
    _launch(h, dq, dk, dv, cos, sin, back=True)
    return h


# ---- what is right, and what it is measured against


def draw(
    batch: int, heads: int, kv_heads: int, length: int, dim: int, dtype: str = "bfloat16", turned: int = 1,
    device: Any = "cpu", seed: int = 0,
) -> dict[str, Any]:  # fmt: skip
    """``turned``: 0, nothing is; 1: all sequences alike; 2: each by angles of its own."""
    g = generator(device, seed)
    made: dict[str, Any] = {"h": normal((batch * length, (heads + 2 * kv_heads) * dim), dtype, g)}
    if turned:
        angle = torch.rand(batch if turned == 2 else 1, length, dim // 2, generator=g, device=device) * 7
        wide = torch.float64 if dtype == "float64" else torch.float32
        made |= {"cos": angle.to(wide).cos(), "sin": angle.to(wide).sin()}
    return made | {"heads": heads, "kv_heads": kv_heads, "batch": batch}


def reference(
    h: torch.Tensor, cos: Any = None, sin: Any = None, *, heads: int, kv_heads: int, batch: int
) -> tuple[Expected, ...]:
    """In float64."""
    each, dim = heads // kv_heads, h.shape[1] // (heads + 2 * kv_heads)
    x = h.double().view(batch, -1, kv_heads, each + 2, dim).permute(0, 2, 3, 1, 4)
    q, k, v = x[:, :, :each].flatten(1, 2), x[:, :, each], x[:, :, each + 1]

    def turn(t: torch.Tensor) -> Expected:
        if cos is None:
            return Expected(t, torch.zeros_like(t))
        c, s = cos.double()[:, None], sin.double()[:, None]
        a, b = t.chunk(2, -1)
        noise = torch.cat([(a * c).abs() + (b * s).abs(), (b * c).abs() + (a * s).abs()], -1)
        return expected(
            torch.cat([a * c - b * s, b * c + a * s], -1), h.dtype, noise=noise * error(h.dtype) * 3
        )

    return turn(q), turn(k), Expected(v, torch.zeros_like(v))


def in_torch(
    h: torch.Tensor, cos: Any = None, sin: Any = None, *, heads: int, kv_heads: int, batch: int
) -> Callable[[], Any]:
    """Copies into heads, then products and sums, one kernel each."""
    each, dim = heads // kv_heads, h.shape[1] // (heads + 2 * kv_heads)

    def turn(t: torch.Tensor) -> torch.Tensor:
        if cos is None:
            return t.contiguous()
        c, s = (torch.cat([a, a], -1)[:, None] for a in (cos, sin))
        a, b = t.chunk(2, -1)
        return (t * c + torch.cat([-b, a], -1) * s).to(h.dtype)

    def call() -> Any:
        x = h.view(batch, -1, kv_heads, each + 2, dim).permute(0, 2, 3, 1, 4)
        return turn(x[:, :, :each].flatten(1, 2)), turn(x[:, :, each]), x[:, :, each + 1].contiguous()

    return call


OP = Op(
    name="rotary_heads",
    run=rotary_heads,
    draw=draw,
    reference=reference,
    cases=(
        *(
            Case({"batch": b, "heads": h, "kv_heads": kv, "length": n, "dim": d, **more}, small=True)
            for b, h, kv, n, d, more in (
                (2, 6, 2, 37, 16, {}),
                (2, 3, 3, 5, 8, {"turned": 2, "dtype": "float64"}),
                (1, 4, 1, 130, 64, {"dtype": "float16"}),
                (2, 2, 1, 9, 32, {"turned": 0, "dtype": "float32"}),
            )
        ),
        *(
            Case({"batch": b, "heads": h, "kv_heads": kv, "length": n, "dim": 128, "turned": t})
            for b, h, kv, n, t in ((3, 16, 2, 1000, 1), (2, 8, 8, 333, 2))
        ),
        *(
            Case({"batch": b, "heads": 16, "kv_heads": 2, "length": n, "dim": 128}, bar=1.0)
            for b, n in ((1, 8192), (4, 2048))
        ),
    ),
    peers={"torch": in_torch},
    moved=lambda batch, heads, kv_heads, length, dim, dtype="bfloat16", **_: (
        2.0 * BYTES[dtype] * batch * length * (heads + 2 * kv_heads) * dim
    ),
)
