"""Symmetric memory beside the hosts' own, as on GPUs, with arenas that are files which all ranks map: what of
it needs no GPU."""

from __future__ import annotations

import ctypes
import gc
import mmap
import os
import tempfile
from typing import Any

import numpy as np

from tests.ranks.harness import run_ranks
from tilescale.comm import bootstrap, tensors
from tilescale.comm.arena import Arena
from tilescale.comm.heap import Heap

SIZE = 4 << 20


class Files(Arena):
    """Arenas in files."""

    def _choose_device(self) -> None:
        return None

    def _map(self) -> list[int]:
        with tempfile.NamedTemporaryFile(delete=False) as made:
            made.truncate(self.segment)
        paths = self.gathered(made.name.encode())
        self.files = []
        for path in paths:
            with open(path, "r+b") as file:
                self.files.append(np.frombuffer(mmap.mmap(file.fileno(), self.segment), np.uint8))
        self.gathered(b"mapped")
        os.unlink(made.name)
        return [f.ctypes.data for f in self.files]

    def _clear(self, at: int, size: int) -> None:  # without torch, whose threads a forked process may lack
        ctypes.memset(self.address(self.world.rank, at), 0, size)

    def _map_stop_word(self) -> int:
        return 0

    def settle(self) -> None:
        self.settled = getattr(self, "settled", 0) + 1


def filled(heap: Heap, team: Any, value: float, count: int = 100) -> tuple[Any, Any]:
    block = heap.allocate(
        team, 4 * count, "filled", lambda b: tensors.fill(b, (100,), "float32", "torch", value)
    )
    return block, tensors.wrap(block, (count,), "float32", "torch")


def test_ranks_allocate_at_one_offset_and_see_one_another() -> None:
    def work() -> list[float]:
        arena = Files(bootstrap.world(), SIZE)
        heap = Heap(arena)
        me, size = heap.place.rank, heap.place.size
        block, mine = filled(heap, heap.world, me)
        found = heap.find(mine.data_ptr() + 8)
        assert found is not None and found[1] is block and found[0].offset >= arena.control
        assert arena.locate(mine.data_ptr()) == (me, found[0].offset) and arena.locate(1) is None
        seen = [
            tensors.wrap(heap.peer_block(found[0], block, r), (100,), "float32", "torch").sum().item()
            for r in range(size)
        ]
        heap.meet(heap.world, "done")
        assert arena.settled >= 3, "every collective call settles first"
        heap.leave()
        return seen

    assert run_ranks(3, work) == [[0.0, 100.0, 200.0]] * 3


def test_what_all_have_dropped_is_used_again() -> None:
    def work() -> list[int]:
        heap = Heap(Files(bootstrap.world(), SIZE))
        offsets = []
        for _ in range(6):
            block, mine = filled(heap, heap.world, 1.0, 300_000)
            found = heap.find(mine.data_ptr())
            assert found is not None
            offsets.append(found[0].offset)
            del block, mine, found
            gc.collect()
        heap.leave()
        return offsets

    first, second = run_ranks(2, work)
    assert first == second and len(set(first)) < 6, "an arena of 4 MiB holds three"


def test_teams_have_words_of_their_own() -> None:
    def work() -> Any:
        arena = Files(bootstrap.world(), SIZE)
        heap = Heap(arena)
        me = heap.place.rank
        before = heap._free.total()
        team = heap.make_team((2, 0)) if me != 1 else None
        seen: Any = None
        if team is not None:
            assert before - heap._free.total() == arena.team_bytes(2)
            block, mine = filled(heap, team, 10 + me)
            other = heap.peer_block(heap.find(mine.data_ptr())[0], block, 1 - team.rank)  # type: ignore[index]
            seen = tensors.wrap(other, (100,), "float32", "torch")[0].item()
            heap.meet(team, "seen")
        heap.meet(heap.world, "done")
        heap.leave()
        return seen

    assert run_ranks(3, work) == [12.0, None, 10.0]
