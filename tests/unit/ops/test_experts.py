"""What a dispatch leaves behind, beyond the rows of its pairs (tests/unit/ops/test_rank_library.py): where
things are, its numbers for blocks, a second one by the same places, combining without weights; refusals."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tilescale import comm, ops
from tilescale.errors import FindingError, TileTypeError, TileValueError
from tilescale.ops.ranks import experts
from tilescale.ops.ranks.dispatch import planned

SHAPE: dict[str, Any] = {"tokens": 9, "hidden": 16, "topk": 3, "experts": 7, "choice": "drop"}


def drawn(rank: int, world: int, seed: int = 0) -> dict[str, Any]:
    return experts.draw(**SHAPE, uneven=True, rank=rank, world=world, seed=seed)


def came(rank: int, world: int) -> tuple[list[tuple[int, int]], list[tuple[int, int, int]]]:
    """(rank, token) of the rows that a rank gets, (rank, token, expert) of its pairs."""
    local = -(-SHAPE["experts"] // world)
    ids = [drawn(s, world)["experts"] for s in range(world)]
    every = [(s, t) for s in range(world) for t in range(len(ids[s]))]
    rows = [(s, t) for s, t in every if (ids[s][t] // local == rank).any()]
    mine = range(rank * local, min(rank * local + local, SHAPE["experts"]))
    return rows, [(s, t, e) for e in mine for s, t in every if e in ids[s][t]]


def places() -> bool:
    comm.init()
    rank, world = comm.rank(), comm.world_size()
    given = drawn(rank, world)
    marks = torch.randn(len(given["x"]), 2, generator=torch.Generator().manual_seed(rank))
    everyone = [
        torch.randn(len(drawn(s, world)["x"]), 2, generator=torch.Generator().manual_seed(s))
        for s in range(world)
    ]
    sent = ops.moe_dispatch(**given, scales=marks)
    rows, pairs = came(rank, world)
    local = -(-SHAPE["experts"] // world)
    assert sent.starts.tolist() == [sum(s < r for s, _ in rows) for r in range(world + 1)]
    sizes = [sum(e == rank * local + k for _, _, e in pairs) for k in range(local)]
    assert sent.sizes.tolist() == sizes
    assert sent.index.tolist()[: len(pairs)] == [rows.index((s, t)) for s, t, _ in pairs]
    assert not sent.index[len(pairs) :].any()
    assert sent.rows.shape == experts.room(9, 3, 7, world)[:1] + (16,) and sent.scales is not None
    for at, (s, t) in enumerate(rows):
        of = drawn(s, world)
        assert sent.rows[at].equal(of["x"][t]) and sent.scales[at].equal(everyone[s][t])
        here = of["experts"][t] // local == rank
        first = int(here.sum())
        assert ((sent.meta[at, 0] >= 0) == (torch.arange(3) < first)).all()
        found = [pairs[p] for p in sent.meta[at, 0, :first]]
        assert found == [(s, t, int(e)) for e in of["experts"][t][here]]
        assert sent.meta[at, 1, :first].view(torch.float32).equal(of["weights"][t][here])
    for t in range(len(given["x"])):
        for d in range(world):
            there = came(d, world)[0]
            slot = there.index((rank, t)) - int(sent.begins[d]) if (rank, t) in there else -1
            assert int(sent.slots[t, d]) == slot
    return True


@pytest.mark.parametrize("world", [1, 2, 5])
def test_places(ranks: Any, world: int):
    assert all(ranks(world, target="sim").call(places))


def again() -> bool:
    """Gradients go where tokens went, and come back without weights; float8 crosses as it is."""
    comm.init()
    rank, world = comm.rank(), comm.world_size()
    given = drawn(rank, world)
    sent = ops.moe_dispatch(**given)
    other = torch.randn(len(given["x"]), 5)
    second = ops.moe_dispatch(other, like=sent)
    assert second.index.equal(sent.index) and second.rows.shape[1] == 5
    back = ops.moe_combine(second.expanded(), sent, weighted=False)
    counted = (given["experts"] >= 0).sum(1, keepdim=True)
    assert torch.allclose(back, other * counted, rtol=1e-5)
    eight = given["x"].to(torch.float8_e4m3fn)
    rows = ops.moe_dispatch(eight, given["experts"].long(), num_experts=7, tokens=9).rows
    whole = [drawn(s, world)["x"][t].to(torch.float8_e4m3fn) for s, t in came(rank, world)[0]]
    assert not whole or rows[: len(whole)].view(torch.uint8).equal(torch.stack(whole).view(torch.uint8))
    return True


def test_a_second_dispatch_by_the_same_places(ranks: Any):
    assert all(ranks(3, target="sim").call(again))


def chosen(dtype: torch.dtype) -> bool:
    comm.init()
    rank, world = comm.rank(), comm.world_size()
    given = drawn(rank, world)
    told = given["weights"].to(dtype) * (1 + torch.finfo(dtype).eps)
    rest = [(told - told.float()).float()] if dtype == torch.float64 else []
    marks = torch.cat([given["experts"].float(), told.float(), *rest], 1)
    sent = ops.moe_dispatch(**given, scales=marks, slot=3)
    assert sent.scales is not None
    choice, weight = experts.choices(sent, sent.scales, dtype)
    pairs = came(rank, world)[1]
    assert len(choice) == len(sent.index) >= len(pairs) and weight.dtype == dtype
    for at, (s, t, e) in enumerate(pairs):
        of = drawn(s, world)
        k = of["experts"][t].tolist().index(e)
        assert int(choice[at]) == k
        assert weight[at] == of["weights"][t, k].to(dtype) * (1 + torch.finfo(dtype).eps)
    return True


@pytest.mark.parametrize("world", [1, 2, 5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_choices_and_weights_of_pairs(ranks: Any, world: int, dtype: torch.dtype):
    assert all(ranks(world, target="sim").call(chosen, dtype))


def in_slots() -> bool:
    """Dispatches into two slots, and combines in either order; a third one takes the first one's place."""
    comm.init()
    first, second = (drawn(comm.rank(), comm.world_size(), seed) for seed in (0, 1))
    want = [ops.moe_combine(sent.expanded(), sent) for sent in (ops.moe_dispatch(**first),)]
    want += [ops.moe_combine(sent.expanded(), sent) for sent in (ops.moe_dispatch(**second),)]
    a, b = ops.moe_dispatch(**first, slot=0), ops.moe_dispatch(**second, slot=1)
    y, z = a.expanded(), b.expanded(blocks=1)
    assert ops.moe_combine(z, b).equal(want[1]) and ops.moe_combine(y, a).equal(want[0])
    where = planned(second["experts"], second["weights"], 7, 9, slot=0)
    c = ops.moe_dispatch(second["x"], like=where)
    assert c.slot == 0 and ops.moe_combine(c.expanded(), c).equal(want[1])
    with pytest.raises(TileValueError, match="the group has dispatched others"):
        ops.moe_combine(y, a)
    assert ops.moe_combine(z, b).equal(want[1])
    return True


@pytest.mark.parametrize("world", [1, 3])
def test_slots_leave_each_other_alone(ranks: Any, world: int):
    assert all(ranks(world, target="sim").call(in_slots))


def refusals() -> list[str]:
    comm.init()
    x, ids = torch.ones(4, 8), torch.zeros(4, 2, dtype=torch.int32)
    send = ops.moe_dispatch
    sent = send(x, ids, num_experts=4)
    wrong: list[tuple[type[Exception], Any]] = [
        (TileValueError, lambda: send(x, num_experts=4)),
        (TileValueError, lambda: send(x, ids)),
        (TileValueError, lambda: send(x, ids[:3], num_experts=4)),
        (TileTypeError, lambda: send(x, ids.float(), num_experts=4)),
        (TileTypeError, lambda: send(x, ids, x[:, :2].double(), num_experts=4)),
        (TileValueError, lambda: send(x, ids, num_experts=4, tokens=3)),
        (TileValueError, lambda: send(x, ids, num_experts=0)),
        (TileValueError, lambda: send(x, ids, like=sent)),
        (TileValueError, lambda: send(x, like=sent, slot=1)),
        (TileValueError, lambda: send(x, ids, num_experts=4, slot=-1)),
        (TileValueError, lambda: send(x[:3], like=sent)),
        (TileTypeError, lambda: send(x, ids, num_experts=4, scales=x.double())),
        (TileValueError, lambda: ops.moe_combine(x, sent)),
        (TileTypeError, lambda: ops.moe_combine(sent.expanded().int(), sent)),
    ]
    told = []
    for kind, call in wrong:
        with pytest.raises(kind) as error:
            call()
        told.append(str(error.value))
    y = sent.expanded()
    send(x, ids, num_experts=4)
    with pytest.raises(TileValueError, match="the group has dispatched others"):
        ops.moe_combine(y, sent)
    return told


def test_refusals(ranks: Any):
    told = "\n".join(ranks(2, target="sim").call(refusals)[0])
    for part in ("4 tokens, tokens=3", "one of the two", "int32 or int64", "a row of each pair"):
        assert part in told, told


@pytest.mark.parametrize("pairs", range(1, 6))
def test_rows_of_few_pairs_are_whole(pairs: int):
    """Fewer than a block has warps, and longer than what a warp moves at once."""
    x, at = torch.randn(1, 700), torch.arange(pairs)
    made, _ = ops.moe_permute(x, at[None], num_experts=pairs, out=torch.full((pairs, 700), torch.nan))
    assert made.equal(x.expand(pairs, -1))


def counting() -> list[str]:
    comm.init()
    given = drawn(comm.rank(), comm.world_size())
    sent = ops.moe_dispatch(**given)
    few = sent.counted()
    assert len(few.index) == max(1, int(sent.sizes.sum())) < len(sent.index)
    assert sent.counted(3).index.equal(sent.index[:3])
    got = ops.moe_combine(few.expanded(), few)
    assert got.equal(ops.moe_combine(sent.expanded(), sent))
    told = []
    for wrong in (0, len(sent.index) + 1):
        with pytest.raises(TileValueError) as e:
            sent.counted(wrong)
        told.append(str(e.value))
    return told


def test_room_for_what_came(ranks: Any):
    assert all("1 to" in told for of in ranks(2, target="sim").call(counting) for told in of)


def _named_twice() -> None:
    comm.init()
    ids = torch.zeros(6, 3, dtype=torch.int32)  # one expert three times, of two on a rank
    ops.moe_dispatch(torch.randn(6, 16), ids, torch.ones(6, 3), num_experts=4)


def test_a_token_that_names_an_expert_twice_is_no_loss_in_silence(ranks: Any):
    """Where there is no room for its pairs the launch says so."""
    with pytest.raises(FindingError, match="a token names an expert twice"):
        ranks(2, target="sim").call(_named_twice)
