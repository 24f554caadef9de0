"""T.print and T.device_assert on the GPU, each in a process of its own: what it printed is read, and a failed
kernel loses the GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import tilescale
from tests.gpu.test_launch import add

ROOT = Path(__file__).resolve().parents[2]
HEAD = """
import torch
import tilescale
import tilescale.language as T
"""


def run(folder: Path, code: str, *args: str) -> subprocess.CompletedProcess[str]:
    path = folder / "kernel.py"
    path.write_text(HEAD + code)
    env = os.environ | {
        "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
    }
    return subprocess.run(
        [sys.executable, str(path), *args], env=env, capture_output=True, text=True, timeout=120, cwd=folder
    )


DTYPES = (
    "float32",
    "float16",
    "bfloat16",
    "float8_e4m3fn",
    "float64",
    "int8",
    "int32",
    "int64",
    "uint8",
    "bool",
)
PRINTS = """
def shows(dtype):
    @T.prim_func
    def shown(A: T.Tensor((4, 8), dtype), n: T.int32):
        with T.Kernel(2, threads=128) as bx:
            f, s = T.alloc_fragment((4, 8), dtype), T.alloc_shared((4, 8), dtype)
            T.copy(A, f)
            T.copy(A, s)
            if bx == 1:
                T.print(f, "fragment")
                T.print(s, "shared")
                T.print(s[1, 2:5], "row")
                T.print(n + bx, "scalar")
                T.print("words: 100 %")
    return shown

@T.prim_func
def wide(A: T.Tensor((3, 40), "float32")):
    with T.Kernel(8, threads=64):
        T.print(A, "a")
"""
SHOWN = (
    PRINTS
    + """
import sys
for dtype in sys.argv[1].split():
    a = torch.arange(32, device="cuda").reshape(4, 8)
    a = (a % 2 == 0) if dtype == "bool" else a.to(getattr(torch, dtype))
    tilescale.compile(shows(dtype), target="cuda")(a, 41)
    torch.cuda.synchronize()
tilescale.compile(wide, target="cuda")(torch.arange(120, device="cuda", dtype=torch.float32).reshape(3, 40))
torch.cuda.synchronize()
"""
)


def line_of(text: str) -> int:
    """Where a line stands in the file that `run` writes."""
    return next(k for k, line in enumerate((HEAD + PRINTS).splitlines(), 1) if text in line)


def test_tiles_and_scalars_are_printed_once_in_the_order_of_indices(tmp_path: Path):
    """Of every dtype; and lines of blocks that print at once stay whole."""
    done = run(tmp_path, SHOWN, " ".join(DTYPES))
    assert done.returncode == 0, done.stderr[-2000:]
    lines = done.stdout.splitlines()
    head, each = "block (1, 0, 0) ", 14
    for n, dtype in enumerate(DTYPES):
        # fp8 e4m3 has four bits of precision: 17 is 16, 19 is 20
        number = (
            (lambda v: 1 - v % 2)
            if dtype == "bool"
            else (lambda v, d=dtype: int(torch.tensor(float(v)).to(getattr(torch, d)).float()))
        )
        row = lambda what, r, first, last: " ".join(str(number(8 * r + c)) for c in range(first, last))  # noqa: E731
        want = []
        for what in ("fragment", "shared"):
            want.append(f"{head}{tmp_path}/kernel.py:{line_of(chr(34) + what)}: {what} =")
            want += [f"{head}{what}[{r}, 0:8]: {row(what, r, 0, 8)}" for r in range(4)]
        want += [
            f"{head}{tmp_path}/kernel.py:{line_of(chr(34) + 'row')}: row =",
            f"{head}row[0:3]: {row('row', 1, 2, 5)}",
        ]
        want += [f"{head}{tmp_path}/kernel.py:{line_of(chr(34) + 'scalar')}: scalar = 42"]
        want += [f"{head}{tmp_path}/kernel.py:{line_of('words')}: words: 100 %"]
        assert lines[n * each : (n + 1) * each] == want, dtype
    rest = [line for line in lines[len(DTYPES) * each :] if not line.endswith("=")]
    assert sorted(rest) == sorted(
        f"block ({b}, 0, 0) a[{r}, {c}:{min(c + 16, 40)}]: {' '.join(str(40 * r + k) for k in range(c, min(c + 16, 40)))}"
        for b in range(8)
        for r in range(3)
        for c in (0, 16, 32)
    )


ASSERTS = """
@T.prim_func
def checked(A: T.Tensor((T.dynamic("n"),), "float32")):
    with T.Kernel(T.ceildiv(T.dynamic("n"), 64), 2, threads=64) as (bx, by):
        for i in T.Parallel(64):
            T.device_assert(A[bx * 64 + i] < 100.0, "too large")

a = torch.zeros(640, device="cuda")
f = tilescale.compile(checked, target="cuda")
f(a)
torch.cuda.synchronize()
a[64 * 3 + 5] = 1000.0
f(a)
"""
TEXT = "/kernel.py:10: checked: block (3, "


def test_the_line_of_a_failed_assertion_is_raised_when_the_gpu_is_awaited(tmp_path: Path):
    done = run(
        tmp_path,
        ASSERTS
        + """
from tilescale.cuda import synchronize
for call in (synchronize, lambda: f(a)):
    try:
        call()
    except tilescale.TileError as error:
        print(type(error).__name__, error)
""",
    )
    assert done.stdout.count("LaunchError ") == 2 and done.stdout.count(TEXT) == 2, (
        done.stdout + done.stderr[-2000:]
    )
    assert (
        "thread 5: assert failed: too large" in done.stdout
        and 'T.device_assert(A[bx * 64 + i] < 100.0, "too large")' in done.stdout
    )
    assert "tilescale:" not in done.stderr, "told once"


def test_it_is_told_at_the_end_where_only_torch_met_it(tmp_path: Path):
    done = run(tmp_path, ASSERTS + "torch.cuda.synchronize()\n")
    assert done.returncode != 0 and "LaunchError: " in done.stderr and TEXT in done.stderr, done.stderr[
        -2000:
    ]


def test_an_assertion_in_a_kernel_of_hoppers_engines(tmp_path: Path):
    if torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("needs Hopper")
    done = run(
        tmp_path,
        """
@T.prim_func
def gemm(A: T.Tensor((512, 512), "bfloat16"), B: T.Tensor((512, 512), "bfloat16"), C: T.Tensor((512, 512), "bfloat16")):
    with T.Kernel(4, 4, threads=256) as (bx, by):
        a, b, acc = T.alloc_shared((128, 64), "bfloat16"), T.alloc_shared((64, 128), "bfloat16"), T.alloc_fragment((128, 128), "float32")
        T.clear(acc)
        for k in T.Pipelined(8, num_stages=4):
            T.copy(A[by * 128, k * 64], a)
            T.copy(B[k * 64, bx * 128], b)
            T.gemm(a, b, acc)
        for i, j in T.Parallel(128, 128):
            T.device_assert(acc[i, j] < 1e6, "overflow")
        T.copy(acc, C[by * 128, bx * 128])

from tilescale.cuda import synchronize
a, b, c = (torch.ones(512, 512, device="cuda", dtype=torch.bfloat16) for _ in range(3))
f = tilescale.compile(gemm, target="cuda")
f(a, b, c)
synchronize()
assert bool((c == 512).all())
a[300] = 1e5
f(a, b, c)
try:
    synchronize()
except tilescale.TileError as error:
    print(error)
""",
    )
    assert (
        "kernel.py:16: gemm: block (" in done.stdout
        and ", 2, 0), thread" in done.stdout
        and "overflow" in done.stdout
    ), done.stdout + done.stderr[-2000:]


def test_a_wait_within_a_block_ends_by_the_limit(tmp_path: Path):
    done = run(
        tmp_path,
        """
import os
os.environ["TILESCALE_WAIT_TIMEOUT"] = "1"
from tilescale.cuda import synchronize

@T.prim_func
def waiting(awaited: T.int64, B: T.Tensor((64,), "float32")):
    with T.Kernel(1, threads=64):
        s = T.alloc_signal((2,))
        T.signal(s[1])
        T.wait(s[1], awaited)
        T.fill(B, 1.0)

b = torch.zeros(64, device="cuda")
f = tilescale.compile(waiting, target="cuda")
f(1, b)
synchronize()
print(int(b.sum()))
f(2, b)
try:
    synchronize()
except tilescale.TileError as error:
    print(error)
""",
    )
    assert "64\n" in done.stdout and "kernel.py:15: waiting: block (0, 0, 0)" in done.stdout, (
        done.stdout + done.stderr[-2000:]
    )
    assert "T.wait for s took longer than TILESCALE_WAIT_TIMEOUT" in done.stdout


def test_an_exported_kernel(tmp_path: Path):
    path = tilescale.compile(add, target="cuda").export(tmp_path / "add.tsk")
    done = run(
        tmp_path,
        f"""
import sys
run = tilescale.load({str(path)!r})
a, b = torch.randn(5000, device="cuda"), torch.randn(5000, device="cuda")
c = torch.empty_like(a)
run(a, b, c)
assert torch.equal(c, a + b) and "tvm" not in sys.modules
print("well")
""",
    )
    assert done.stdout == "well\n", done.stderr[-2000:]
