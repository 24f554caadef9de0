"""The disk cache: what makes a kernel compile anew and what does not, damage, concurrency, eviction, warm
starts without TVM."""

from __future__ import annotations

import gc
import hashlib
import importlib
import json
import os
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import tilescale
import tilescale.language as T
from tilescale import cache, env

# so that other processes, whose environment says nothing of it, take the same kernels
pytestmark = pytest.mark.optimised

KERNEL = """
import tilescale, tilescale.language as T
from helper import combine, CONFIG
import helper

OFFSET = 1

@tilescale.jit(out_idx=-1)
def shift(n, factor=2):
    local = factor * 10

    def inner(x):
        return combine(x) + local

    @T.prim_func
    def main(A: T.Tensor((n,), "float32"), B: T.Tensor((n,), "float32")):
        with T.Kernel(1):
            for i in T.Parallel(n):
                B[i] = inner(A[i]) + OFFSET + helper.extra(0) + CONFIG.bias + helper.LEVEL

    return main

@tilescale.jit
def eager(A, plus: int = 0):
    N = T.const("N")
    A: T.Tensor((T.dynamic("m"), N), T.float32)
    B = T.empty((T.dynamic("m"), N), T.float32)
    with T.Kernel(T.dynamic("m")) as bx:
        for i in T.Parallel(N):
            B[bx, i] = A[bx, i] + OFFSET + plus
    return B
"""
HELPER = """
from dataclasses import dataclass

LEVEL = 100

@dataclass(frozen=True)
class Config:
    bias: float = 0.5

CONFIG = Config()

def deep(x):
    return x * 2

def combine(x):
    return deep(x)

def extra(x):
    return x

def unrelated(x):
    return x
"""
RUN = """
import sys
sys.path.insert(0, {folder!r})
import torch
import model
kernel = model.shift(4)
value = kernel(torch.ones(4))[0].item()
eager = model.eager.compile(torch.ones(2, 4)).from_cache
print(kernel.from_cache, value, eager, "tvm" in sys.modules)
"""


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache (with the runtime that is built already), and a folder for sources beside it."""
    native = env.CACHE_DIR.get() / "native"
    native.mkdir(parents=True, exist_ok=True)
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / "native").symlink_to(native)
    monkeypatch.setenv("TILESCALE_CACHE_DIR", str(tmp_path / "cache"))
    (tmp_path / "model.py").write_text(KERNEL)
    (tmp_path / "helper.py").write_text(HELPER)
    return tmp_path


Call = tuple[int, int, int]


class Fresh:
    """The sources as a process that has just started sees them."""

    def __init__(self, place: Path, monkeypatch: pytest.MonkeyPatch):
        self.place = place
        monkeypatch.syspath_prepend(str(place))
        monkeypatch.setattr(sys, "dont_write_bytecode", True)

    def model(self) -> Any:
        for name in ("model", "helper"):
            sys.modules.pop(name, None)
        importlib.invalidate_caches()
        return importlib.import_module("model")

    def shift(self) -> tuple[bool, float]:
        """Whether the kernel came from the disk, and what it computes."""
        kernel = self.model().shift(4)
        return kernel.from_cache, kernel(np.ones(4, "float32"))[0]

    def eager(self, calls: list[Call]) -> list[tuple[bool, float]]:
        model = self.model()
        arrays = [(np.ones((rows, columns), "float32"), plus) for rows, columns, plus in calls]
        values = [model.eager(a, plus)[0, 0] for a, plus in arrays]
        return [
            (model.eager.compile(a, plus).from_cache, value)
            for (a, plus), value in zip(arrays, values, strict=True)
        ]


@pytest.fixture
def fresh(place: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Fresh]:
    yield Fresh(place, monkeypatch)
    for name in ("model", "helper"):
        sys.modules.pop(name, None)


def entries(place: Path) -> list[Path]:
    return sorted(
        p
        for p in (place / "cache" / "kernels").iterdir()
        if p.is_dir() and not p.name.startswith(".") and p.name != "locks"
    )


def replace(path: Path, data: bytes) -> None:
    """A new file: the old one is mapped by the kernels of this process."""
    path.unlink()
    path.write_bytes(data)


def edit(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert text.count(old) == 1
    path.write_text(text.replace(old, new))


BASE = 1 * 2 + 20 + 1 + 0 + 0.5 + 100


def test_a_new_process_takes_the_kernel_without_tvm(place: Path, fresh: Fresh, clean_env: dict[str, str]):
    assert fresh.shift() == (False, BASE)
    fresh.eager([(3, 4, 0)])
    environ = {**clean_env, "TILESCALE_CACHE_DIR": str(place / "cache")}
    done = subprocess.run(
        [sys.executable, "-c", RUN.format(folder=str(place))],
        env=environ,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.stdout.split() == ["True", str(BASE), "True", "False"], done.stderr
    for entry in entries(place):
        assert sorted(p.name for p in entry.iterdir()) == ["kernel.bin", "kernel.json"]


@pytest.mark.parametrize(
    ("file", "old", "new", "value"),
    [
        ("model.py", "+ OFFSET + helper", "+ OFFSET * 2 + helper", BASE + 1),  # the kernel itself
        ("model.py", "OFFSET = 1", "OFFSET = 3", BASE + 2),  # a global
        ("model.py", "factor * 10", "factor * 20", BASE + 20),  # what a nested helper captures
        ("model.py", "factor=2", "factor=3", BASE + 10),  # a default
        ("model.py", "combine(x) + local", "combine(x) - local", BASE - 40),  # a nested helper
        (
            "helper.py",
            "return x * 2",
            "return x * 3",
            BASE + 1,
        ),  # a function that a helper of another module calls
        (
            "helper.py",
            "def extra(x):\n    return x",
            "def extra(x):\n    return x + 7",
            BASE + 7,
        ),  # by a module's attribute
        ("helper.py", "LEVEL = 100", "LEVEL = 101", BASE + 1),
        ("helper.py", "bias: float = 0.5", "bias: float = 0.25", BASE - 0.25),  # inside an object
    ],
)
def test_what_changes_the_kernel_compiles_it_anew(
    place: Path, fresh: Fresh, file: str, old: str, new: str, value: float
):
    fresh.shift()
    edit(place / file, old, new)
    assert fresh.shift() == (False, value)
    assert fresh.shift() == (True, value)
    edit(place / file, new, old)
    assert fresh.shift() == (True, BASE)  # the first one is still there


def test_what_does_not_change_the_kernel_does_not(place: Path, fresh: Fresh):
    fresh.shift()
    edit(place / "helper.py", "def unrelated(x):\n    return x", "def unrelated(x):\n    return x + 1")
    with open(place / "model.py", "a") as f:
        f.write("\n\nSOMETHING = 3\n")
    (place / "model.py").touch()
    assert fresh.shift() == (True, BASE)


def test_the_place_in_the_file_counts(place: Path, fresh: Fresh):
    """Errors of a cached kernel name lines."""
    fresh.shift()
    (place / "model.py").write_text("\n" + KERNEL)
    assert fresh.shift() == (False, BASE)


def test_an_error_of_a_librarys_kernel_names_its_own_line(place: Path, clean_env: dict[str, str]):
    """Two programs share the library's kernel, so no line of either may lie in the cache with it."""
    text = """
import torch
from tilescale import comm, ops

comm.init()
ops.all_to_all(torch.zeros(4, 8), torch.tensor([4]), rows=2, how="kernel")
"""
    environ = {**clean_env, "TILESCALE_CACHE_DIR": str(place / "cache"), "TILESCALE_LOG": "info"}
    said = []
    for name in ("first", "second"):
        (place / f"{name}.py").write_text(text)
        call = [sys.executable, str(place / f"{name}.py")]
        said.append(subprocess.run(call, env=environ, capture_output=True, text=True, timeout=120).stderr)
    assert "compiled exchange(" in said[0] and "compiled" not in said[1]  # else nothing is shared
    for stderr in said:
        refused = stderr[stderr.index("LaunchError: ") :]
        assert "exchange_kernels.py:" in refused and "device_assert(here" in refused, refused
    assert "first.py" not in said[1]


def test_eager_kernels_start_warm(place: Path, fresh: Fresh):
    calls = [(3, 4, 0), (5, 4, 0), (3, 8, 0), (3, 4, 6)]
    assert fresh.eager(calls) == [(False, 2), (False, 2), (False, 2), (False, 8)]
    assert len(entries(place)) == 3  # the number of rows is dynamic
    assert fresh.eager(calls) == [(True, 2), (True, 2), (True, 2), (True, 8)]
    assert fresh.eager([(9, 4, 0), (1, 8, 0)]) == [(True, 2), (True, 2)]  # rows that were never seen
    edit(place / "model.py", "OFFSET = 1", "OFFSET = 3")
    assert fresh.eager(calls) == [(False, 4), (False, 4), (False, 4), (False, 10)]


def test_an_annotation_inside_the_body_counts(place: Path, fresh: Fresh):
    """It decides what is baked in, and it is nowhere in the bytecode."""
    assert fresh.eager([(3, 4, 0), (5, 4, 0)]) == [(False, 2), (False, 2)] and len(entries(place)) == 1
    edit(
        place / "model.py",
        '    A: T.Tensor((T.dynamic("m"), N), T.float32)',
        '    A: T.Tensor((T.const("m"), N), T.float32)',
    )
    with pytest.raises(tilescale.TileError):  # the output's rows are dynamic still
        fresh.eager([(3, 4, 0)])
    edit(
        place / "model.py",
        '    A: T.Tensor((T.const("m"), N), T.float32)',
        '    A: T.Tensor((T.dynamic("m"), N), T.float16)',
    )
    with pytest.raises(tilescale.TileError, match="A is of float32"):
        fresh.eager([(3, 4, 0)])


@pytest.mark.parametrize(
    "damage", ["no code", "half the code", "other code", "no json", "half the json", "another kernel's json"]
)
def test_a_damaged_entry_is_rebuilt(
    place: Path, fresh: Fresh, damage: str, capfd: pytest.CaptureFixture[str]
):
    fresh.shift()
    (entry,) = entries(place)
    code, meta = entry / "kernel.bin", entry / "kernel.json"
    if damage == "no code":
        code.unlink()
    elif damage == "half the code":
        replace(code, code.read_bytes()[:2000])
    elif damage == "other code":
        replace(code, code.read_bytes().replace(b"ts_block", b"ts_clock"))
    elif damage == "no json":
        meta.unlink()
    elif damage == "half the json":
        meta.write_text(meta.read_text()[:100])
    else:
        meta.write_text(json.dumps({"code": 1}))
    assert fresh.shift() == (False, BASE)
    assert ("is damaged" in capfd.readouterr().err) == (damage != "no json")
    assert fresh.shift() == (True, BASE)


def test_code_that_does_not_load_is_rebuilt(place: Path, fresh: Fresh, capfd: pytest.CaptureFixture[str]):
    """Sound by its hash, and yet not loadable: a file system or an architecture that changed."""
    fresh.shift()
    (entry,) = entries(place)
    # While this process holds the library, the loader would give it again by its name.
    sys.modules.pop("model")
    gc.collect()
    bad = b"not an object"
    replace(entry / "kernel.bin", bad)
    held = json.loads((entry / "kernel.json").read_text())
    (entry / "kernel.json").write_text(
        json.dumps({**held, "code": hashlib.blake2b(bad, digest_size=16).hexdigest()})
    )
    assert fresh.shift() == (False, BASE)
    assert "does not load" in capfd.readouterr().err
    assert fresh.shift() == (True, BASE)


def test_processes_that_start_together_compile_once(place: Path, clean_env: dict[str, str]):
    code = (
        RUN.format(folder=str(place))
        .replace("import torch\n", "import numpy\n")
        .replace("torch.ones(", "numpy.ones(")
    )
    code = code.replace("numpy.ones(4)", "numpy.ones(4, 'float32')").replace(
        "numpy.ones(2, 4)", "numpy.ones((2, 4), 'float32')"
    )
    environ = {**clean_env, "TILESCALE_CACHE_DIR": str(place / "cache"), "TILESCALE_LOG": "info"}
    jobs = [
        subprocess.Popen(
            [sys.executable, "-c", code],
            env=environ,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for _ in range(3)
    ]
    ends = [job.communicate(timeout=120) for job in jobs]
    assert all(job.returncode == 0 for job in jobs), ends
    for name, column in (("shift(", 0), ("eager(", 2)):
        assert sum(f"compiled {name}" in err for _, err in ends) == 1, ends
        assert sorted(out.split()[column] for out, _ in ends) == ["False", "True", "True"]


def test_a_failed_build_leaves_nothing_and_is_told_each_time(place: Path):
    @T.prim_func
    def wrong(A: T.Tensor((4,), "float32")):
        with T.Kernel(1):
            s = T.alloc_shared((4,), "float32")
            s[7] = 0.0
            A[0] = s[0]

    for _ in range(2):
        with pytest.raises(tilescale.TileError, match="outside"):
            tilescale.compile(wrong)
    assert entries(place) == [] and [p.name for p in (place / "cache" / "kernels").iterdir()] == ["locks"]


def test_what_cannot_be_hashed_is_compiled_in_each_process(
    place: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("TILESCALE_LOG", "info")
    table = torch.tensor([3.0, 4.0])

    @T.prim_func
    def uses(A: T.Tensor((2,), "float32")):
        with T.Kernel(1):
            A[0] = table[0].item()

    for _ in range(2):
        kernel = tilescale.compile(uses)
        a = torch.zeros(2)
        kernel(a)
        assert a[0] == 3 and not kernel.from_cache
    assert entries(place) == [] if (place / "cache" / "kernels").exists() else True
    err = capfd.readouterr().err
    assert (
        err.count("uses is not cached on disk: table is a torch.Tensor") == 1
        and err.count("compiled uses") == 2
    )


def test_dumps_are_made_also_for_kernels_that_are_cached(place: Path, monkeypatch: pytest.MonkeyPatch):
    @T.prim_func
    def dumped(A: T.Tensor((2,), "float32")):
        with T.Kernel(1):
            A[0] = 1

    tilescale.compile(dumped)
    assert tilescale.compile(dumped).from_cache
    monkeypatch.setenv("TILESCALE_DUMP", str(place / "dump"))
    assert not tilescale.compile(dumped).from_cache
    assert any("schedule" in p.name for p in (place / "dump").iterdir())


def fake(key: str, size: int, age: float) -> None:
    """An entry of so many bytes that was last used so long ago."""

    def build(path: str) -> tuple[dict, list[int], list[str]]:
        Path(path).write_bytes(bytes(size))
        return {}, [], []

    with cache.locked(key):
        cache.store(key, build, "fake")
    then = time.time() - age
    os.utime(cache.folder() / key / "kernel.json", (then, then))


def test_the_kernels_not_used_for_longest_go_first(place: Path):
    keys = [f"{k:032x}" for k in range(5)]
    for k, key in enumerate(keys):
        fake(key, 10_000, age=100 * (k + 1))
    assert cache.sweep(limit=1 << 20) == 0
    assert cache.lookup(keys[4]) is not None  # the oldest is used again
    assert cache.sweep(limit=25_000) == 3
    assert sorted(p.name for p in entries(place)) == [keys[0], keys[4]]
    assert cache.sweep(limit=1) == 2 and entries(place) == []


def test_the_limit_is_kept_when_kernels_are_stored(place: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TILESCALE_CACHE_SIZE", "30K")
    monkeypatch.setattr(cache, "_SWEEP_EVERY", 1)
    for k in range(8):
        fake(f"{k:032x}", 10_000, age=1000 - k)
    assert len(entries(place)) <= 3 and f"{7:032x}" in {p.name for p in entries(place)}


def test_remains_of_killed_processes_are_swept(place: Path):
    folder = cache.folder()
    for name, age in ((".new-old", 7200), (".gone-old", 7200), (".new-young", 60)):
        (folder / name).mkdir()
        (folder / name / "kernel.bin").write_bytes(b"x")
        os.utime(folder / name, (time.time() - age,) * 2)
    cache.sweep(limit=1 << 20)
    assert [p.name for p in folder.iterdir() if p.name.startswith(".")] == [".new-young"]


def test_another_tilescale_never_meets_this_ones_kernels(place: Path, monkeypatch: pytest.MonkeyPatch):
    from tilescale import build, fingerprint

    def key() -> str | None:
        return build.key_of("x", 1)

    before = key()
    assert before == key() and before != build.key_of("x", 2)
    for name in ("sources", "processor"):
        with monkeypatch.context() as patch:
            patch.setattr(fingerprint, name, lambda: "another")
            assert key() != before


def test_sources_are_hashed_by_content(tmp_path: Path):
    code = textwrap.dedent(
        """
        from pathlib import Path
        import sys
        from tilescale import fingerprint
        folder = Path(sys.argv[1])
        (folder / "a").mkdir()
        for name in ("a/x.py", "y.py", "z.txt"):
            (folder / name).write_text(name)
        print(sorted(p[len(str(folder)):] for p in fingerprint._python_files(folder)))
        """
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": os.getcwd()},
    )
    assert done.stdout.strip() == "['/a/x.py', '/y.py']", done.stderr
