"""What a program asks of the machine, by TileLang's names."""

from __future__ import annotations

from typing import Any

from tilescale.errors import TileTypeError


class Cuda:
    """A GPU of NVIDIA's: ``CUDA("cuda")`` is this machine's, or an H200 where there is none."""

    def __init__(self, target: Any = "cuda"):
        from tilescale.compiler.cost import machine_of
        from tilescale.devices import named, parse_target

        name, arch = parse_target(target)
        self.target = named("cuda" if name == "auto" else name, arch)
        self.machine = machine_of(self.target.partition(":")[2])


def CUDA(target: Any = "cuda") -> Cuda:
    """A GPU of NVIDIA's."""
    return Cuda(target)


def auto_infer_current_arch() -> Cuda:
    """This machine's GPU, or an H200 where there is none, so that code can be looked at."""
    return Cuda()


def CDNA(target: Any = "hip") -> Cuda:
    """AMD's GPUs, which are not there.

    Raises:
        TileTypeError: always, by name.
    """
    raise TileTypeError("AMD's GPUs are not there", expected='CUDA("cuda")')


class _Driver:
    """What TileLang's ``driver`` answers."""

    @staticmethod
    def get_num_sms(device_id: int = 0) -> int:
        """Multiprocessors of this machine's GPU; those of an H200 where there is none, so that code can be
        looked at."""
        import torch

        if torch.cuda.is_available():
            return int(torch.cuda.get_device_properties(device_id).multi_processor_count)
        return 132


driver = _Driver()
