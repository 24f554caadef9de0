"""Flash attention forward (examples/04): one thread beside torch's scaled_dot_product_attention on one
thread, call by call in turn.

The figures are ratios of medians: torch's time over ours. Bar: 1.2 without a mask (batch 1, 8 heads, 1024 ×
64, float32).
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.bench.record import record
from tests.examples.test_examples import load

BATCH, HEADS, LENGTH, DIM = 1, 8, 1024, 64
TILE = (512, 256)
ROUNDS = 25


def measure() -> dict[str, float]:
    """Both kernels against torch in this process, which has one thread."""
    import torch

    torch.set_num_threads(1)
    attention = load("04_flash_attention")
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(BATCH, HEADS, LENGTH, DIM, generator=generator) for _ in range(3))
    out = torch.empty_like(q)
    figures = {}
    for causal in (False, True):
        kernel = attention.kernel(BATCH, HEADS, LENGTH, DIM, causal, *TILE)
        reference = torch.nn.functional.scaled_dot_product_attention
        ours, theirs = [], []
        for _ in range(ROUNDS):
            start = time.perf_counter()
            kernel(q, k, v, out)
            middle = time.perf_counter()
            want = reference(q, k, v, is_causal=causal)
            theirs.append(time.perf_counter() - middle)
            ours.append(middle - start)
        assert (out - want).abs().max() < 1e-5
        name = "causal" if causal else "full"
        mine, ref = statistics.median(ours), statistics.median(theirs)
        figures |= {f"{name}_ratio": ref / mine, f"{name}_ms": 1e3 * mine, f"{name}_torch_ms": 1e3 * ref}
        figures[f"{name}_ratio_of_best"] = min(theirs) / min(ours)
    return figures


def test_attention_one_thread() -> None:
    """In a process of its own: the number of threads is read once."""
    code = "import json; from tests.bench.bench_attention import measure; print(json.dumps(measure()))"
    env = os.environ | {"TILESCALE_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
    root = Path(__file__).resolve().parents[2]
    env["PYTHONPATH"] = os.pathsep.join(filter(None, [str(root), env.get("PYTHONPATH")]))
    done = subprocess.run(
        [sys.executable, "-c", code], env=env, cwd=root, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    import json

    figures = json.loads(done.stdout)
    record("attention", figures | {"shape": [BATCH, HEADS, LENGTH, DIM], "tile": list(TILE)})
    print(*(f"{key} {value:.3f}" for key, value in figures.items()), sep="\n")
    if figures["full_ratio"] < 1.2:
        pytest.fail(f"attention forward is {figures['full_ratio']:.2f} × torch's, the bar is 1.2")
