"""The house holds together: a plain install has every file, folders are packages, versions and sizes
agree."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import tilescale

if sys.version_info >= (3, 11):
    import tomllib
else:
    tomllib = pytest.importorskip("tomli")

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = {
    "tilescale": "tilescale",
    "compiler": "tilescale/compiler",
    "comm": "tilescale/comm",
    "launch": "tilescale/launch",
}
# "About 600 and 80" is the habit; these are where a reviewer would stop reading.
FILE_LINES, FUNCTION_LINES = 810, 180


def sources() -> list[Path]:
    """Every file of the four folders that belongs to the product, relative to the root."""
    found = []
    for folder in FOLDERS:
        for path in (ROOT / folder).rglob("*"):
            if (
                path.is_file()
                and "__pycache__" not in path.parts
                and path.suffix not in (".pyc", ".so", ".o")
            ):
                found.append(path.relative_to(ROOT))
    return sorted(found)


@pytest.fixture(scope="module")
def project() -> dict:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


def test_a_plain_install_has_every_file(tmp_path: Path):
    """The wheel, not the editable install, which would find forgotten packages through the checkout."""
    tree = tmp_path / "tree"
    for name in [Path("pyproject.toml"), Path("setup.py"), Path("LICENSE"), Path("README.md"), *sources()]:
        if (ROOT / name).exists():
            (tree / name).parent.mkdir(parents=True, exist_ok=True)
            (tree / name).write_bytes((ROOT / name).read_bytes())
    # The environment's own setuptools builds it, so the test needs no network.
    build = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--quiet",
        "--no-deps",
        "--no-build-isolation",
        "--no-index",
        str(tree),
    ]
    done = subprocess.run([*build, "-w", str(tmp_path)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        archive.extractall(tmp_path / "site")
    expected = {str(Path(FOLDERS[path.parts[0]], *path.parts[1:])) for path in sources()}
    assert expected - names == set(), (
        "not in the wheel: add the pattern to [tool.setuptools.package-data], or an __init__.py"
    )
    assert {name.split("/")[0] for name in names if "dist-info" not in name} == {"tilescale"}
    (metadata,) = (tmp_path / "site").glob("*.dist-info/METADATA")
    assert metadata.read_text().split("\n\n", 1)[1].strip() == (ROOT / "README.md").read_text().strip()
    assert "Description-Content-Type: text/markdown" in metadata.read_text()
    # And it imports from there, with every part under the one root.
    code = "import tilescale.comm, tilescale.compiler, tilescale.launch.cli; print(tilescale.__path__)"
    out = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env={"PYTHONPATH": str(tmp_path / "site")},
        capture_output=True,
        text=True,
    )
    assert out.stdout.strip() == str([str(tmp_path / "site" / "tilescale")]), out.stderr
    command = [sys.executable, "-m", "tilescale", "--version"]
    out = subprocess.run(
        command, cwd=tmp_path, env={"PYTHONPATH": str(tmp_path / "site")}, capture_output=True, text=True
    )
    assert out.stdout == f"tilescale, version {tilescale.__version__}\n", out.stderr


def test_every_folder_with_modules_is_a_package():
    folders = {path.parent for path in sources() if path.suffix == ".py"}
    lacking = [str(folder) for folder in folders if not (ROOT / folder / "__init__.py").exists()]
    assert not lacking, f"without __init__.py a plain install forgets them: {sorted(lacking)}"


def test_versions_agree(project: dict):
    assert tilescale.__version__ == project["project"]["version"]
    pins = [d for d in project["project"]["dependencies"] if d.startswith("apache-tvm")]
    assert pins == ["apache-tvm==0.27.0.post1", "apache-tvm-ffi==0.1.15.post2"]


def test_torch_is_no_dependency(project: dict):
    assert not any(d.startswith("torch") for d in project["project"]["dependencies"])


def test_files_and_functions_stay_readable():
    long = []
    for path in sources():
        if path.suffix != ".py":
            continue
        text = (ROOT / path).read_text()
        if (count := text.count("\n")) > FILE_LINES:
            long.append(f"{path}: {count} lines, at most {FILE_LINES}")
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and node.end_lineno is not None:
                if (count := node.end_lineno - node.lineno + 1) > FUNCTION_LINES:
                    long.append(
                        f"{path}:{node.lineno}: {node.name} has {count} lines, at most {FUNCTION_LINES}"
                    )
    assert not long, "\n".join(long)


def test_modules_say_what_they_are_for():
    silent = [
        str(path)
        for path in sources()
        if path.suffix == ".py"
        and (text := (ROOT / path).read_text()).strip()
        and ast.get_docstring(ast.parse(text)) is None
    ]
    assert not silent, f"without a docstring: {silent}"


#: file → its kernel, the macros and the helper that it consists of, and how many lines their bodies may have
#: together
KERNELS = {
    "tilescale/ops/attention.py": (("queries", "flash_attention"), 70),
    "tilescale/ops/latent_attention.py": (("half", "hide", "rise", "weigh", "shrink", "mla_decode"), 80),
}


@pytest.mark.parametrize("path", KERNELS)
def test_kernels_stay_short(path: str):
    names, most = KERNELS[path]
    lines = 0
    for node in ast.walk(ast.parse((ROOT / path).read_text())):
        if not isinstance(node, ast.FunctionDef) or node.name not in names:
            continue
        if {ast.unparse(d) for d in node.decorator_list} <= {"T.macro", "T.prim_func"}:
            lines += (
                sum(isinstance(s, ast.stmt) for s in ast.walk(node)) - 2
            )  # without its head and docstring
    assert 0 < lines <= most


@pytest.mark.parametrize("target", ["cpu", "gpu", "cuda"])
def test_lowerings_stand_in_files_of_their_operations_names(target: str):
    """compiler/TARGET/ops/NAME.py says how TARGET, or a family of them, does what compiler/ops/NAME.py has,
    and nothing else."""
    names = r'@?lowers\("(\w+)", ((?:"\w+"(?:, )?)+)\)'
    there = {p.stem for p in (ROOT / "compiler" / "ops").glob("*.py")}
    for path in (ROOT / "compiler" / target / "ops").glob("[a-z]*.py"):
        assert path.stem in there, path
        own = (ROOT / "compiler" / "ops" / path.name).read_text()
        for owner, found in re.findall(names, path.read_text()):
            assert owner == target, path
            for name in re.findall(r"\w+", found):
                assert f'name = "{name}"' in own, f"{path}: ts.{name} is not in compiler/ops/{path.name}"
