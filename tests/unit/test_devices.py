"""The table of targets (tilescale/devices.py): a target is one record, and nothing else of the runtime asks
for its name."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.kernels import refused
from tilescale import devices, env
from tilescale.device import Device
from tilescale.errors import TileValueError

SOURCES = Path(devices.__file__).parent
#: where a target's name may decide something: the records; the fixture of tests, whose two ways to run are no
#: targets
HOMES = ("device.py", "devices.py", "cuda.py", "testing/__init__.py")


def test_every_target_has_a_record():
    assert {*devices.TABLE, "auto"} == set(env.TARGETS) and all(
        d.name == name for name, d in devices.TABLE.items()
    )
    assert (
        devices.of("cuda:sm_80") is devices.of_kernel({"target": "cuda"})
        and devices.of_kernel({}).name == "cpu"
    )
    assert all(d.shown in d.sources for d in devices.TABLE.values())


class Hip(Device):
    def architecture(self) -> str:
        return "gfx942"

    def code_key(self, arch: str) -> tuple[str, ...]:
        return "clang", arch


class Tensor:
    is_hip = True


def test_another_target_is_one_record(monkeypatch: pytest.MonkeyPatch):
    made = Hip("hip", ("tile", "hip"), "hip", nicknames=("amd",), arch="gfx90a", flag="is_hip", gpu=True)
    monkeypatch.setitem(devices.TABLE, "hip", made)
    monkeypatch.setitem(env.TARGETS, "hip", "shm")
    monkeypatch.setattr(devices, "_LATER", ())
    monkeypatch.delenv("TILESCALE_TARGET", raising=False)
    assert (
        devices.resolve_target("hip") == "hip:gfx942" and devices.resolve_target("hip:gfx90a") == "hip:gfx90a"
    )
    assert devices.code_key("hip:gfx90a") == ("clang", "gfx90a")
    assert (
        devices.device_of([Tensor()]) == "hip" and devices.resolve_target("auto", [Tensor()]) == "hip:gfx942"
    )
    assert devices.may_have_gpu()
    with refused(TileValueError, "there is no target 'AMD'", write='target="hip"'):
        devices.parse_target("AMD")
    with refused(TileValueError, "there is no target 'hip:'", write='target="hip:gfx90a"'):
        devices.parse_target("hip:")


def forks(source: str) -> Iterator[int]:
    """The lines at which something is compared with a target's name. Torch's types of devices are none: where
    memory lies is asked too."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Compare) and not any(
            isinstance(n, ast.Attribute) and n.attr == "type" for n in (node.left, *node.comparators)
        ):
            constants = [
                n.value
                for side in (node.left, *node.comparators)
                for n in ast.walk(side)
                if isinstance(n, ast.Constant)
            ]
            if any(name in constants for name in devices.TABLE):
                yield node.lineno


def test_the_runtime_asks_the_table():
    found = []
    for path in sorted(SOURCES.rglob("*.py")):
        name = str(path.relative_to(SOURCES))
        if name not in HOMES and name.partition("/")[0] not in ("compiler", "comm", "launch"):
            found += [
                f"{name}:{line}: asks for a target by name, see tilescale/devices.py"
                for line in forks(path.read_text())
            ]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    "source, wrong",
    [('if target == "cuda": pass', 1), ('x = 1 if meta.get("target", "cpu") == name else 2', 1), ('t.target in ("sim", "cpu")', 1),
     ('a.device.type != "cpu"', 0), ('kind == "tile"', 0), ('compile(f, target="cpu")', 0)],
)  # fmt: skip
def test_the_check_itself(source: str, wrong: Any):
    assert len(list(forks(source))) == wrong
