"""``python -m tests.bench.bench_gemm_sp``: products of a left operand with two numbers in each four, on a
Hopper GPU.

Beside torch.mm (cuBLAS, of the whole operand), our own dense tile program, and torch's sparse product where
its cuSPARSELt is there. Random bf16 data, C in bf16. Captured in CUDA graphs and replayed in turn
(tests/bench/gpu.py); TFLOP/s count the dense product's work, of which the tensor cores do half.

Options: ``--shapes 8192,8192,8192 …`` (M,N,K), ``--tiles 128,256,128,2,256,16,1,132 …``
(BM,BN,BK,stages,threads,panel, blocks of a cluster along M, blocks that stay), ``--rounds 30``. The figures
go to $OUT/gemm_sp.json, or without OUT to tests/bench/results.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

from tests.bench.bench_hopper_gemm import numbers
from tests.bench.gpu import captured, copies, measure, over, ratios, spread
from tests.bench.record import record

SHAPES = ("8192,8192,8192", "4096,4096,4096")
TILES = (
    "128,192,128,3,256,16,2,132",
    "128,128,128,4,256,16,2,132",
    "128,192,128,3,256,16,1,132",
    "128,256,128,2,256,16,1,132",
)
DENSE = {"BM": 128, "BN": 256, "BK": 64, "stages": 4, "threads": 256, "panel": 16, "blocks": 132}


def operands(M: int, N: int, K: int) -> tuple[Any, ...]:
    """A as a whole, what it keeps, where that is (int16), B (N, K) and C."""
    import torch

    pairs = torch.tensor([(p, q) for p in range(4) for q in range(p + 1, 4)], device="cuda")[
        torch.randint(6, (M, K // 4), device="cuda")
    ]
    kept = torch.randn(M, K // 4, 2, device="cuda").bfloat16()
    whole = (
        torch.zeros(M, K // 4, 4, device="cuda", dtype=torch.bfloat16).scatter_(2, pairs, kept).reshape(M, K)
    )
    four = (pairs[..., 0] | pairs[..., 1] << 2).reshape(M, -1, 4)
    where = (four << torch.arange(0, 16, 4, device="cuda")).sum(-1).to(torch.int32).to(torch.int16)
    b = torch.randn(N, K, device="cuda").bfloat16()
    return whole, kept.reshape(M, K // 2), where, b, torch.empty(M, N, device="cuda", dtype=torch.bfloat16)


def peers(sets: list[tuple[Any, ...]]) -> dict[str, Any]:
    """cuBLAS, ours of the whole operand, and cuSPARSELt where torch has it."""
    import torch

    import tilescale
    from tests.gpu.gemms import gemm

    whole, _, _, b, _ = sets[0]
    dense = tilescale.compile(
        gemm(whole.shape[0], b.shape[0], b.shape[1], trans_b=True, **DENSE), target="cuda"
    )
    graphs = {
        "torch.mm": captured(over(lambda whole, kept, where, b, c: torch.mm(whole, b.T, out=c), sets)),
        "tilescale, whole": captured(over(lambda whole, kept, where, b, c: dense(whole, b, c), sets)),
    }
    try:
        packed = [(torch._cslt_compress(s[0]), s[3]) for s in sets]
        graphs["cuSPARSELt"] = captured(over(lambda a, b: torch._cslt_sparse_mm(a, b.T), packed))
    except (RuntimeError, AttributeError) as error:
        print(f"no cuSPARSELt: {str(error).splitlines()[0]}")
    return graphs


def kernel(shape: tuple[int, ...], tile: tuple[int, ...]) -> Any:
    from tests.gpu.gemms import sparse_gemm

    BM, BN, BK, stages, threads, panel, cluster, blocks = tile
    options = {
        "BM": BM,
        "BN": BN,
        "BK": BK,
        "stages": stages,
        "threads": threads,
        "panel": panel,
        "blocks": blocks,
    }
    options["cluster"] = cluster if blocks else (1, cluster)
    return sparse_gemm(*shape, dtype="bfloat16", out="bfloat16", sums="float32", trans_b=True, **options)


def one(shape: tuple[int, ...], tiles: list[tuple[int, ...]], rounds: int) -> dict[str, Any]:
    import torch

    import tilescale

    M, N, K = shape
    count = copies(2 * (M * K // 2 + K * N + M * N))
    sets = [operands(M, N, K) for _ in range(count)]
    want = torch.mm(sets[0][0], sets[0][3].T).float()
    graphs, errors = peers(sets), {}
    for tile in tiles:
        name = "{}×{}×{} {} stages {} threads panel {} cluster {} blocks {}".format(*tile)
        made = tilescale.compile(kernel(shape, tile), target="cuda")
        made(*sets[0][1:])
        errors[name] = ((sets[0][4].float() - want).abs().max() / want.abs().max()).item()
        if errors[name] > 2e-2 or "wgmma_sp" not in made.get_kernel_source("cuda"):
            raise SystemExit(f"{name} is wrong by {errors[name]} of the greatest value, or no wgmma.sp")
        graphs[name] = captured(
            over(lambda whole, kept, where, b, c, made=made: made(kept, where, b, c), sets)
        )
    times = measure(graphs, count, rounds)
    work = 2.0 * M * N * K
    out: dict[str, Any] = {"shape": [M, N, K], "copies": count, "rounds": rounds, "kernels": {}}
    for name, seconds in times.items():
        found, ratio = spread(seconds), ratios(times["torch.mm"], seconds)
        out["kernels"][name] = {
            "us": {k: v * 1e6 for k, v in found.items()},
            "tflops": work / found["median"] / 1e12,
            "ratio_to_torch": ratio,
            "relative_error": errors.get(name, 0.0),
        }
        print(
            f"{M}×{N}×{K}  {name:52s} {found['median'] * 1e6:9.1f} µs  {work / found['median'] / 1e12:7.1f} TFLOP/s  {ratio['median']:.3f} × torch.mm",
            flush=True,
        )
    return out


def main(argv: list[str] | None = None) -> int:
    import torch

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shapes", nargs="+", default=list(SHAPES))
    parser.add_argument("--tiles", nargs="+", default=list(TILES))
    parser.add_argument("--rounds", type=int, default=30)
    args = parser.parse_args(argv)
    torch.manual_seed(0)
    found = [one(numbers(s), [numbers(t) for t in args.tiles], args.rounds) for s in args.shapes]
    record("gemm_sp", {"dtype": "bfloat16", "shapes": found})
    return 0


if __name__ == "__main__":
    sys.exit(main())
