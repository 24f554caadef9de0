"""The peer's side of tests/bench/bench_tilelang.py, in a process of its own: TileLang and torch, and nothing
of ours.

Reads one JSON object a line from standard input, and answers each with one: ``{"do": "mla", …}`` prepares a
CUDA graph of TileLang's own example, ``{"do": "time"}`` replays what was prepared last, ``{"do": "gemm",
"sizes": […]}`` compiles a GEMM for each size. What libraries print goes to standard error.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

#: the GEMM of tests/gpu/gemms.py as TileLang has it: the tile that both are told to use, no more
GEMM = """
import tilelang
import tilelang.language as T

def gemm(M, N, K, BM=128, BN=256, BK=64, stages=4, threads=256):
    @T.prim_func
    def main(A: T.Tensor((M, K), "bfloat16"), B: T.Tensor((K, N), "bfloat16"), C: T.Tensor((M, N), "bfloat16")):
        with T.Kernel(T.ceildiv(N, BN), T.ceildiv(M, BM), threads=threads) as (bx, by):
            a = T.alloc_shared((BM, BK), "bfloat16")
            b = T.alloc_shared((BK, BN), "bfloat16")
            c = T.alloc_fragment((BM, BN), "float32")
            T.clear(c)
            for k in T.Pipelined(T.ceildiv(K, BK), num_stages=stages):
                T.copy(A[by * BM, k * BK], a)
                T.copy(B[k * BK, bx * BN], b)
                T.gemm(a, b, c)
            T.copy(c, C[by * BM, bx * BN])

    return main
"""


def loaded(path: Path) -> Any:
    """A Python file as a module; its functions' source can be read, as TileLang's decorators do."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module


class Peer:
    """What the process holds between two lines."""

    def __init__(self) -> None:
        self.replay: Callable[[], None] = lambda: None
        self.launches = 1
        self.kept: list[Any] = []

    def mla(
        self, example: str, batch: int, heads: int, context: int, latent: int, rope: int, sets: int
    ) -> dict[str, Any]:
        """A graph of ``sets`` calls of the example's kernel, by the constants of its own ``main``, each with
        other inputs."""
        import torch

        module = loaded(Path(example))
        scale = (latent + rope) ** -0.5
        kernel = module.flashattn(batch, heads, 1, context, latent, rope, 64, min(64, heads), 1, scale)
        half = {"dtype": torch.float16, "device": "cuda"}
        made = [
            (
                torch.randn(batch, heads, latent, **half),
                torch.randn(batch, heads, rope, **half),
                torch.randn(batch, context, 1, latent, **half),
                torch.randn(batch, context, 1, rope, **half),
            )
            for _ in range(sets)
        ]
        got, (q, q_rope, kv, k_rope) = kernel(*made[0]), (t[:1].double() for t in made[0])
        scores = (torch.cat([q, q_rope], -1) @ torch.cat([kv, k_rope], -1)[:, :, 0].mT) * scale
        want = scores.softmax(-1) @ kv[:, :, 0]
        difference = float((got[:1].double() - want).abs().max() / want.abs().max())
        self._capture([lambda a=a: kernel(*a) for a in made])
        return {"difference": difference}

    def _capture(self, calls: list[Callable[[], Any]]) -> None:
        import torch

        side = torch.cuda.Stream()
        with torch.cuda.stream(side):
            self.kept = [call() for call in calls]
        side.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self.kept = [call() for call in calls]
        self.replay, self.launches = graph.replay, len(calls)

    def time(self) -> dict[str, Any]:
        """Seconds of one launch."""
        import torch

        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        self.replay()
        end.record()
        end.synchronize()
        return {"seconds": begin.elapsed_time(end) / 1e3 / self.launches}

    def gemm(self, sizes: list[int]) -> dict[str, Any]:
        """Seconds from a tile program to a kernel that can be launched, for each size; the first one loads
        what the others use."""
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "gemm_program.py")
            path.write_text(GEMM)
            begin = time.perf_counter()
            module, found = loaded(path), []
            for n in sizes:
                module.tilelang.compile(module.gemm(n, n, n), target="cuda")
                found.append(time.perf_counter() - begin)
                begin = time.perf_counter()
        return {"seconds": found}

    def versions(self) -> dict[str, Any]:
        return {p: importlib.metadata.version(p) for p in ("tilelang", "apache-tvm-ffi", "torch")}


def main() -> None:
    # The channel is ours alone: what anybody prints goes to standard error.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    peer = Peer()
    for line in sys.stdin:
        request = json.loads(line)
        try:
            answer = getattr(peer, request.pop("do"))(**request)
        except Exception as error:  # noqa: BLE001  # the other side says what failed
            answer = {"failed": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
