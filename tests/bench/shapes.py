"""Random shapes for tests/bench/bench_shapes.py: how they are drawn, where their arguments come from, who the
peers are."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from tilescale.ops import load, w4a16
from tilescale.ops.case import Op

#: bytes of random numbers that all arguments are parts of
ROOM = 3 << 30
#: floating-point operations and bytes of a call, at most
MOST_FLOPS, MOST_BYTES = 1e12, 1e9


class Pool:
    """Arguments without drawing each: parts of one large piece of random numbers, one behind the other.
    Without a device tensors that hold anything."""

    def __init__(self, device: Any):
        self.device, self.at = device, 0
        if device is not None:
            self.numbers = torch.randn(ROOM // 2, device=device, dtype=torch.bfloat16)

    def take(self, shape: tuple[int, ...], dtype: str = "bfloat16") -> torch.Tensor:
        """A contiguous tensor that begins at a multiple of 512 bytes. The numbers of bfloat16 are normal,
        those of the others their bits."""
        kind = getattr(torch, dtype)
        if self.device is None:
            return torch.empty(shape, dtype=kind, device="cuda")
        count = math.prod(shape) * kind.itemsize // 2
        if self.at + count > len(self.numbers):
            self.at = 0
        part = self.numbers[self.at : self.at + count]
        self.at += -(-count // 256) * 256
        return part.view(kind).view(shape)


@dataclass(frozen=True)
class Swept:
    """An operation: ``draw``, a shape by a random generator, aligned or not, or None where it is too large;
    ``make``, arguments of a shape; ``peers``, as in `Op`; ``right``, what the results are compared with."""

    op: Op
    draw: Callable[[random.Random, bool], dict[str, Any] | None]
    make: Callable[..., dict[str, Any]]
    peers: Mapping[str, Callable[..., Callable[[], Any]]]
    right: Callable[[dict[str, Any]], Any]


def text(shape: Mapping[str, Any]) -> str:
    return " ".join(f"{k}={v}" for k, v in shape.items() if k != "aligned")


def drawn(name: str, count: int, seed: int = 23) -> list[dict[str, Any]]:
    """The first ``count`` shapes, every other one aligned; the same from run to run, and of more the first
    ones."""
    r, found = random.Random(f"{name} {seed}"), []
    while len(found) < count:
        aligned = len(found) % 2 == 0
        shape = OPS[name].draw(r, aligned)
        if shape is not None:
            found.append({**shape, "aligned": aligned})
    return found


def log_uniform(r: random.Random, low: int, high: int, of: int = 1) -> int:
    """A multiple of ``of``."""
    value = math.exp(r.uniform(math.log(low), math.log(high)))
    return max(of, round(value / of) * of)


# ---- operations


def _matmul(r: random.Random, aligned: bool) -> dict[str, Any] | None:
    of = 8 if aligned else 1
    M, N, K = log_uniform(r, 1, 16384), log_uniform(r, 1, 16384, of), log_uniform(r, 16, 131072, of)
    if 2.0 * M * N * K > MOST_FLOPS or 2.0 * (M * K + N * K + M * N) > MOST_BYTES:
        return None
    return {"M": M, "N": N, "K": K, "trans_b": r.random() < 0.5}


def _matmul_arguments(pool: Pool, M: int, N: int, K: int, trans_b: bool, **_: Any) -> dict[str, Any]:
    return {"a": pool.take((M, K)), "b": pool.take((N, K)).T if trans_b else pool.take((K, N))}


def _rows(r: random.Random, aligned: bool) -> dict[str, Any] | None:
    dtype = r.choice(("bfloat16", "bfloat16", "float16", "float32"))
    m, n = (
        log_uniform(r, 1, 65536),
        log_uniform(r, 16, 262144, (4 if dtype == "float32" else 8) if aligned else 1),
    )
    return {"m": m, "n": n, "dtype": dtype} if 4.0 * m * n <= MOST_BYTES / 2 else None


def _w4a16(r: random.Random, aligned: bool) -> dict[str, Any] | None:
    of = 64 if aligned else 8
    return {
        "M": log_uniform(r, 1, 512),
        "N": log_uniform(r, 64, 16384, of),
        "K": log_uniform(r, 128, 16384, 128),
    }


def _w4a16_arguments(pool: Pool, M: int, N: int, K: int, **_: Any) -> dict[str, Any]:
    words = pool.take(w4a16.shapes(N, K)[True], "int32")
    return {"a": pool.take((M, K)), "w": words, "scales": pool.take((K // w4a16.GROUP, N))}


def _w4a16_peer(a: torch.Tensor, w: torch.Tensor, scales: torch.Tensor) -> Callable[[], Any]:
    """torch.mm with weights of as many bytes as 16-bit ones have; what they are does not count."""
    N, K = scales.shape[1], a.shape[1]
    y, out = (
        torch.randn(N, K, device=a.device, dtype=a.dtype),
        torch.empty(a.shape[0], N, device=a.device, dtype=a.dtype),
    )
    return lambda: torch.mm(a, y.T, out=out)


def _attention(
    r: random.Random, aligned: bool, longest: int = 32768, most: float = MOST_FLOPS
) -> dict[str, Any] | None:
    dim = r.choice((64, 96, 128, 192, 256)) if aligned else 8 * r.randint(5, 32)
    group, kv_heads, batch = r.choice((1, 1, 2, 4, 8)), log_uniform(r, 1, 16), log_uniform(r, 1, 64)
    causal, packed, heads = r.random() < 0.4, r.random() < 0.25, group * kv_heads
    length = log_uniform(r, 1, longest, 64 if aligned and r.random() < 0.5 else 1)
    keys = length if causal or packed or r.random() < 0.5 else log_uniform(r, 1, longest)
    flops = 4.0 * batch * heads * length * keys * dim
    if flops > most or 4.0 * batch * dim * (length * heads + keys * kv_heads) > MOST_BYTES:
        return None
    shape = {
        "batch": batch,
        "heads": heads,
        "kv_heads": kv_heads,
        "length": length,
        "keys": keys,
        "dim": dim,
        "causal": causal,
    }
    return {**shape, "packed": packed}


def _attention_arguments(
    pool: Pool,
    batch: int,
    heads: int,
    kv_heads: int,
    length: int,
    keys: int,
    dim: int,
    causal: bool,
    packed: bool,
    **_: Any,
) -> dict[str, Any]:
    if not packed:
        q, k, v = (
            pool.take((batch, heads, length, dim)),
            pool.take((batch, kv_heads, keys, dim)),
            pool.take((batch, kv_heads, keys, dim)),
        )
        return {"q": q, "k": k, "v": v, "causal": causal}
    r = random.Random(batch * length)
    counts = [length, *(r.randint(1, length) for _ in range(batch - 1))]
    starts = torch.tensor([sum(counts[:n]) for n in range(batch + 1)], dtype=torch.int32, device="cuda")
    total = sum(counts)
    q, k, v = (
        pool.take((total, heads, dim)),
        pool.take((total, kv_heads, dim)),
        pool.take((total, kv_heads, dim)),
    )
    return {
        "q": q,
        "k": k,
        "v": v,
        "causal": causal,
        "q_starts": starts,
        "k_starts": starts,
        "longest": length,
    }


def _cudnn(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, **more: Any) -> Callable[[], Any]:
    if more:
        raise ValueError("packed")
    return load("attention").peers["cuDNN"](q, k, v, causal)


def _flash(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    causal: bool,
    q_starts: Any = None,
    k_starts: Any = None,
    longest: int = 0,
) -> Callable[[], Any]:
    """torch's flash attention, which has tokens in front of heads; what it takes is made so beforehand. Its
    causal mask ends at the last key, which is ours where there are as many keys as queries."""
    forward, scale = torch.ops.aten._flash_attention_forward, q.shape[-1] ** -0.5
    if q_starts is not None:
        return lambda: forward(
            q, k, v, q_starts, k_starts, longest, longest, 0.0, causal, False, scale=scale
        )[:2]
    if causal and q.shape[2] != k.shape[2]:
        raise ValueError("another causal mask")
    x, y, z = (t.transpose(1, 2).contiguous() for t in (q, k, v))

    def run() -> Any:
        o, lse, *_ = forward(x, y, z, None, None, q.shape[2], k.shape[2], 0.0, causal, False, scale=scale)
        return o.transpose(1, 2), lse

    return run


def _right_attention(arguments: dict[str, Any]) -> Any:
    return _flash(**arguments)()


def _gradients(r: random.Random, aligned: bool) -> dict[str, Any] | None:
    shape = _attention(r, aligned, 8192, MOST_FLOPS / 2)
    return (
        None if shape is None or shape["length"] < 16 else {**shape, "keys": shape["length"], "packed": False}
    )


def _gradients_arguments(pool: Pool, **shape: Any) -> dict[str, Any]:
    given = _attention_arguments(pool, **shape)
    q = given["q"]
    if pool.device is None:
        o, lse = torch.empty_like(q), torch.empty(q.shape[:3], dtype=torch.float32, device="cuda")
    else:
        o, lse = load("attention").run(**given)
    return {"do": pool.take(tuple(q.shape)), **given, "o": o, "lse": lse, "deterministic": False}


def _flash_backward(
    do: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    o: torch.Tensor,
    lse: torch.Tensor,
    causal: bool,
    **_: Any,
) -> Callable[[], Any]:
    forward, backward = torch.ops.aten._flash_attention_forward, torch.ops.aten._flash_attention_backward
    x, y, z, g = (t.transpose(1, 2).contiguous() for t in (q, k, v, do))
    n, scale = q.shape[2], q.shape[-1] ** -0.5
    own, sums, seed, offset, _debug = forward(x, y, z, None, None, n, n, 0.0, causal, False, scale=scale)

    def run() -> Any:
        made = backward(g, x, y, z, own, sums, None, None, n, n, 0.0, causal, seed, offset, scale=scale)
        return tuple(t.transpose(1, 2) for t in made)

    return run


def _right_gradients(arguments: dict[str, Any]) -> Any:
    return load("attention_backward").peers["cuDNN"](**arguments)()


def _first(name: str) -> Callable[[dict[str, Any]], Any]:
    """What the operation's first peer makes of the arguments."""
    return lambda arguments: next(iter(load(name).peers.values()))(**arguments)()


def _swept(module: str, draw: Any, make: Any, right: Any = None, peers: Any = None) -> Swept:
    op = load(module)
    return Swept(op, draw, make, peers or op.peers, right or _first(module))


OPS = {
    "matmul": _swept("gemm", _matmul, _matmul_arguments),
    "softmax": _swept("row_softmax", _rows, lambda pool, m, n, dtype, **_: {"x": pool.take((m, n), dtype)}),
    "rms_norm": _swept(
        "rms_norms",
        _rows,
        lambda pool, m, n, dtype, **_: {"x": pool.take((m, n), dtype), "weight": pool.take((n,), dtype)},
    ),
    "w4a16_matmul": _swept("w4a16", _w4a16, _w4a16_arguments, peers={"cuBLAS bf16": _w4a16_peer}),
    "flash_attention": _swept(
        "attention", _attention, _attention_arguments, _right_attention, {"cuDNN": _cudnn, "flash": _flash}
    ),
    "attention_gradients": _swept(
        "attention_backward",
        _gradients,
        _gradients_arguments,
        _right_gradients,
        {"cuDNN": load("attention_backward").peers["cuDNN"], "flash": _flash_backward},
    ),
}
