"""Building the C runtime: once for many processes, under a key of all that decides it, and what is said
without a compiler."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from tilescale.errors import TileError
from tilescale.native import build

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TILESCALE_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache" / "native"


@pytest.fixture
def counting_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A compiler that notes each use in the file that this returns. It optimises nothing, in a third of the time."""
    log, real = tmp_path / "uses", build.compiler()[0]
    wrapper = tmp_path / "cc-counted"
    wrapper.write_text(
        f'#!/bin/sh\ncase "$*" in *--version*) ;; *) echo x >> {log};; esac\nexec {real} "$@" -O0\n'
    )
    wrapper.chmod(wrapper.stat().st_mode | stat.S_IEXEC)
    monkeypatch.setenv("TILESCALE_CC", str(wrapper))
    return log


def test_without_a_compiler_the_error_says_what_to_install(
    empty_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TILESCALE_CC", raising=False)
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(TileError, match="found no C compiler") as e:
        build.library_path()
    assert "apt-get install gcc" in str(e.value) and "TILESCALE_CC" in str(e.value)
    monkeypatch.setenv("TILESCALE_CC", "nosuchcc -O2")
    with pytest.raises(TileError, match="nosuchcc -O2 .* is no program on this machine"):
        build.library_path()


def test_a_compiler_that_fails_is_quoted_and_leaves_nothing(
    empty_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bad = tmp_path / "badcc"
    bad.write_text('#!/bin/sh\necho "fatal: no stdint.h" >&2\nexit 1\n')
    bad.chmod(0o755)
    monkeypatch.setenv("TILESCALE_CC", str(bad))
    with pytest.raises(TileError, match="(?s)did not compile.*fatal: no stdint.h"):
        build.library_path()
    assert [p.name for p in empty_cache.iterdir()] == ["build.lock"]


def test_processes_that_start_together_build_once(empty_cache: Path, counting_compiler: Path) -> None:
    code = "from tilescale.native import build; print(build.library_path())"
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    jobs = [
        subprocess.Popen([sys.executable, "-c", code], env=env, stdout=subprocess.PIPE, text=True)
        for _ in range(4)
    ]
    paths = {j.communicate(timeout=120)[0].strip() for j in jobs}
    assert all(j.returncode == 0 for j in jobs)
    assert len(paths) == 1 and Path(paths.pop()).exists()
    assert counting_compiler.read_text() == "x\n"
    assert build.library_path().exists() and counting_compiler.read_text() == "x\n"


def test_the_key_follows_flags_compiler_and_sources(monkeypatch: pytest.MonkeyPatch) -> None:
    keys = [build._key(["cc"])]
    keys.append(build._key(["cc", "-g"]))
    monkeypatch.setattr(build, "FLAGS", (*build.FLAGS, "-DX"))
    keys.append(build._key(["cc"]))
    monkeypatch.setattr(build, "SOURCES", build.SOURCES[:-1])
    keys.append(build._key(["cc"]))
    monkeypatch.setattr(build, "_programs", lambda command: "another")
    keys.append(build._key(["cc"]))
    assert len(set(keys)) == 5


@pytest.mark.parametrize("damage", ["truncated", "changed", "without its sum", "writable"])
def test_a_damaged_runtime_is_built_again(
    empty_cache: Path, counting_compiler: Path, capsys: pytest.CaptureFixture[str], damage: str
) -> None:
    path = build.library_path()
    code = path.read_bytes()
    if damage == "truncated":
        path.write_bytes(code[: len(code) // 3])
    elif damage == "changed":
        path.write_bytes(code[:-1] + bytes([code[-1] ^ 1]))
    elif damage == "writable":
        path.chmod(0o777)
    else:
        path.with_suffix(".sum").unlink()
    again = build.library_path()
    assert again == path and len(path.read_bytes()) == len(code) and counting_compiler.read_text() == "x\nx\n"
    assert capsys.readouterr().err.count("is built again") == (damage != "without its sum")  # said once
    assert build.library_path() == path and counting_compiler.read_text() == "x\nx\n"


def test_imports_are_light() -> None:
    """Neither torch nor tvm_ffi nor NumPy is imported by the imports, nor torch for the first kernel's
    sake."""
    code = """
import sys
import tilescale.comm, tilescale.native
assert not {"torch", "tvm_ffi", "numpy"} & set(sys.modules), "heavy imports"
tilescale.native.library()
assert "tvm_ffi" not in sys.modules
tilescale.native.import_tvm_ffi()
assert "torch" not in sys.modules
"""
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def test_the_other_way_round_torch_is_not_hidden() -> None:
    code = "from tilescale import native; native.import_tvm_ffi(); import torch; print(torch.ones(2).sum().item())"
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() == "2.0", done.stderr
