"""Symmetric memory on GPUs through PyTorch's (`torch.distributed._symmetric_memory`): the arena is one
allocation of it, whose rendezvous gives the peers' addresses. Ranks may share a GPU."""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import os
from typing import Any

from tilescale.comm.arena import Arena, job_file
from tilescale.errors import CommError

#: torch keeps what it was told of a group for good, so each init() of a process names its own
_numbers = itertools.count()


class SymmMem(Arena):
    """Arenas mapped by PyTorch's symmetric memory."""

    name = "PyTorch's symmetric memory"

    def leave(self, unmap: bool) -> None:
        """See :meth:`Arena.leave`. Where the process ends torch must not free the arena: others may still
        read it, and of a GPU that a failed launch has lost it would abort the process, whose last words were
        about that launch."""
        super().leave(unmap)
        if not unmap:
            for held in (self._memory, self._handle):
                ctypes.pythonapi.Py_IncRef(ctypes.py_object(held))

    def _map(self) -> list[int]:
        import torch
        from torch._C._distributed_c10d import _SymmetricMemory

        # Ranks that share a GPU are what a machine with fewer GPUs than ranks has; torch asks to be told that
        # it is meant.
        os.environ.setdefault("TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES", "1")
        number = next(_numbers)
        name, path = f"tilescale-{number}", job_file(self.world, f"store-{number}")
        self._group = _group(name, self.world.rank, self.world.size, path)
        try:
            self._memory = _SymmetricMemory.empty_strided_p2p(
                (self.segment,), (1,), torch.uint8, torch.device("cuda", self.device or 0)
            )
            self._handle = _SymmetricMemory.rendezvous(self._memory, name)
        except RuntimeError as error:
            raise CommError(
                f"PyTorch's symmetric memory: {str(error).splitlines()[0]}",
                hint="TILESCALE_HEAP_SIZE=256M, or GPUs that reach each other",
            ) from None
        bases = [int(p) for p in self._handle.buffer_ptrs]
        self.gathered(b"mapped")  # the store has served
        if self.world.rank == 0:
            with contextlib.suppress(OSError):
                os.unlink(path)
        return bases


def _group(name: str, rank: int, size: int, path: str) -> Any:
    """What torch's rendezvous finds under a name: rank, size and a store. The program's own process groups
    are left alone."""
    import torch.distributed as dist
    from torch._C._distributed_c10d import ProcessGroup, _register_process_group, _SymmetricMemory

    store = dist.FileStore(path, size)
    _SymmetricMemory.set_group_info(name, rank, size, dist.PrefixStore("symmetric", store))
    group = ProcessGroup(dist.PrefixStore("group", store), rank, size)  # where newer versions look
    _register_process_group(name, group)
    return group, store
