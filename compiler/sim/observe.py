"""What a machine tells whoever listens to a run: the exploration of interleavings, and the timeline. Nobody
listens unless asked."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tilescale.compiler.ir.contexts import Site
    from tilescale.compiler.ir.operations import TileOp
    from tilescale.compiler.sim.counters import Counter
    from tilescale.compiler.sim.flights import Put
    from tilescale.compiler.sim.machine import Executor, Meeting
    from tilescale.compiler.sim.memory import Storage
    from tilescale.compiler.sim.packets import Packets


class Observer:
    """Every method is called as the thing happens, by the executor that does it. Here they do nothing."""

    def accessed(self, ex: Executor, storage: Storage, key: Any, mode: str, posted: bool) -> None:
        """The elements ``key`` are touched: "read", "write", "land" (a write on its way arrives), "update"
        (by the effect table of an atomic operation) and then "load" or "atomic" by what it does. ``posted``:
        a write that lands later."""

    def posted(self, ex: Executor, peer: int) -> None:
        """A remote write went on its way."""

    def landed(self, ex: Executor, peer: int) -> None:
        """The oldest remote write of ``ex`` on its way to ``peer`` lands."""

    def performed(self, ex: Executor, op: TileOp, site: Site, owner: int | None, accesses: list[Any]) -> None:
        """An operation of the language is about to be done: its effect table as (view, mode, remote) of what
        it touches."""

    def signalled(self, ex: Executor | Put, counter: Counter, amount: int, op: str) -> None:
        """A counter is about to be signalled, by a copy beside its executor too."""

    def peeked(self, ex: Executor, counter: Counter) -> None:
        """A counter is looked at without waiting."""

    def waits(self, ex: Executor, site: Site, counter: Counter) -> None:
        """A wait looks at its counter for the first time."""

    def observed(self, ex: Executor, site: Site, counter: Counter, cmp: str, value: int) -> None:
        """A wait ends."""

    def put(self, ex: Executor, box: Packets, key: Any, site: Site, owner: int) -> None:
        """The packets ``key`` are in the box of rank ``owner``."""

    def awaits(self, ex: Executor, box: Packets, key: Any, site: Site) -> None:
        """Packets of the own box are looked for, for the first time."""

    def took(self, ex: Executor, box: Packets, key: Any, site: Site) -> None:
        """The packets ``key`` of the own box have come."""

    def came(self, ex: Executor, site: Site, meeting: Meeting) -> None:
        """An executor came to a barrier; the last one where as many have come as are expected."""

    def forked(self, ex: Executor, child: Executor) -> None:
        """An executor below the block begins."""

    def ended(self, ex: Executor) -> None:
        """An executor has done its last step."""

    def turned(self, ex: Executor, loop: int) -> None:
        """A ``while`` goes into its next round."""
