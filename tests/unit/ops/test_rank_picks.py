"""Choices of operations of several ranks that were measured: where they are kept, who takes them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tilescale import comm, ops
from tilescale.errors import TileValueError
from tilescale.ops import host
from tilescale.ops.ranks import gemm_reduce, picks
from tilescale.ops.ranks.groups import team_of


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TILESCALE_CACHE_DIR", str(tmp_path))
    return tmp_path / "tuned"


def kept_by_one_rank() -> list[Any]:
    """What ranks find before and behind a choice, and from the file."""
    comm.init()
    team, cpu, seen = team_of(None), torch.device("cpu"), []
    seen.append(picks.found(team, "all_gather", cpu, size=40))
    picks.keep(team, "all_gather", {"how": "kernel", "blocks": 3}, size=40)
    seen.append(picks.found(team, "all_gather", cpu, size=40))
    picks._of_team.pop(team)
    comm.barrier()
    seen.append(picks.found(team, "all_gather", cpu, size=40))
    return [
        *seen,
        picks.found(team, "all_gather", cpu, size=41),
        picks.found(team, "broadcast", cpu, size=40),
    ]


def test_all_ranks_find_what_the_first_one_has_on_disk(ranks: Any, cache: Path):
    for seen in ranks(3, target="sim").call(kept_by_one_rank):
        assert seen == [{}, {"how": "kernel", "blocks": 3}, {"how": "kernel", "blocks": 3}, {}, {}]
    (file,) = cache.glob("ranks-3-on-1-of-1-processors.json")
    assert json.loads(file.read_text()) == {"all_gather": {"size=40": {"how": "kernel", "blocks": 3}}}


@pytest.mark.parametrize(
    "text", ["", "[1]", "{", '{"all_gather": {}}', '{"all_gather": 5}', '{"all_gather": {"size=40": 3}}']
)
def test_a_file_that_nobody_can_read_is_none(ranks: Any, cache: Path, text: str):
    cache.mkdir()
    (cache / "ranks-2-on-1-of-1-processors.json").write_text(text)
    assert ranks(2, target="sim").call(found_nothing) == [{}, {}]


def found_nothing() -> dict[str, Any]:
    comm.init()
    return picks.found(team_of(None), "all_gather", torch.device("cpu"), size=40)


def gathered(choice: dict[str, Any], more: dict[str, Any]) -> tuple[bool, set[int]]:
    """Whether the result is right, with a choice kept; and the blocks of the kernels that were asked for."""
    comm.init()
    used, kernel = set(), host.kernel

    def noted(factory: Any, target: str, /, **constants: Any) -> Any:
        used.add(constants["blocks"])
        return kernel(factory, target, **constants)

    team, x = team_of(None), torch.arange(60_000.0) + comm.rank()
    picks.found(team, "all_gather", x.device, size=x.numel() * 4)
    picks._of_team[team][1]["all_gather"] = {f"size={x.numel() * 4}": choice} if choice else {}
    want = torch.cat([torch.arange(60_000.0) + r for r in range(comm.world_size())])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(host, "kernel", noted)
        return bool((ops.all_gather(x, **more) == want).all()), used


@pytest.mark.parametrize(
    "choice, more, blocks",
    [({}, {}, 256), ({"how": "kernel", "blocks": 5}, {}, 5), ({"how": "kernel", "blocks": 5}, {"blocks": 2}, 2),
     ({}, {"blocks": 7}, 7), ({"how": "library", "blocks": None}, {}, 256)],
)  # fmt: skip
def test_calls_take_what_is_kept_unless_they_say_otherwise(ranks: Any, choice: Any, more: Any, blocks: int):
    """On processes, which run 256 blocks in no time; the simulator takes half a minute."""
    assert ranks(2, target="cpu").call(gathered, choice, more) == [(True, {blocks})] * 2


def test_a_choice_that_cannot_be_made_now_is_left(monkeypatch: pytest.MonkeyPatch):
    """Of more multiprocessors than others leave, of engines that reach nobody, of another version."""
    model, cpu = gemm_reduce.Config(blocks=100), torch.device("cpu")
    engine, large = {"fused": False, "engine": True}, {"panel": 2, "blocks": 132}
    assert picks.applied({}, model, cpu) == picks.applied({"old": 1}, model, cpu) == model
    assert picks.applied(engine, model, cpu).engine and picks.applied(large, model, cpu).panel == 2
    monkeypatch.setenv("TILESCALE_SPARE", "16")
    assert picks.applied(large, model, cpu) == model and picks.applied(engine, model, cpu).engine
    monkeypatch.setenv("TILESCALE_REMOTE", "nvshmem")
    assert picks.applied(engine, model, cpu) == model


def sent(choice: dict[str, Any], more: dict[str, Any]) -> dict[str, tuple[int, int]]:
    """Stages and blocks of the kernels of a dispatch and a combine, with a choice kept for both."""
    comm.init()
    used, kernel = {}, host.kernel

    def noted(factory: Any, target: str, /, **constants: Any) -> Any:
        if "stages" in constants:
            used[factory.__name__] = constants["stages"], constants["blocks"]
        return kernel(factory, target, **constants)

    team, x = team_of(None), torch.ones(600, 8)
    picks.found(team, "moe_dispatch", x.device)
    for name in ("moe_dispatch", "moe_combine"):
        key = "dtype=float32 experts=4 hidden=8 tokens=600 topk=1"
        picks._of_team[team][1][name] = {key: choice} if choice else {}
    ids = torch.arange(600)[:, None] % 4
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(host, "kernel", noted)
        there = ops.moe_dispatch(x, ids, num_experts=4, **more)
        got = ops.moe_combine(there.expanded(), there, **more)
    assert got.equal(x)
    return used


@pytest.mark.parametrize(
    ("choice", "more", "stages", "blocks"),
    [({}, {"blocks": 2}, 0, 2), ({"stages": 2, "blocks": 3}, {}, 2, 3),
     ({"stages": 2, "blocks": 3}, {"stages": 0}, 0, 3)],
)  # fmt: skip
def test_experts_take_what_is_kept(ranks: Any, choice: Any, more: Any, stages: int, blocks: int):
    want = {"dispatch": (stages, blocks), "combine": (stages, blocks)}
    assert ranks(2, target="cpu").call(sent, choice, more) == [want] * 2


def of_another_version() -> bool:
    """Calls whose kept choices name ways and fields that there are not."""
    comm.init()
    team, x, w = team_of(None), torch.ones(4, 8), torch.ones(8, 6)
    picks.found(team, "all_gather", x.device)
    every = picks._of_team[team][1]
    for name in ("all_gather", "all_reduce", "broadcast", "reduce_scatter"):
        every[name] = {
            key: {"how": "by pigeon", "blocks": None} for key in ("size=128", "order=rank size=128")
        }
        every[name]["order=rank size=64"] = every[name]["size=128"]
    every["matmul_all_reduce"] = {"K=8 M=4 N=6 dtype=float32": {"fused": True, "wings": 2}}
    right = ops.all_gather(x).equal(torch.ones(8, 8)) and ops.all_reduce(x).equal(2 * x)
    right &= ops.broadcast(x).equal(x) and ops.reduce_scatter(x).equal(2 * x[:2])
    return bool(right and ops.matmul_all_reduce(x, w).equal(torch.full((4, 6), 16.0)))


def test_choices_of_another_version_are_none(ranks: Any):
    assert ranks(2, target="cpu").call(of_another_version) == [True] * 2


def scattered_unevenly() -> bool:
    """Five rows of two ranks, where six of the same size a rank were found to go best in packets."""
    comm.init()
    team, x = team_of(None), torch.arange(20.0).view(5, 4) + comm.rank()
    picks.found(team, "reduce_scatter", x.device, size=48, order="rank")
    kept = {"size=48": {"how": "packets", "blocks": None}}
    picks._of_team[team][1]["reduce_scatter"] = {f"order=rank {k}": v for k, v in kept.items()}
    want = (2 * torch.arange(20.0).view(5, 4) + 1)[3 * comm.rank() :][:3]
    assert picks.found(team, "reduce_scatter", x.device, size=48, order="rank")["how"] == "packets"
    return bool((ops.reduce_scatter(x) == want).all())


def test_uneven_parts_do_not_go_in_packets_that_were_kept_for_even_ones(ranks: Any):
    assert ranks(2, target="sim").call(scattered_unevenly) == [True, True]


def none_at_all() -> str:
    comm.init()
    with pytest.raises(TileValueError, match="1 at least") as error:
        ops.all_gather(torch.zeros(8), blocks=0)
    return str(error.value)


def test_no_multiprocessor_is_refused(ranks: Any):
    assert all("blocks=0" in text for text in ranks(2, target="sim").call(none_at_all))
