"""What the host code of simulated ranks does with symmetric memory, where programs are checked: who reads and
writes which bytes of whom, and what orders it.

Each rank's host has a vector clock. Meetings of hosts and ordered launches join the clocks of those who take
part; an access that the rank's clock does not order behind another rank's is a race. In an ordered launch a
rank's memory is touched behind its own host code and that of whoever touches it, not behind everybody's;
behind the launch everybody is behind all of it.

- torch: each operation of a rank's thread passes by its name in ATen, whose schema says what it reads and
  writes. What leaves torch (``numpy()``, ``data_ptr()``, DLPack) is out of sight from there on: of a peer's
  memory that is refused; of the own it counts as reads that last for ever, and writes are found as below.
- NumPy arrays are out of sight from the beginning. What a rank wrote into its own is found by comparing when
  its turn ends, since one rank runs at a time; what it reads is not found, so a host that writes into a
  peer's array is refused. `comm.peer` gives a `PeerArray`, which sees who reads it.
"""

from __future__ import annotations

import bisect
import functools
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from tilescale.comm import sim
from tilescale.errors import CommError, Loc

#: what leaves torch with the address of a tensor; what looks at values without an operation of ATen, or where
#: torch disables dispatch modes (printing does)
_ESCAPES = frozenset(
    ("numpy", "__array__", "data_ptr", "untyped_storage", "storage", "_typed_storage", "__dlpack__", "set_")
)
_LOOKS = frozenset(("tolist", "__repr__", "__format__", "__deepcopy__"))
#: operations that look at a tensor's shape alone
_SHAPES = frozenset(
    (
        "empty_like",
        "new_empty",
        "new_empty_strided",
        "zeros_like",
        "ones_like",
        "full_like",
        "new_zeros",
        "new_ones",
        "new_full",
        "rand_like",
        "randn_like",
    )
)
_HINT = "comm.barrier() between the two, or a launch that both ranks make"

_local = threading.local()


@dataclass
class Access:
    """Bytes of one rank's memory that a rank has touched at its time ``clock``.

    ``mask``: which of all, None: all from low to high. lasting: it may do so again at any time. known: other
    ranks that are behind it by what a launch did itself.
    """

    rank: int
    clock: int
    writes: bool
    what: str
    loc: Loc | None
    low: int
    high: int
    mask: Any = None
    lasting: bool = False
    known: frozenset[int] = frozenset()
    host: bool = True  # or a kernel

    def same(self, other: Access) -> bool:
        """Whether both are one statement's at one time, so that the bytes alone tell them apart."""
        mine = (self.rank, self.clock, self.writes, self.loc, self.what, self.lasting, self.known)
        return mine == (
            other.rank,
            other.clock,
            other.writes,
            other.loc,
            other.what,
            other.lasting,
            other.known,
        )

    def overlap(self, low: int, high: int, mask: Any) -> tuple[int, int] | None:
        """The first and the last byte, and one more, that both touch."""
        low, high = max(low, self.low), min(high, self.high)
        if low >= high:
            return None
        both = [m[low:high] for m in (self.mask, mask) if m is not None]
        if not both:
            return low, high
        hit = functools.reduce(lambda a, b: a & b, both).nonzero()[0]
        return (low + int(hit[0]), low + int(hit[-1]) + 1) if hit.size else None


class Hosts:
    """The hosts of one simulated job. ``report``: takes what is found."""

    def __init__(self, job: sim.SimWorld, report: Callable[[Any], None]):
        self.job, self.report = job, report
        self.clocks = [[int(a == b) for b in range(job.size)] for a in range(job.size)]
        self.accesses: weakref.WeakKeyDictionary[sim.Twins, dict[int, list[Access]]] = (
            weakref.WeakKeyDictionary()
        )
        self.starts: list[int] = []  # where memory lies, in order; beside it whose it is
        self.ranges: list[tuple[int, weakref.ref[sim.Twins], int]] = []
        # Memory that is compared → as it was.
        self.unseen: weakref.WeakKeyDictionary[sim.SimBlock, Any] = weakref.WeakKeyDictionary()
        self.recent: dict[
            int, dict[Any, tuple[sim.Twins, int, Access]]
        ] = {}  # rank → what its host touched since it last met others
        self.meets: Callable[[Sequence[int]], None] = lambda ranks: None
        # (its address, owner): others have written there, so it is not its owner's doing.
        self.stale: set[tuple[int, int]] = set()

    # -- order
    # ----------------------------------------------------------------------------------------------------
    def met(self, ranks: Sequence[int]) -> None:
        """These ranks are behind all that any of them did."""
        self.meets(ranks)
        for rank in ranks:
            self.recent.pop(rank, None)
        joined = [max(self.clocks[r][k] for r in ranks) for k in range(self.job.size)]
        for rank in ranks:
            self.clocks[rank] = list(joined)
            self.clocks[rank][rank] += 1

    def looked(self, rank: int, at: Loc | None) -> None:
        """A rank's turn ends, where its program calls ``at`` (None: with the program): what it wrote into
        memory out of sight."""
        import numpy

        mine = self.job.ranks[rank].blocks
        for block in sorted((b for b in self.unseen if b in mine), key=lambda b: b.address):
            changed = block.memory != self.unseen[block]
            if changed.any() and (block.address, rank) not in self.stale:
                what = "host code in front of this" if at else "host code at the end of the program"
                access = Access(rank, self.clocks[rank][rank], True, what, at, 0, len(changed), changed)
                self.add(block.twins, rank, access)
            if changed.any():
                numpy.copyto(self.unseen[block], block.memory)
        for block in self.unseen:
            if any((block.address, r) in self.stale for r in block.twins.memory):
                numpy.copyto(self.unseen[block], block.memory)
        self.stale.clear()

    # -- accesses
    # -------------------------------------------------------------------------------------------------
    def find(self, address: int) -> tuple[sim.Twins, int, int] | None:
        """Whose symmetric memory an address lies in: the allocation, the world's rank, where it begins."""
        k = bisect.bisect_right(self.starts, address) - 1
        if k < 0:
            return None
        end, twins, owner = self.ranges[k]
        alive = twins()
        return (alive, owner, self.starts[k]) if address < end and alive is not None else None

    def given(self, tensor: Any, block: Any, kind: str) -> Any:
        """A rank gets memory of its own."""
        for owner, memory in block.twins.memory.items():
            start = memory.__array_interface__["data"][0]
            k = bisect.bisect_left(self.starts, start)
            entry = (start + len(memory), weakref.ref(block.twins), owner)
            if k < len(self.starts) and self.starts[k] == start:
                self.ranges[k] = entry
            else:
                self.starts.insert(k, start)
                self.ranges.insert(k, entry)
        if kind == "numpy":
            self.unseen[block] = block.memory.copy()
        else:
            _watch_torch()
        return tensor

    def peer(self, tensor: Any, kind: str) -> Any:
        """A rank gets a view of a peer's memory; our own code, whose order is our own, gets it as it is."""
        frame = sys._getframe(1)
        while (
            str(frame.f_globals.get("__name__", "")).startswith("tilescale.comm") and frame.f_back is not None
        ):
            frame = frame.f_back
        if str(frame.f_globals.get("__name__", "")).partition(".")[0] == "tilescale":
            return tensor
        if kind == "numpy":
            return peer_array(self, tensor)
        _watch_torch()
        return tensor

    @staticmethod
    def thread_ends() -> None:
        """Nobody looks at this thread's operations any more. What is left on torch's stacks would be given
        back by the thread's destructors, which ask for Python's lock, and end the process where Python has
        ended by then."""
        if getattr(_local, "watching", False):
            _local.watching = False
            for length, pop, _ in _stacks():
                while length():
                    pop()

    def touched(
        self,
        rank: int,
        address: int,
        shape: Sequence[int],
        strides: Sequence[int],
        item: int,
        writes: bool,
        loc: Loc | None,
    ) -> None:
        """Host code of a rank touches a tensor; strides in bytes."""
        if 0 in shape or (found := self.find(address)) is None:
            return
        twins, owner, start = found
        low, high, mask = _bytes(address - start, shape, strides, item, len(twins.memory[owner]))
        what = ("host code" if owner == rank else "comm.peer") + (" that writes" if writes else " that reads")
        access = Access(rank, self.clocks[rank][rank], writes, what, loc, low, high, mask)
        if writes and owner != rank:
            self._require_seen(twins, owner, access)
            self.stale.add((start, owner))
        self.add(twins, owner, access)

    def _require_seen(self, twins: sim.Twins, owner: int, access: Access) -> None:
        """Raises CommError where the owner's reads of what a peer writes are out of sight."""
        if any(b.twins is twins for b in self.job.ranks[owner].blocks if b in self.unseen):
            raise _refused(access.loc, owner, twins)

    def _escaped(self, twins: sim.Twins, owner: int) -> bool:
        return any(a.lasting for a in self.accesses.get(twins, {}).get(owner, ()))

    def escaped(self, rank: int, address: int, how: str, loc: Loc | None) -> None:
        """A tensor leaves torch.

        Raises:
            CommError: it is a peer's, or a peer has written it and nothing orders that in front of this.
        """
        if (found := self.find(address)) is None:
            return
        twins, owner, _ = found
        if owner != rank:
            raise CommError(
                f"{how}() of a peer's memory: what is done with it then cannot be seen, and so not checked",
                loc=loc,
                expected="operations of torch on what comm.peer gives",
                hint=f"comm.peer(…).clone().{how}()",
            )
        mine = self.accesses.setdefault(twins, {}).setdefault(owner, [])
        late = [a for a in mine if a.rank != rank and a.writes and self._behind(a, rank)]
        if late:
            raise _refused(loc, owner, twins)
        if not self._escaped(twins, owner):
            mine.append(
                Access(
                    rank,
                    self.clocks[rank][rank],
                    False,
                    f"{how}()",
                    loc,
                    0,
                    len(twins.memory[owner]),
                    lasting=True,
                )
            )
        for block in self.job.ranks[rank].blocks:
            if block.twins is twins and block not in self.unseen:
                self.unseen[block] = block.memory.copy()

    def _behind(self, access: Access, rank: int) -> bool:
        """Whether ``rank`` is not behind an access."""
        return access.clock > self.clocks[rank][access.rank] and rank not in access.known

    def add(self, twins: sim.Twins, owner: int, access: Access) -> None:
        """An access of host code: what it collides with is reported."""
        bytes_ = None if access.mask is None else access.mask.tobytes()
        key = (id(twins), owner, access.low, access.high, bytes_, access.writes, access.loc)
        self.recent.setdefault(access.rank, {})[key] = twins, owner, access
        there = self.accesses.setdefault(twins, {}).setdefault(owner, [])
        for other in there:
            harmless = other.rank == access.rank or other.lasting or not (access.writes or other.writes)
            if harmless or not self._behind(other, access.rank):
                continue
            if (hit := other.overlap(access.low, access.high, access.mask)) is not None:
                self.report(self._race(twins, owner, access, other, hit))
        self.remember(twins, owner, access)

    def remember(self, twins: sim.Twins, owner: int, access: Access) -> None:
        there = self.accesses.setdefault(twins, {}).setdefault(owner, [])
        if len(there) > 64:
            others = [r for r in twins.memory if r != owner]
            there[:] = [
                a
                for a in there
                if a.lasting or any(self._behind(a, r) for r in (owner, *others) if r != a.rank)
            ]
        alike = next((a for a in there if a.same(access)), None)
        if alike is None:
            there.append(access)
        elif (alike.low, alike.high) != (access.low, access.high) or access.mask is not None:
            alike.mask = _whole(alike, len(twins.memory[owner])) | _whole(access, len(twins.memory[owner]))
            alike.low, alike.high = min(alike.low, access.low), max(alike.high, access.high)

    @staticmethod
    def whole(access: Access, size: int) -> Any:
        """Which of all bytes of an allocation an access touches."""
        return _whole(access, size)

    def _race(self, twins: sim.Twins, owner: int, this: Access, that: Access, hit: tuple[int, int]) -> Any:
        from tilescale.compiler.findings import Finding, Where

        does, did = ("writes" if a.writes else "reads" for a in (this, that))
        memory = f"bytes {hit[0]}:{hit[1]} of {twins.what} in the memory of rank {owner}"
        text = (
            f"rank {this.rank} {does} {memory}, which rank {that.rank} {did} with nothing that orders the two"
        )
        return Finding(
            "race",
            text,
            Where(this.what, this.loc, this.rank),
            (Where(that.what, that.loc, that.rank),),
            _HINT,
        )

    # -- launches
    # -------------------------------------------------------------------------------------------------
    def launched(
        self,
        calls: dict[int, Any],
        members: Sequence[int],
        written_by: Callable[[], Sequence[dict[str, Any]]],
        orders: bool,
    ) -> None:
        """A launch for the team ``members``, by those ranks of it that ``calls`` has. written_by: who wrote
        each of their arguments, see compiler/checks/run.py. orders: what hosts do behind it comes behind
        it."""
        there = []
        for k, (rank, call) in enumerate(calls.items()):
            for p in call.kernel.params:
                argument = call.tensors.get(p["name"])
                if (
                    argument is None
                    or not argument.array.size
                    or (found := self.find(argument.address)) is None
                ):
                    continue
                twins, owner, start = found
                self.stale.add((start, owner))
                others = any(a.rank != owner for a in self.accesses.get(twins, {}).get(owner, ()))
                if p["kind"] not in ("signal", "packets") and (others or not orders):
                    there.append((k, rank, p["name"], twins, owner, argument.address - start))
        touched = written_by() if there else []
        for k, rank, name, twins, owner, at in there:
            self._argument(rank, calls[rank], name, (twins, owner, at), touched[k].get(name), members, orders)

    def _argument(
        self,
        rank: int,
        call: Any,
        name: str,
        place: tuple[sim.Twins, int, int],
        writers: Any,
        members: Sequence[int],
        orders: bool,
    ) -> None:
        (twins, owner, at), array = place, call.tensors[name].array
        geometry = (at, array.shape, array.strides, array.itemsize, len(twins.memory[owner]))
        low, high, mask = _bytes(*geometry)
        what = f"{call.kernel.label}, {name}"
        reads = Access(rank, self.clocks[rank][rank], False, what, call.loc, low, high, mask, host=False)
        made = [(rank, reads)]
        for k, who in enumerate(members) if writers is not None else ():
            wrote = writers.by == k
            if wrote.any():
                known = frozenset(m for j, m in enumerate(members) if writers.known[j][wrote].all())
                mine = _bytes(*geometry, wrote)[2]
                now = self.clocks[who][who]
                wrote_it = Access(who, now, True, what, call.loc, low, high, mine, known=known, host=False)
                made.append((who, wrote_it))
        for who, access in made:
            self._reached(twins, owner, access, [owner, who])
            if not orders and (access.writes or who == owner):
                self.remember(twins, owner, access)

    def _reached(self, twins: sim.Twins, owner: int, access: Access, behind: Sequence[int]) -> None:
        """A kernel's access, which comes behind the host code of the ranks ``behind``: reports the host code
        of others that it meets."""
        for other in self.accesses.get(twins, {}).get(owner, ()):
            harmless = (
                other.rank in behind or other.lasting or not (access.writes or other.writes) or not other.host
            )
            if harmless or not all(self._behind(other, r) for r in behind):
                continue
            if (hit := other.overlap(access.low, access.high, access.mask)) is not None:
                self.report(self._race(twins, owner, access, other, hit))


def _whole(access: Access, size: int) -> Any:
    import numpy

    made = numpy.zeros(size, bool)
    made[access.low : access.high] = True if access.mask is None else access.mask[access.low : access.high]
    return made


def _bytes(
    at: int, shape: Sequence[int], strides: Sequence[int], item: int, size: int, chosen: Any = None
) -> tuple[int, int, Any]:
    """The bytes of an allocation that a tensor at byte ``at`` covers (its elements where ``chosen`` holds):
    from, up to, and which of the whole allocation, None where it is all of them."""
    import numpy

    low = at + sum((n - 1) * s for n, s in zip(shape, strides, strict=True) if s < 0)
    high = at + item + sum((n - 1) * s for n, s in zip(shape, strides, strict=True) if s > 0)
    if chosen is None and high - low == item * functools.reduce(lambda a, b: a * b, shape, 1):
        return low, high, None
    mask = numpy.zeros(size, bool)
    view = numpy.lib.stride_tricks.as_strided(mask[at:], (*shape, item), (*strides, 1))
    view[...] = True if chosen is None else numpy.asarray(chosen).reshape(*shape, 1)
    return low, high, mask


def _refused(loc: Loc | None, owner: int, twins: sim.Twins) -> CommError:
    return CommError(
        f"host code writes into the memory of rank {owner} ({twins.what}), and what rank {owner} reads of "
        "it outside torch cannot be seen: "
        "whether the two are ordered cannot be checked",
        loc=loc,
        expected="torch tensors of which nothing leaves torch (numpy(), data_ptr(), DLPack) while peers "
        "write them",
        hint='comm.empty(…, like="torch"), x.clone().numpy(); or a kernel that writes with T.copy(…, '
        "dst=rank)",
    )


def _program() -> tuple[sim.SimRank, Loc] | None:
    """The rank whose program is under way, and where; None where the call is our own."""
    rank = sim.rank_of_thread()
    if rank is None or rank.job.hosts is None:
        return None
    frame = sys._getframe(1)
    while frame is not None:
        name = str(frame.f_globals.get("__name__", ""))
        head = name.partition(".")[0]
        if (
            name == __name__
            or head in ("torch", "numpy", "copy")
            or name.startswith(("tilescale.ops", "tilescale.nn"))
        ):
            frame = frame.f_back  # type: ignore[assignment]
            continue
        return None if head == "tilescale" else (rank, Loc(frame.f_code.co_filename, frame.f_lineno))
    return None


# ---- torch


@functools.cache
def _modes() -> tuple[type, type]:
    """The classes of what sees a thread's operations, and its calls."""
    from torch.overrides import TorchFunctionMode
    from torch.utils._python_dispatch import TorchDispatchMode

    class Operations(TorchDispatchMode):
        @classmethod
        def _should_skip_dynamo(cls) -> bool:
            # Else torch wraps the method below, and its first call imports all of torch.compile: two seconds.
            return False

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if (at := _program()) is not None and func._schema.name.partition("::")[2] not in _SHAPES:
                with _Busy():
                    for tensor, writes in _operands(func._schema, args, kwargs or {}):
                        _touched(at[0], tensor, writes, at[1])
            return func(*args, **(kwargs or {}))

    class Calls(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            import torch

            name = getattr(func, "__name__", "")
            known = name in _ESCAPES or name in _LOOKS
            # Operations ask where memory begins, and launch kernels on it, which are followed.
            ours = str(sys._getframe(1).f_globals.get("__name__", "")).startswith("tilescale.ops")
            known &= not (ours and name == "data_ptr")
            if (
                not known
                or getattr(_local, "busy", False)
                or not args
                or not isinstance(args[0], torch.Tensor)
            ):
                return func(*args, **(kwargs or {}))
            if (at := _program()) is not None:
                with _Busy():
                    if name in _LOOKS:
                        _touched(at[0], args[0], False, at[1])
                    elif args[0].device.type == "cpu":
                        at[0].job.hosts.escaped(at[0].rank, args[0].data_ptr(), name, at[1])
            return func(*args, **(kwargs or {}))

    return Operations, Calls


class _Busy:
    """While our own code looks at tensors."""

    def __enter__(self) -> None:
        self.before = getattr(_local, "busy", False)
        _local.busy = True

    def __exit__(self, *error: object) -> None:
        _local.busy = self.before


def _stacks() -> tuple[tuple[Callable[[], int], Callable[[], Any], Callable[[Any], None]], ...]:
    """The modes of this thread in torch, its calls' and its operations': how many, take the last one off, put
    one on."""
    from torch import overrides
    from torch.utils import _python_dispatch as dispatch

    return (
        (overrides._len_torch_function_stack, overrides._pop_mode, overrides._push_mode),
        (dispatch._len_torch_dispatch_stack, dispatch._pop_mode, dispatch._push_mode),
    )


def _watch_torch() -> None:
    """From now on this thread's operations and calls of torch are seen: below what the program itself has
    entered, which leaves in its own order."""
    if getattr(_local, "watching", False):
        return
    _local.watching = True
    for mode, (length, pop, push) in zip(reversed(_modes()), _stacks(), strict=True):
        above = [pop() for _ in range(length())]
        push(mode())
        for other in reversed(above):
            push(other)


def _operands(schema: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Iterator[tuple[Any, bool]]:
    """The tensors of an operation whose elements it reads or writes. A view of a tensor touches nothing of
    it."""
    import torch

    views = any(r.alias_info is not None and not r.alias_info.is_write for r in schema.returns)
    given = [(a, args[k] if k < len(args) else kwargs.get(a.name)) for k, a in enumerate(schema.arguments)]
    for declared, value in given:
        alias = declared.alias_info
        if views and alias is not None and not alias.is_write:
            continue
        for one in value if isinstance(value, (list, tuple)) else [value]:
            if isinstance(one, torch.Tensor):
                yield one, alias is not None and bool(alias.is_write)


def _touched(rank: sim.SimRank, tensor: Any, writes: bool, loc: Loc) -> None:
    if tensor.device.type == "cpu" and tensor.layout is sys.modules["torch"].strided:
        item = tensor.element_size()
        strides = [s * item for s in tensor.stride()]
        rank.job.hosts.touched(rank.rank, tensor.data_ptr(), tuple(tensor.shape), strides, item, writes, loc)


# ---- NumPy


def peer_array(hosts: Hosts, array: Any) -> Any:
    """A peer's NumPy array, which sees who reads it."""
    return _peer_class()(hosts, array)


@functools.cache
def _peer_class() -> type:
    import numpy

    class PeerArray(numpy.lib.mixins.NDArrayOperatorsMixin):
        """An array in a peer's memory, to be read: NumPy's functions, methods and operators work on what it
        holds when they are called."""

        def __init__(self, hosts: Hosts, array: Any):
            self._hosts, self._array = hosts, array
            self.shape, self.dtype, self.ndim, self.size = array.shape, array.dtype, array.ndim, array.size

        def _read(self) -> Any:
            a, at = self._array, _program()
            if at is not None:
                self._hosts.touched(
                    at[0].rank, a.__array_interface__["data"][0], a.shape, a.strides, a.itemsize, False, at[1]
                )
            made = a.copy()
            made.flags.writeable = False
            return made

        def __array__(self, dtype: Any = None, copy: Any = None) -> Any:
            return self._read() if dtype is None else self._read().astype(dtype)

        def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, out: Any = None, **more: Any) -> Any:
            if out is not None:
                if any(isinstance(o, PeerArray) for o in out):
                    self._refuse()
                more["out"] = out
            return getattr(ufunc, method)(
                *(i._read() if isinstance(i, PeerArray) else i for i in inputs), **more
            )

        def __array_function__(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
            return func(*map(_read, args), **{name: _read(value) for name, value in kwargs.items()})

        def __getattr__(self, name: str) -> Any:
            if name.startswith("__"):
                raise AttributeError(name)
            return getattr(self._read(), name)

        def __getitem__(self, index: Any) -> Any:
            """A part of it, still unread; one element, or what a list or a mask chooses, is read."""
            parts = index if isinstance(index, tuple) else (index,)
            if not all(
                i is None or i is Ellipsis or isinstance(i, (int, slice, numpy.integer)) for i in parts
            ):
                return self._read()[index]
            part = PeerArray(
                self._hosts, self._array[parts if any(i is Ellipsis for i in parts) else (*parts, ...)]
            )
            return part._read()[()] if part.ndim == 0 else part

        def __len__(self) -> int:
            return len(self._array)

        def __iter__(self) -> Any:
            return iter(self._read())

        def __float__(self) -> float:
            return float(self._read())

        def __int__(self) -> int:
            return int(self._read())

        def __bool__(self) -> bool:
            return bool(self._read())

        def __repr__(self) -> str:
            return repr(self._read())

        def __setitem__(self, index: Any, value: Any) -> None:
            self._refuse()

        def _refuse(self) -> None:
            at = _program()
            found = self._hosts.find(self._array.__array_interface__["data"][0])
            assert found is not None
            raise _refused(None if at is None else at[1], found[1], found[0])

        @property
        def peers_array(self) -> Any:
            """The memory itself, for those who only ask whose it is (arrays.py)."""
            return self._array

    def _read(value: Any) -> Any:
        if isinstance(value, (list, tuple)):
            return type(value)(map(_read, value))
        return value._read() if isinstance(value, PeerArray) else value

    return PeerArray
