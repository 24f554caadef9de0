"""Exported kernels: one file that runs in a process without TVM and without compilers, and is refused where
it does not fit."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tilescale
import tilescale.language as T
from tests.kernels import refused
from tests.unit.cuda.test_launcher import driver, needs_nvcc  # noqa: F401  # driver is a fixture
from tilescale import cuda, devices, export, native
from tilescale.errors import TileError, TileTypeError, TileValueError

N = T.dynamic("n")


@T.prim_func
def scaled(A: T.Tensor((N, 8), "float32"), by: T.float32, B: T.Tensor((N, 8), "float32")):
    with T.Kernel(T.ceildiv(N, 16), threads=64) as bx:
        for i, j in T.Parallel(16, 8):
            B[bx * 16 + i, j] = A[bx * 16 + i, j] * by


@tilescale.jit
def doubled(A: T.Tensor((N,), "float32")):
    B = T.empty((N,), "float32")
    with T.Kernel(T.ceildiv(N, 32), threads=32) as bx:
        for i in T.Parallel(32):
            B[bx * 32 + i] = A[bx * 32 + i] * 2.0
    return B


#: run in the process that loads: TVM cannot be imported, and there is no program on the PATH
BARE = """
import sys

class NoTvm:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("tvm", "torch", "ml_dtypes"):
            raise ImportError(f"{name} is not installed here")

sys.meta_path.insert(0, NoTvm())
import shutil
assert not any(map(shutil.which, ("cc", "gcc", "clang", "nvcc", "ld"))), "a compiler is on the PATH"
import numpy as np
import tilescale
"""


@pytest.fixture
def bare(tmp_path: Path, clean_env: dict[str, str]) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Runs code in such a process, with a cache of its own."""
    empty = tmp_path / "no programs"
    empty.mkdir()

    def run(code: str, **more: str) -> subprocess.CompletedProcess[str]:
        env = (
            clean_env
            | {"PATH": str(empty), "TILESCALE_CACHE_DIR": str(tmp_path / "cache"), "CUDA_HOME": "", "CC": ""}
            | more
        )
        return subprocess.run(
            [sys.executable, "-c", BARE + code], env=env, capture_output=True, text=True, timeout=60
        )

    return run


def test_a_kernel_runs_without_tvm_and_without_compilers(tmp_path: Path, bare: Any):
    path = tilescale.compile(scaled, out_idx=-1, target="cpu").export(tmp_path / "scaled.tsk")
    done = bare(f"""
run = tilescale.load({str(path)!r})
a = np.arange(40 * 8, dtype="float32").reshape(40, 8)
assert (run(a, 3.0) == a * 3).all() and run.symbols == ["n"] and run.inputs == ["A", "by"]
try:
    run(a[:, :7].copy(), 3.0)
except tilescale.TileError as error:
    print(error)
try:
    run.get_kernel_source("tile")
except tilescale.TileError as error:
    print(error)
print([m for m in sys.modules if m == "tvm" or m.startswith("tvm.")])
""")
    assert done.returncode == 0, done.stderr[-2000:]
    assert "axis 1 of A has extent 7" in done.stdout and 'A: T.Tensor((N, 8), "float32")' in done.stdout
    assert "holds its code and not its program" in done.stdout and done.stdout.endswith("[]\n")


def test_an_eager_kernel_keeps_what_it_allocates(tmp_path: Path):
    a = np.arange(100, dtype="float32")
    made = doubled.compile(a)
    run = tilescale.load(made.export(tmp_path / "doubled.tsk"))
    assert (run(a) == a * 2).all() and (run.out_idx, run.returns, run.label) == (
        made.out_idx,
        made.returns,
        made.label,
    )


def test_a_file_serves_where_the_cache_cannot_be_written(tmp_path: Path, bare: Any):
    path = tilescale.compile(scaled, target="cpu").export(tmp_path / "scaled.tsk")
    (tmp_path / "file").write_text("")
    done = bare(
        f"a = np.ones((3, 8), 'float32'); b = a * 0; tilescale.load({str(path)!r})(a, 2.0, b); print(b.sum())",
        TILESCALE_CACHE_DIR=str(tmp_path / "file"),
    )
    assert done.stdout == "48.0\n" and done.stderr.count("is not used") == 1, done.stderr


@T.prim_func
def shifted(A: T.Tensor((64,), "float32"), B: T.SymmTensor((64,), "float32")):
    with T.Kernel(1, threads=64), T.Scale("device") as (me, world):
        T.copy(A, B, dst=(me + 1) % world)


def test_ranks_load_it_before_they_meet(tmp_path: Path, tilescale_launch: Any):
    """The ranks' runtime is the one that the file carries."""
    path = tilescale.compile(shifted, target="cpu").export(tmp_path / "shifted.tsk")
    (tmp_path / "empty").mkdir()
    (tmp_path / "job.py").write_text(
        BARE
        + f"""
from tilescale import comm
run = tilescale.load({str(path)!r})
comm.init()
out = comm.empty((64,), "float32", like="numpy")
run(np.full(64, comm.rank() + 1, "float32"), out)
print("got", out[0], out[63])
"""
    )
    done = tilescale_launch(
        2,
        tmp_path / "job.py",
        env={"PATH": str(tmp_path / "empty"), "TILESCALE_CACHE_DIR": str(tmp_path / "cache"), "CC": ""},
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert sorted(line[line.index("got") :] for line in done.stdout.splitlines() if "got" in line) == [
        "got 1.0 1.0",
        "got 2.0 2.0",
    ]


@needs_nvcc
def test_a_cuda_kernel_is_launched_without_a_compiler(tmp_path: Path, bare: Any, driver: Path):  # noqa: F811
    """Against the driver that only remembers; the arguments say that they lie on a GPU."""
    path = tilescale.compile(scaled, target="cuda:sm_90a").export(tmp_path / "scaled.tsk")
    done = bare(
        f"""
import ctypes
run = tilescale.load({str(path)!r})
assert run.arch == "sm_90a" and "__global__" in run.get_kernel_source() and run.resources["registers"] > 0
a = np.ones((40, 8), "float32")
try:
    run(a, 2.0, a.copy())
except tilescale.TileError as error:
    print(error.message)
fake = ctypes.CDLL("libcuda.so.1")
print((ctypes.c_int64 * 2).in_dll(fake, "fake")[0])
""",
        LD_LIBRARY_PATH=os.pathsep.join([str(driver), os.environ.get("LD_LIBRARY_PATH", "")]),
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.splitlines() == [
        "scaled: A is on cpu, and the kernel is compiled for the cuda target",
        "0",
    ]


@needs_nvcc
def test_a_cuda_kernel_for_another_gpu_is_refused(tmp_path: Path, bare: Any, driver: Path):  # noqa: F811
    path = tilescale.compile(scaled, target="cuda:sm_80").export(tmp_path / "scaled.tsk")
    done = bare(
        f"tilescale.load({str(path)!r})",
        LD_LIBRARY_PATH=os.pathsep.join([str(driver), os.environ.get("LD_LIBRARY_PATH", "")]),
    )
    assert "scaled.tsk is compiled for sm_80, and this machine's GPU is sm_90" in done.stderr
    assert 'write instead: target="cuda:sm_90" where it is compiled' in done.stderr


@pytest.mark.parametrize(
    "arch, gpu, runs",
    [
        ("sm_80", (8, 0), True), ("sm_80", (8, 6), True), ("sm_86", (8, 0), False), ("sm_80", (9, 0), False), ("sm_90", (9, 0), True),
        ("sm_90a", (9, 0), True), ("sm_90a", (10, 0), False), ("sm_100a", (10, 0), True), ("sm_100a", (10, 3), False), ("sm_100f", (10, 3), True),
    ],
)  # fmt: skip
def test_which_gpus_run_a_cubin(arch: str, gpu: tuple[int, int], runs: bool):
    assert cuda.runs_on(arch, *gpu) is runs


# ---- files that do not fit


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tilescale.compile(scaled, target="cpu").export(tmp_path_factory.mktemp("export") / "scaled.tsk")


def changed(file: Path, out: Path, change: Callable[[dict[str, Any], dict[str, bytes]], None]) -> Path:
    with zipfile.ZipFile(file) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    head = json.loads(members.pop(export.HEAD))
    change(head, members)
    with zipfile.ZipFile(out, "w") as archive:
        archive.writestr(export.HEAD, json.dumps(head))
        for name, data in members.items():
            archive.writestr(name, data)
    return out


def test_a_damaged_file_is_refused(file: Path, tmp_path: Path):
    whole, out = file.read_bytes(), tmp_path / "damaged.tsk"
    for data in (b"", b"not a kernel at all", whole[: len(whole) // 2], whole[:-10]):
        out.write_bytes(data)
        with refused(TileValueError, "damaged.tsk is damaged, or no exported kernel"):
            tilescale.load(out)
    named = 0
    for at in range(100, len(whole), len(whole) // 40):  # a byte anywhere
        out.write_bytes(whole[:at] + bytes([whole[at] ^ 0x55]) + whole[at + 1 :])
        try:
            tilescale.load(out)  # a file's time in the archive, say, means nothing
        except TileValueError as error:
            named += "damaged.tsk is damaged" in str(error)
    assert named >= 35
    changed(file, out, lambda head, members: members.update({export.CODE: members[export.CODE] + b"x"}))
    with refused(TileValueError, "kernel.bin is not what was written"):
        tilescale.load(out)
    with refused(TileValueError, "there is no file"):
        tilescale.load(tmp_path / "none.tsk")


@pytest.mark.parametrize(
    "change, text",
    [
        (lambda h, m: h.update(format=2), "has format 2 of exported kernels"),
        (lambda h, m: h["needs"].update(machine="riscv64"), "is for riscv64, and this machine is"),
        (
            lambda h, m: h["needs"].update(runtime="apache-tvm-ffi-0.0.1 abc"),
            "apache-tvm-ffi-0.0.1, whose launcher is another",
        ),
        (
            lambda h, m: h["needs"].update(instructions=["avx9000"]),
            "uses instructions that this processor lacks: avx9000",
        ),
    ],
)
def test_a_file_for_something_else_is_refused(file: Path, tmp_path: Path, change: Any, text: str):
    with refused(TileValueError, text):
        tilescale.load(changed(file, tmp_path / "other.tsk", change))


def test_the_simulator_has_nothing_to_export(tmp_path: Path):
    with refused(TileTypeError, "there is no code to export"):
        tilescale.compile(scaled, target="sim").export(tmp_path / "sim.tsk")
    assert not list(tmp_path.iterdir())


def test_code_that_the_cache_dropped(tmp_path: Path):
    made = tilescale.compile(scaled, target="cpu", name="dropped")
    object.__setattr__(made.entry, "path", str(tmp_path / "gone"))
    with refused(TileError, "the code of scaled is no longer at"):
        made.export(tmp_path / "scaled.tsk")


def test_what_processors_are_asked_for():
    needed = devices.of("cpu").instructions()
    assert needed and not needed & {"constant_tsc", "hypervisor", "lm", "cpuid"}
    assert native.runtime_version().startswith("apache-tvm-ffi-")
