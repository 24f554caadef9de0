"""What a target is to the runtime: a record, of data and of functions that a target overrides.
`tilescale.devices` has the table."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tilescale.cache import Entry
from tilescale.errors import InternalError

#: what to write where a GPU is wanted and none is there
RUN_HERE = 'target="cpu" or target="sim", which run it here; its code is in get_kernel_source()'


@dataclass(frozen=True)
class Device:
    """A target. What is said here is true of one on this machine's processor.

    name: what people write; aliases: what else is taken for it, nicknames: what is refused, and it is meant.
    arch: one of its architectures, for messages; "" where it has none. sources: the kinds of
    `Kernel.get_kernel_source`; shown: the one that is not asked for. suffix: of a printed source beside the
    code, which is then of the kind ``shown``. memory: torch's name of the devices on which arguments lie;
    where: the same for people. flag: torch's attribute of tensors there, dlpack: DLPack's types of that
    memory, for targets that tensors decide for. gpu: blocks are threads that share registers and shared
    memory, so tiles have layouts, and a call returns before its work is done. simulated: nothing is compiled,
    and times tell nothing. mute: the launches that log no events, for people; "": they do. absent: how the
    launcher says that the machine has none.
    """

    name: str
    sources: tuple[str, ...]
    shown: str
    aliases: tuple[str, ...] = ()
    nicknames: tuple[str, ...] = ()
    arch: str = ""
    suffix: str = ""
    memory: str = "cpu"
    where: str = "in this machine's memory"
    flag: str = ""
    dlpack: tuple[int, ...] = ()
    gpu: bool = False
    simulated: bool = False
    mute: str = ""
    absent: str = ""

    def load(self, entry: Entry, label: str) -> Callable[..., Any]:
        """What runs a launch of an entry's code: takes an argument for each parameter and refuses with
        ``TS:<check>:…``."""
        raise InternalError(f"{label}: the target {self.name} has no code to load")

    def architecture(self) -> str:
        """What kernels are compiled for when no architecture is named."""
        return ""

    def code_key(self, arch: str) -> tuple[str, ...]:
        """What decides the code beside the program and the machine's environment. Raises TileError: there is
        no compiler for it."""
        return ()

    def instructions(self) -> set[str]:
        """What code that is compiled here may need of another machine's processor."""
        return set()

    def other_than(self, arch: str) -> str | None:
        """This machine's architecture, where it does not run code for ``arch``."""
        return None

    def may_be_here(self) -> bool:
        """Whether this machine may have one. A look at files, after which a process can still be forked."""
        return True

    def is_here(self) -> bool:
        """Whether this machine has one."""
        return True

    def holds(self, value: Any) -> bool | None:
        """Whether a tensor lies there; None of what is no tensor."""
        there = getattr(value, self.flag, None)
        if there is None and hasattr(value, "__dlpack_device__"):
            there = int(value.__dlpack_device__()[0]) in self.dlpack
        return there

    def awaiting(self) -> Callable[[], Any] | None:
        """What returns when all work is done that this process gave it; None where it gave it none."""
        return None
