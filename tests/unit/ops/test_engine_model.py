"""How gathers and scatters by copy engines are cut, and from which sizes they are chosen."""

from __future__ import annotations

import itertools

import pytest

from tilescale.ops.ranks import engine, flat, gather, scatter

MB = 1 << 20


@pytest.mark.parametrize(
    "count, step, copies", [(64 * MB, 16, 1), (512 * MB, 8192, 7), (100, 16, 1), (0, 16, 3)]
)
def test_pieces_are_all_of_it_and_get_smaller(count: int, step: int, copies: int):
    cut = engine.pieces(count, step, 1 / 2e12, copies)
    assert cut[0][0] == 0 and cut[-1][1] == count
    assert all(a[1] == b[0] for a, b in itertools.pairwise(cut))
    assert all(low % step == 0 for low, _ in cut)
    sizes = [high - low for low, high in cut]
    assert all(a >= b for a, b in itertools.pairwise(sizes))
    assert (len(cut) > 1) == (count >= 64 * MB)


@pytest.mark.parametrize("world", [1, 2, 3, 8])
def test_every_byte_crosses_to_every_other_rank_once(world: int):
    plan = engine.gathers(64 * MB, world)
    for hop in range(1, world):
        cut = [(low, high) for h, low, high in plan if h == hop]
        assert cut[0][0] == 0 and cut[-1][1] == 64 * MB
        assert all(a[1] == b[0] for a, b in itertools.pairwise(cut))
    assert {h for h, _, _ in plan} == set(range(1, world))


@pytest.mark.parametrize("world", [2, 4, 8])
def test_the_last_piece_is_worked_on_in_no_time(world: int):
    for size in (64 * MB, 512 * MB):
        _, low, high = engine.gathers(size, world)[-1]
        assert 2 * (high - low) / engine.LOCAL < 2 * engine.COPY
        low, high = engine.sums(size, 16, 1, world)[-1]
        assert (world + 1) * (high - low) / engine.LOCAL < 2 * (world - 1) * engine.COPY


def test_engines_are_chosen_for_large_parts(monkeypatch: pytest.MonkeyPatch):
    for world in (3, 4, 8):
        assert gather.choose(64 * MB, True, world) == scatter.choose(64 * MB, "rank", True, world) == "engine"
        assert gather.choose(64 * MB, True, world, reached=True) == "engine"
        assert gather.choose(4 * MB, True, world) == scatter.choose(4 * MB, "rank", True, world) == "kernel"
    assert gather.choose(64 * MB, True, 2) == scatter.choose(64 * MB, "rank", True, 2) == "kernel"
    # no whole vectors: engines move them as well, sums are of single numbers
    assert (
        gather.choose(64 * MB + 4, True, 4) == "engine" and gather.choose(64 * MB + 4, True, 2) == "library"
    )
    assert scatter.choose(64 * MB + 4, "rank", True, 4) == "kernel"
    assert "engine" not in (gather.choose(64 * MB, False, 1), scatter.choose(64 * MB, "rank", False, 1))
    monkeypatch.setattr(engine, "able", lambda: False)
    assert gather.choose(64 * MB, True, 4) == scatter.choose(64 * MB, "rank", True, 4) == "kernel"


@pytest.mark.parametrize("world, kilobytes", [(2, 1024), (4, 1024), (8, 438)])
def test_small_parts_are_gathered_in_packets(world: int, kilobytes: int):
    """As docs/OPS.md says up to which sizes, where there are packets."""
    small, more = (gather.choose(n << 10, True, world) for n in (kilobytes, kilobytes + 1))
    assert (small, more) == ("packets", "kernel")
    assert "packets" in gather.ways(world, rows=world, columns=kilobytes << 9)


def test_what_was_measured_is_taken_where_memory_is_addressed(monkeypatch: pytest.MonkeyPatch):
    kept = {"how": "engine", "blocks": None}
    assert flat.allowed(kept, ("kernel", "engine"), None) == "engine"
    monkeypatch.setenv("TILESCALE_HEAP", "nvshmem")
    monkeypatch.setenv("TILESCALE_REMOTE", "nvshmem")
    assert flat.allowed(kept, ("kernel", "engine"), None) is None and not engine.able()
