"""Where compiled code is kept: caches that cannot be written, shared ones, and what others may have put into
them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.runtime import with_runtime
from tilescale import cache, folders
from tilescale.native import build

ROOT = Path(__file__).resolve().parents[2]
OTHER = 54321  # a user that is not this one, nor root

KERNEL = """
import numpy as np, os, sys
import tilescale, tilescale.language as T
from tilescale import native

@tilescale.jit
def twice(N):
    @T.prim_func
    def main(A: T.Tensor((N,), "float32"), B: T.Tensor((N,), "float32")):
        with T.Kernel(1):
            for i in T.Parallel(N):
                B[i] = 2 * A[i]
    return main

@tilescale.jit
def eager(A):
    N = T.const("N")
    A: T.Tensor((N,), "float32")
    B = T.empty((N,), "float32")
    with T.Kernel(1):
        for i in T.Parallel(N):
            B[i] = 2 * A[i]
    return B

for argument in sys.argv[1:]:  # root becomes somebody who owns nothing here, nor reads Python's own files: all is loaded before
    shared, os.environ["TILESCALE_CACHE_DIR"] = os.environ["TILESCALE_CACHE_DIR"], os.getcwd() + "/first"
    twice(5)(np.ones(5, "float32"), np.zeros(5, "float32"))
    os.environ["TILESCALE_CACHE_DIR"] = shared
    os.seteuid(int(argument))
kernel, b = twice(4), np.zeros(4, "float32")
kernel(np.ones(4, "float32"), b)
assert (b == 2).all() and (eager(b) == 4).all()
print(kernel.from_cache, native.library_path())
"""


def run(tmp_path: Path, folder: Path, *user: str, text: str = KERNEL) -> tuple[list[str], list[str]]:
    """What it prints, and the warnings."""
    script = tmp_path / "kernel.py"
    script.write_text(text)
    env = {**os.environ, "PYTHONPATH": str(ROOT), "TILESCALE_CACHE_DIR": str(folder)}
    command = [sys.executable, str(script), *user]
    done = subprocess.run(command, env=env, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout.split(), [line for line in done.stderr.splitlines() if "warning" in line]


def test_a_cache_that_cannot_be_made_is_replaced_by_one_of_the_process(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    (cached, runtime), warnings = run(tmp_path, tmp_path / "file")
    assert cached == "False" and not Path(runtime).exists()  # it has gone with its process
    assert (
        len(warnings) == 1 and "is not used" in warnings[0] and "cannot be made: File exists" in warnings[0]
    )


def test_a_shared_cache_is_read_by_who_cannot_write_it(tmp_path: Path) -> None:
    """As root the user is changed, which needs no file of this test's to be theirs; any other user takes the
    right from itself."""
    shared, user = tmp_path / "shared", [str(OTHER)] if os.geteuid() == 0 else []
    with_runtime(tmp_path / "first")  # of the process that becomes another user
    for place in (tmp_path, *tmp_path.parents[:3]):
        if user:
            place.chmod(place.stat().st_mode | 0o055)
    assert run(tmp_path, shared)[0][0] == "False"
    if not user:
        for place in (shared, *(p for p in shared.rglob("*") if p.is_dir())):
            place.chmod(0o555)
    (cached, runtime), warnings = run(tmp_path, shared, *user)
    assert cached == "True" and runtime.startswith(str(shared)) and warnings == []
    (cached, runtime), warnings = run(tmp_path, shared, *user, text=KERNEL.replace("2 * A[i]", "A[i] + A[i]"))
    assert cached == "False" and runtime.startswith(str(shared))
    assert len(warnings) == 1 and "is not used" in warnings[0] and "cannot be written" in warnings[0]


@pytest.mark.parametrize("mode", [0o775, 0o777, 0o1777])
def test_a_folder_that_others_may_write_is_not_read(tmp_path: Path, mode: int) -> None:
    assert run(tmp_path, with_runtime(tmp_path / "cache"))[0][0] == "False"
    (tmp_path / "cache" / "kernels").chmod(mode)
    (cached, _), warnings = run(tmp_path, tmp_path / "cache")
    assert cached == "False" and len(warnings) == 1 and "others may write to it" in warnings[0]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
@pytest.mark.parametrize("what", [".", "kernels", "native"])
def test_what_belongs_to_another_is_not_loaded(tmp_path: Path, what: str) -> None:
    assert run(tmp_path, with_runtime(tmp_path / "cache"))[0][0] == "False"
    os.chown(tmp_path / "cache" / what, OTHER, OTHER)
    (cached, runtime), warnings = run(tmp_path, tmp_path / "cache")
    assert (cached == "True") == (what == "native") and runtime.startswith(str(tmp_path / "cache")) == (
        what == "kernels"
    )
    assert len(warnings) == 1 and f"it belongs to user {OTHER}" in warnings[0]


@pytest.mark.parametrize("part", ["kernel.bin", "kernel.json"])
def test_an_entry_that_others_may_write_is_built_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], part: str
) -> None:
    monkeypatch.setenv("TILESCALE_CACHE_DIR", str(tmp_path))
    key, built = "ab" * 16, []

    def make(path: str) -> tuple[dict[str, object], list[int], list[str]]:
        built.append(path)
        Path(path).write_bytes(b"code")
        return {}, [], []

    for _ in range(2):
        cache.get(key, make, "k")
    assert len(built) == 1
    (tmp_path / "kernels" / key / part).chmod(0o666)
    entry, cached = cache.get(key, make, "k")
    assert not cached and len(built) == 2 and "others may write to it" in capsys.readouterr().err
    assert cache.get(key, make, "k") == (entry, True)


def test_whatever_the_umask_others_write_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TILESCALE_CACHE_DIR", str(tmp_path / "cache"))
    before = os.umask(0)
    try:
        run(tmp_path, tmp_path / "cache")
    finally:
        os.umask(before)
    code = [
        p
        for p in (tmp_path / "cache").rglob("*")
        if p.name in ("kernel.bin", "kernel.json") or p.suffix == ".so" or p.is_dir()
    ]
    assert len(code) > 6 and not [p for p in code if folders.distrust(p.stat())]
    assert build.library_path().exists()
