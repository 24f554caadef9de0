"""Symmetric memory on GPUs through NVSHMEM (nvshmem4py): the arena is one allocation of its symmetric heap,
peers' addresses are ``nvshmem_ptr``'s. Kernels reach peers by plain loads and stores, so they need no NVSHMEM
of their own; with TILESCALE_REMOTE=nvshmem they call it (compiler/cuda/include/ts/nvshmem.cuh). Ranks whose
memory this GPU cannot address are refused either way: hosts read it."""

from __future__ import annotations

import ctypes
import os
from typing import Any

from tilescale import env
from tilescale.comm.arena import GRAIN, Arena
from tilescale.errors import CommError

#: bytes that NVSHMEM itself takes of its heap
_BESIDE = 64 << 20
#: bytes of each team's scratch behind its words, for what kernels put or get by calls (``ts::scratch``), and
#: what aligns it
_SCRATCH = (32 << 20) + 4096


class Nvshmem(Arena):
    """Arenas in NVSHMEM's symmetric heap."""

    name = "NVSHMEM"
    recovers = False

    def _map(self) -> list[int]:
        try:
            import nvshmem.bindings as bindings
            import nvshmem.core as core
            from cuda.core import Device
        except ImportError as error:
            raise CommError(
                f"NVSHMEM's Python package is missing ({error})", hint="pip install nvshmem4py-cu13"
            ) from None
        os.environ.setdefault("NVSHMEM_SYMMETRIC_SIZE", str(self.segment + _BESIDE))
        device = Device(self.device)
        device.set_current()
        try:
            core.init(
                device=device,
                uid=self._unique_id(core),
                rank=self.world.rank,
                nranks=self.world.size,
                initializer_method="uid",
            )
            base = int(bindings.align(GRAIN, self.segment))
            bases = (
                [base if r == self.world.rank else int(bindings.ptr(base, r)) for r in range(self.world.size)]
                if base
                else []
            )
        except Exception as error:  # noqa: BLE001 (its errors have no class in common)
            raise CommError(f"NVSHMEM does not start: {error}") from None
        self._core, self._device = core, device
        if not base:
            raise CommError(
                f"NVSHMEM has no {self.segment} bytes of symmetric memory", hint="TILESCALE_HEAP_SIZE=256M"
            )
        far = [r for r, at in enumerate(bases) if not at]
        if far:
            text = f"the GPU of rank {self.world.rank} cannot address the memory of rank {far[0]}"
            raise CommError(text, expected="GPUs that reach each other's memory")
        if env.REMOTE.get():
            # nvshmem4py has loaded the library: this gives the same one, by its name.
            init = ctypes.CDLL("libnvshmem_host.so.3").nvshmemx_culibrary_init
            self._lib.ts_gpu_far(ctypes.c_int64(ctypes.cast(init, ctypes.c_void_p).value or 0))
        return bases

    def team_bytes(self, size: int) -> int:
        """See :meth:`Arena.team_bytes`; with room for what kernels stage."""
        return super().team_bytes(size) + (_SCRATCH if env.REMOTE.get() else 0)

    def _unique_id(self, core: Any) -> Any:
        """Rank 0's number of this job, which every rank hands to NVSHMEM."""
        made = core.get_unique_id(empty=self.world.rank != 0)
        size = made._data.nbytes
        letters = self.gathered(ctypes.string_at(made.ptr, size))
        ctypes.memmove(made.ptr, letters[0].ljust(size, b"\0"), size)
        return made
