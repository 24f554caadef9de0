"""Choices that were measured. `tilescale bench --tune` times what an operation can do at a shape and keeps
the fastest; calls of that shape by ranks of the same arrangement take it from then on.

There is a file for each arrangement (how many ranks on how many GPUs of how many hosts, and which GPU) in the
cache's folder ``tuned``. Rank 0 of a team reads it for all of them, at the team's first operation: what lies
on the other ranks' disks must not divide them. Choices are of one shape each; others are by the models in
each file's `choose`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import weakref
import zlib
from pathlib import Path
from typing import Any

import torch

from tilescale import agree, env, folders
from tilescale.comm.backend import Team
from tilescale.ops import host
from tilescale.ops.ranks.workspace import workspace

#: name of the operation → shape as text → words of a call, or fields of its Config
Choices = dict[str, dict[str, dict[str, Any]]]
_of_team: weakref.WeakKeyDictionary[Team, tuple[str, Choices]] = weakref.WeakKeyDictionary()


def found(team: Team, operation: str, device: torch.device, **shape: Any) -> dict[str, Any]:
    """What was kept for a shape; empty where it was not measured. Collective at the team's first call."""
    if team not in _of_team:
        name = _arrangement(team, device)
        _of_team[team] = name, json.loads(_of_first(team, _read(name) if team.rank == 0 else ""))
    kept = _of_team[team][1].get(operation)
    return kept.get(_key(shape), {}) if kept else {}


def keep(team: Team, operation: str, choice: dict[str, Any], **shape: Any) -> None:
    """Keeps a choice that all ranks of the team have agreed on, behind `found`. Rank 0 writes it."""
    name, choices = _of_team[team]
    choices.setdefault(operation, {})[_key(shape)] = choice
    workspace(team).plans.clear()  # which were made of other choices
    if team.rank == 0:
        path = folders.writable("tuned") / name
        aside = path.with_suffix(f".{os.getpid()}")
        aside.write_text(json.dumps(choices, indent=1, sort_keys=True))
        os.replace(aside, path)


def _key(shape: dict[str, Any]) -> str:
    return " ".join(f"{k}={v}" for k, v in sorted(shape.items()))


def applied(kept: dict[str, Any], model: Any, device: torch.device) -> Any:
    """A Config with the fields that were kept. As it is where it has others, those of another version; where
    more multiprocessors were kept than may be now (TILESCALE_SPARE); and of engines that reach nobody now."""
    if not kept.keys() <= vars(model).keys() or (kept.get("engine") and env.REMOTE.get()):
        return model
    if kept.get("blocks", 0) > host.units(device):
        return model
    return dataclasses.replace(model, **kept)


def _are_choices(found: Any) -> bool:
    """Whether what a file holds is a `Choices`."""
    return isinstance(found, dict) and all(
        isinstance(shapes, dict) and all(isinstance(words, dict) for words in shapes.values())
        for shapes in found.values()
    )


def _read(name: str) -> str:
    for folder in folders.readable("tuned"):
        with contextlib.suppress(OSError, ValueError):
            text = Path(folder, name).read_text()
            if _are_choices(json.loads(text)):
                return text
    return "{}"


def _arrangement(team: Team, device: torch.device) -> str:
    """The file's name: ranks, GPUs, hosts and the GPU's name, alike on all ranks."""
    host = zlib.crc32(os.uname().nodename.encode())
    kind, place = "processors", 0
    if device.type == "cuda":
        of = torch.cuda.get_device_properties(device)
        kind, place = of.name, zlib.crc32(str(getattr(of, "uuid", device.index)).encode())
    rows = agree.table([float(host), float(place)], team)
    hosts, places = len({h for h, _ in rows}), len({tuple(r) for r in rows})
    what = "".join(c if c.isalnum() else "-" for c in kind)
    return f"ranks-{team.size}-on-{places}-of-{hosts}-{what}.json"


def _of_first(team: Team, text: str) -> str:
    """Rank 0's text, on all ranks."""
    data = text.encode()
    length = int(agree.table([float(len(data))], team)[0][0])
    mine = list(map(float, data)) if team.rank == 0 else [0.0] * length
    return bytes(map(int, agree.table(mine, team)[0])).decode()
