"""`tilescale doctor`: runs anywhere, reads what tools print, and says what to install."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tilescale import env
from tilescale.launch import doctor, machine

# `nvidia-smi topo -m`: two GPUs by NVLink, a network card.
TOPOLOGY = (
    "\t\x1b[4mGPU0\tGPU1\tNIC0\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\x1b[0m\n"
    "GPU0\t X \tNV18\tPIX\t0-31\t0\t\tN/A\n"
    "GPU1\tNV18\t X \tSYS\t0-31\t0\t\tN/A\n"
    "NIC0\tPIX\tSYS\t X \t\t\t\t\n\nLegend:\n\n  X    = Self\n  NV#  = Connection traversing a bonded set of # NVLinks\n"
)
SMI = f"""#!{sys.executable}
import sys
if sys.argv[1].startswith("--query-gpu=name,memory.total,compute_cap,driver_version"):
    print("NVIDIA H200, 143771 MiB, 9.0, 580.159.04\\n" * 2, end="")
else:
    assert sys.argv[1:] == ["topo", "-m"]
    print({TOPOLOGY!r})
"""


def run(env: dict[str, str], *args: str) -> str:
    command = [sys.executable, "-m", "tilescale.launch", "doctor", *args]
    done = subprocess.run(
        command, env=env, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


def everything() -> dict[str, Any]:
    """A machine that lacks nothing."""
    names = (*machine.PACKAGES, "nvshmem4py-cu13", *machine.NVSHMEM, *machine.NCCL)
    packages = dict.fromkeys(names, "1") | {"apache-tvm": "2"}
    return {
        "system": {"architecture": "x86_64"},
        "memory": {"shm_free": 1 << 33, "shm_writable": True},
        "nvidia": {"gpus": [{"name": "a"}, {"name": "b"}]},
        "amd": {"gpus": [{"name": "gfx942"}]},
        "compilers": dict.fromkeys(("cc", "nvcc", "hipcc"), {"path": "/x", "version": "1"}),
        "libraries": {},
        "packages": packages | {"torch_cuda": "cuda 13.0", "pins": {"apache-tvm": "2"}},
        "mpiexec": {"path": "/x", "version": "1"},
    }


def test_for_people(clean_env: dict[str, str]):
    begin = time.monotonic()
    out = run(clean_env | {"TILESCALE_WAIT": "1", "TILESCALE_LOG": "info", "COLUMNS": "200"})
    assert time.monotonic() - begin < 10
    assert f"{sys.version_info[0]}.{sys.version_info[1]}." in out and sys.executable in out
    assert "TILESCALE_LOG=info" in out
    assert "TILESCALE_WAIT is set, but nothing reads it" in out
    for name, _, _ in doctor.FEATURES:
        assert name in out
    for var in env.ALL:  # with its value and meaning
        assert var.name in out and " ".join(var.doc.split()[:3]) in " ".join(out.split()), var.name
    assert "written, read and locked" in out and "Not tested: whether a GPU runs kernels" in out


def test_in_an_ascii_locale_everything_is_printed(clean_env: dict[str, str], tmp_path: Path):
    ascii_only = clean_env | {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "COLUMNS": "200"}
    assert "\\u2013" in run(ascii_only)
    script = tmp_path / "program.py"
    script.write_text("import sys\nprint(sys.stdout.encoding, sys.stdout.errors, sys.stderr.errors)\n")
    alone, rank = (
        subprocess.run(
            [sys.executable, *how, str(script)],
            env=ascii_only,
            capture_output=True,
            text=True,
            check=True,
            timeout=60,
        ).stdout
        for how in ((), ("-m", "tilescale", "launch", "-n", "1"))
    )
    assert rank == f"[0] {alone}"  # programs get the streams that Python makes


def test_the_cache_is_tried(clean_env: dict[str, str], tmp_path: Path):
    (tmp_path / "file").write_text("")
    facts = json.loads(
        run(
            clean_env | {"TILESCALE_CACHE_DIR": str(tmp_path / "file"), "TILESCALE_WAIT_TIMEOUT": "soon"},
            "--json",
        )
    )
    assert "cannot be made: File exists" in facts["cache"]["why"]
    values = {var["name"]: var["value"] for var in facts["environment"]["variables"]}
    assert "TILESCALE_WAIT_TIMEOUT is 'soon'" in values["TILESCALE_WAIT_TIMEOUT"]["error"]
    assert values["TILESCALE_CACHE_DIR"] == str(tmp_path / "file") and values["TILESCALE_TARGET"] == "auto"
    (tmp_path / "cache").mkdir(mode=0o777)
    (tmp_path / "cache").chmod(0o777)
    assert "others may write to it" in run(
        clean_env | {"TILESCALE_CACHE_DIR": str(tmp_path / "cache"), "COLUMNS": "200"}
    )


def test_for_machines(clean_env: dict[str, str]):
    facts = json.loads(run(clean_env, "--json"))
    assert facts["processor"]["usable_cores"] >= 1 and facts["memory"]["total"] > 1 << 20
    assert facts["packages"]["pins"] == {"apache-tvm": "0.27.0.post1", "apache-tvm-ffi": "0.1.15.post2"}
    launch = next(f for f in facts["features"] if f["name"] == "ranks: tilescale launch")
    assert launch == {"name": launch["name"], "missing": [], "built": True, "ready": True}


def test_a_bare_machine_does_not_crash_it(clean_env: dict[str, str], tmp_path: Path):
    """No tool on the PATH, one that fails, and a variable that makes no sense."""
    (tmp_path / "nvidia-smi").write_text("#!/bin/sh\nexit 9\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    env = clean_env | {
        "PATH": str(tmp_path),
        "CUDA_HOME": "/gone",
        "TILESCALE_CC": "'unclosed",
        "COLUMNS": "200",
    }
    facts = json.loads(run(env, "--json"))
    assert "returned non-zero exit status 9" in facts["nvidia"]["error"]
    assert "TILESCALE_CC" in facts["compilers"]["cc"]["error"]
    cpu = next(f for f in facts["features"] if f["name"] == "kernels on the CPU")
    assert "a C compiler: apt install gcc, or set TILESCALE_CC" in cpu["missing"]
    assert "returned non-zero exit status 9" in run(env)


def test_gpus_and_their_links(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    (tmp_path / "nvidia-smi").write_text(SMI)
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    gpu = {"name": "NVIDIA H200", "memory": "143771 MiB", "capability": "9.0", "driver": "580.159.04"}
    assert machine.nvidia() == {"gpus": [gpu, gpu], "links": {"0-1": "NV18"}}
    others = "system processor memory amd compilers mpiexec libraries packages environment cache".split()
    shown = dict(doctor.summary({"nvidia": machine.nvidia()} | {name: {"error": "x"} for name in others}))
    assert shown["NVIDIA GPUs"] == (
        "2 × NVIDIA H200, 143771 MiB, compute capability 9.0, driver 580.159.04\nlinks: 1 pairs by NV18"
    )
    assert shown["memory"] == "could not be found out: x"


@pytest.mark.parametrize(
    ("text", "version"),
    [
        ("nvcc: NVIDIA (R)\nCopyright (c) 2005-2025\nCuda compilation tools, release 13.0, V13.0.88\n", "release 13.0,"),
        ("HYDRA build details:\n    Version:                                 5.0.2\n", "Version: 5.0.2"),
        ("mpiexec (OpenRTE) 4.1.6\n\nReport bugs to ...\n", "4.1.6"),
        ("gcc (Debian 12.2.0-14) 12.2.0\nCopyright", "12.2.0"),
        ("", "unknown"),
    ],
)  # fmt: skip
def test_versions_are_found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, text: str, version: str):
    (tmp_path / "some-tool").write_text(f"#!{sys.executable}\nprint({text!r})\n")
    (tmp_path / "some-tool").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    found = machine.tool("some-tool")
    assert found is not None and version in found["version"]


def test_nothing_is_missing_where_all_is_there():
    assert {f.name: f.missing for f in doctor.features(everything()) if f.missing} == {}


@pytest.mark.parametrize(
    ("path", "value", "feature", "advice"),
    [
        ("packages/apache-tvm", "3", "kernels on the CPU", "pip install apache-tvm==2 (here: 3)"),
        ("packages/apache-tvm", None, "kernels on the CPU", "pip install apache-tvm==2 (absent)"),
        ("compilers/cc", None, "kernels on the CPU", "a C compiler: apt install gcc, or set TILESCALE_CC"),
        ("system/architecture", "riscv64", "kernels on the CPU", "an x86-64 or Arm processor"),
        ("packages/torch", None, "ranks: torchrun", "pip install torch"),
        ("memory/shm_free", 64 << 20, "ranks: tilescale launch", "more room in /dev/shm (64 MiB free)"),
        ("memory/shm_writable", False, "ranks: tilescale launch", "a writable /dev/shm"),
        ("mpiexec", None, "ranks: mpiexec", 'pip install "tilescale[mpi]"'),
        ("nvidia", {"error": "broken"}, "kernels on NVIDIA GPUs", "an NVIDIA GPU with its driver"),
        ("packages/torch_cuda", None, "kernels on NVIDIA GPUs", "a torch built for CUDA"),
        ("nvidia/gpus", [], "ranks on NVIDIA GPUs, one machine", "what kernels on NVIDIA GPUs need"),
        ("packages/nvshmem4py-cu13", None, "ranks on NVIDIA GPUs, one machine, by NVSHMEM", "nvshmem4py"),
        ("amd/gpus", [], "kernels on AMD GPUs", "an AMD GPU"),
        ("packages/matplotlib", None, "pictures of timelines", 'pip install "tilescale[vis]"'),
    ],
)
def test_what_is_missing_is_named(path: str, value: object, feature: str, advice: str):
    facts: dict[str, Any] = everything()
    *folders, last = path.split("/")
    place = facts
    for folder in folders:
        place = place[folder]
    place[last] = value
    (found,) = [f for f in doctor.features(facts) if f.name == feature]
    assert not found.ready
    assert any(advice in line for line in found.missing), found.missing
