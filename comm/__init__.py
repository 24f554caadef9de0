"""Ranks, symmetric memory and signals: what a program does on the host.

Every call that allocates, and ``barrier``, ``team`` and ``finalize``, is collective: all ranks of the team
make the same calls in the same order. Ranks that do not are told so, by name, when they meet.

    import tilescale.comm as comm comm.init() x = comm.empty((1024, 1024), torch.float16)   # a torch tensor;
    its twins lie at the same place of every rank's heap s = comm.signals(8)                            # what
    a T.Signal parameter takes comm.peer(x, 1)[0] = 3                         # rank 1's memory comm.barrier()
"""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any

from tilescale import env, native
from tilescale.comm import bootstrap, sim
from tilescale.comm.backend import Outside, Team
from tilescale.comm.bootstrap import World
from tilescale.errors import CommError, TileTypeError, TileValueError

if TYPE_CHECKING:
    from tilescale.comm.backend import Backend

__all__ = [
    "World",
    "abort",
    "barrier",
    "empty",
    "finalize",
    "full",
    "init",
    "is_initialized",
    "local_rank",
    "packets",
    "peer",
    "rank",
    "sharing",
    "signals",
    "team",
    "world",
    "world_size",
    "zeros",
]

_lock = threading.RLock()
_process: Backend | None = None  # this process's, where ranks are processes
_pid = 0
_heap_size = 0
_left: World | None = None  # this rank's place among those that were left when the last job broke
_keepers: list[Callable[[Iterable[Team]], None]] = []


def init(heap_size: int | None = None, *, recover: bool = False) -> None:
    """Joins the job that the launcher's environment describes; alone it is one rank. Idempotent.

    ``heap_size``: bytes of symmetric memory a rank, alike on all (default TILESCALE_HEAP_SIZE; simulated
    ranks need none). ``recover``, alike on all ranks: this process may go on when another one dies. Then
    waits end within seconds, in kernels too, with an error that names it, and the GPU stays usable;
    ``finalize()`` on all ranks that are left, and ``init()`` again joins them. On GPUs a launch that was
    given up leaves wrong results, which the next call of tilescale says, such as
    `tilescale.cuda.synchronize`.

    Raises CommError when ranks do not come, /dev/shm has no room, or ranks that recover are on several
    machines; TileValueError when the memory is there already, of another size.
    """
    global _process, _pid, _heap_size
    here = sim.here()
    if here is not None:
        here.init()
        return
    with _lock:
        if _process is not None and _pid == os.getpid():
            if heap_size is not None and heap_size != _heap_size:
                before = f"an init() that made {_heap_size} bytes"
                raise TileValueError(
                    f"init(heap_size={heap_size}) after {before}", hint="heap_size= in the first init()"
                )
            if recover and not getattr(_process, "recovers", True):
                raise TileValueError(
                    "init(recover=True) after an init() without it", hint="recover=True in the first init()"
                )
            return
        place, _heap_size = _place(), heap_size or env.HEAP_SIZE.get()
        _hook_exits(place)
        if place.size == 1 and env.TARGET.get() == "sim":
            _process = sim.SimWorld(1).ranks[0]
        else:
            from tilescale.comm.heap import Heap

            heap = Heap(_memory()(place, _heap_size))
            if recover:
                heap.recover()
            _process = heap
        _pid = os.getpid()


def _memory() -> Any:
    """What maps the ranks' symmetric memory, by TILESCALE_HEAP; where that is open, PyTorch's on GPUs if
    kernels are compiled for them."""
    which = env.HEAP.get()
    if which == "auto":
        which = env.TARGETS[env.TARGET.get()]
    if which == "symm_mem":
        if env.REMOTE.get():
            raise CommError(
                "TILESCALE_REMOTE=nvshmem with symmetric memory by PyTorch",
                expected="memory that NVSHMEM has registered",
                hint="TILESCALE_HEAP=nvshmem",
            )
        from tilescale.comm.symm_mem import SymmMem

        return SymmMem
    if which == "nvshmem":
        from tilescale.comm.nvshmem import Nvshmem

        return Nvshmem
    from tilescale.comm.shm import Shm

    return Shm


def behind() -> Backend | None:
    """What stands behind this module for the calling thread; None before ``init``."""
    here = sim.here()
    if here is not None:
        return here if here.joined else None
    return _process if _pid == os.getpid() else None


def is_initialized() -> bool:
    """Whether ``init`` has been called in this process (by this simulated rank)."""
    return behind() is not None


def _need() -> Backend:
    found = behind()
    if found is not None:
        return found
    if _process is not None and sim.here() is None:
        raise CommError(
            "this process was forked from a rank and is none itself",
            hint="init() in the processes that are ranks",
        )
    raise CommError("tilescale.comm is not initialised", hint="tilescale.comm.init() first, on every rank")


def _joined(mine: Backend, team: Team | None) -> Team:
    """A team of this job; without one that of all ranks. One of before a ``finalize`` has no memory any more.

    Raises:
        TileTypeError, TileValueError: something else.
    """
    if team is None:
        return mine.world
    if isinstance(team, Outside):
        raise TileValueError(
            f"rank {mine.place.rank} is not in the team of ranks {list(team.members)}",
            expected="the call on the team's ranks alone",
            hint="if team: …, of what tilescale.comm.team returned",
        )
    if not isinstance(team, Team):
        raise TileTypeError(
            f"team={team!r}",
            expected="what tilescale.comm.team returned",
            hint="team=tilescale.comm.team(ranks)",
        )
    if mine.teams.get(team.members) is not team:
        raise TileValueError(
            f"the team of ranks {list(team.members)} is none of this job: it was made before a finalize()",
            hint="tilescale.comm.team(ranks) again, behind init()",
        )
    return team


def world() -> World:
    """This rank's place among the ranks of its job. Raises CommError where the environment is incomplete or
    contradicts itself."""
    here = sim.here()
    if here is not None:
        return here.place
    if _process is not None and _pid == os.getpid():
        return _process.place
    return _place()


def _place() -> World:
    """This rank's in the job that it may join."""
    return _left if _left is not None and _pid == os.getpid() else bootstrap.world()


def rank() -> int:
    """This process's number among the ranks."""
    return world().rank


def world_size() -> int:
    """How many ranks there are."""
    return world().size


def local_rank() -> int:
    """This process's number among the ranks on this machine."""
    return world().local_rank


def sharing() -> int:
    """How many ranks share one of the job's GPUs, at most; 1 on processors, and before ``init``."""
    if sim.here() is not None or _process is None or _pid != os.getpid():
        return 1
    return getattr(_process, "sharing", 1)


# ---- memory


def _allocate(
    call: str, shape: int | Sequence[int], dtype: Any, like: str | None, team: Team | None, value: Any = None
) -> Any:
    mine = _need()
    from tilescale.comm import tensors

    extents, name, kind = tensors.normal_shape(shape), tensors.dtype_name(dtype), tensors.choose(like)
    what = f"{call}({extents}, {name})"

    def write(block: Any) -> None:
        tensors.fill(block, extents, name, kind, value)

    fill = mine.fresh(name) if value is None else write
    block = mine.allocate(_joined(mine, team), tensors.byte_size(extents, name), what, fill)
    return _followed(tensors.wrap(block, extents, name, kind), block, kind)


def _followed(tensor: Any, block: Any, kind: str, *, peers: bool = False) -> Any:
    """A tensor as its program gets it: where simulated ranks are checked, what host code does with it is
    followed."""
    here = sim.rank_of_thread()
    hosts = None if here is None else here.job.hosts
    if hosts is None:
        return tensor
    return hosts.peer(tensor, kind) if peers else hosts.given(tensor, block, kind)


def empty(
    shape: int | Sequence[int], dtype: Any = "float32", *, like: str | None = None, team: Team | None = None
) -> Any:
    """A tensor in symmetric memory, at the same heap offset on every rank of the team; contents undefined.
    Collective.

    ``dtype``: a torch dtype, a NumPy dtype or a name. ``like``: ``"torch"`` or ``"numpy"``, by default torch
    where it is installed. ``team``: whose ranks (default: all). Row-major, aligned to 4,096 bytes. When every
    rank has dropped it, a later collective call frees it. Raises CommError when ranks ask for different
    things or memory is out.
    """
    return _allocate("empty", shape, dtype, like, team)


def zeros(
    shape: int | Sequence[int], dtype: Any = "float32", *, like: str | None = None, team: Team | None = None
) -> Any:
    """Like ``empty``, filled with zeros on every rank before it returns on any."""
    return _allocate("zeros", shape, dtype, like, team, 0)


def full(
    shape: int | Sequence[int],
    value: Any,
    dtype: Any = "float32",
    *,
    like: str | None = None,
    team: Team | None = None,
) -> Any:
    """Like ``empty``, filled with this rank's ``value`` (ranks may give different ones) before it returns on
    any."""
    return _allocate("full", shape, dtype, like, team, value)


def signals(shape: int | Sequence[int], *, like: str | None = None, team: Team | None = None) -> Any:
    """Counters for a ``T.Signal`` parameter: int64, zero, in symmetric memory. Collective."""
    return _allocate("signals", shape, "int64", like, team, 0)


def packets(
    shape: int | Sequence[int],
    dtype: Any = "float32",
    *,
    dense: bool = False,
    like: str | None = None,
    team: Team | None = None,
) -> Any:
    """A box for a ``T.Packets(shape, dtype, dense=dense)`` parameter, in symmetric memory: int64 words, zero,
    of which only kernels make sense. A box of a job, and a team, for one purpose: every rank launches the
    same kernels on it. Collective."""
    from tilescale.comm import tensors
    from tilescale.packets import DATA, DENSE, length

    extents, name = tensors.normal_shape(shape), tensors.dtype_name(dtype)
    size = tensors.byte_size(extents[-1:], name)
    if not extents or size % DATA:
        raise TileValueError(
            f"packets({extents}, {name!r})", expected=f"rows of a multiple of {DATA} bytes, not of {size}"
        )
    if dense and name not in DENSE:
        raise TileTypeError(f"packets(…, {name!r}, dense=True)", expected="one of " + ", ".join(DENSE))
    words = length(extents, 8 * tensors.byte_size((1,), name), dense)
    return _allocate("packets", words, "int64", like, team, 0)


def peer(tensor: Any, rank: int) -> Any:
    """``tensor``'s twin in the memory of ``rank`` of its team: same shape, strides and dtype; a view, not a
    copy.

    ``tensor`` is any view of one's own symmetric memory. What another rank wrote may be read after a barrier
    or a signal. Raises TileTypeError for ordinary tensors, TileValueError for a rank that the team does not
    have.
    """
    mine = _need()
    from tilescale.comm import tensors

    address, shape, dtype, like, strides = tensors.unwrap(tensor)
    found = mine.find(address)
    if found is None:
        raise TileTypeError(
            "peer() of a tensor that is not in this rank's symmetric memory",
            hint="allocate it with tilescale.comm.empty",
        )
    allocation, own = found
    if not 0 <= rank < allocation.team.size:
        raise TileValueError(
            f"peer() of rank {rank}", expected=f"a rank of the tensor's team, 0 … {allocation.team.size - 1}"
        )
    theirs = mine.peer_block(allocation, own, rank)
    return _followed(
        tensors.wrap(theirs, shape, dtype, like, address - own.address, strides), theirs, like, peers=True
    )


# ---- agreement


def barrier(team: Team | None = None) -> None:
    """Returns when all ranks of the team (default: all) have called it; orders all memory accesses before and
    after.

    On GPUs it waits on the host for what this rank's GPU was given, and cannot be captured in a graph:
    `T.barrier` in a kernel can.

    Raises CommError, on every rank, when one does not come within TILESCALE_WAIT_TIMEOUT seconds or has
    ended.
    """
    mine = _need()
    mine.meet(_joined(mine, team), "barrier()")


def _members(ranks: Any) -> tuple[int, ...]:
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available():
        if type(ranks).__name__ == "DeviceMesh":
            if ranks.ndim != 1:
                raise TileValueError(
                    f"a DeviceMesh of {ranks.ndim} axes", expected="one axis", hint='mesh["tp"]'
                )
            ranks = ranks.get_group()
        if isinstance(ranks, distributed.ProcessGroup):
            try:
                return tuple(distributed.get_process_group_ranks(ranks))
            except (
                KeyError,
                RuntimeError,
                ValueError,
            ):  # as versions of torch say that there is no such group
                raise TileValueError(
                    "a ProcessGroup that was destroyed", expected="one that is there"
                ) from None
    try:
        return tuple(int(r) for r in ranks)
    except (TypeError, ValueError) as e:
        raise TileTypeError(
            f"team({ranks!r})", expected="ranks, a ProcessGroup or a DeviceMesh of one axis"
        ) from e


def team(ranks: Any) -> Team | Outside:
    """The team of these world ranks, in this order; its rank 0 is the first. Collective among them; on other
    ranks something that is false, which whatever takes a team refuses.

    ``ranks``: integers, a ``torch.distributed.ProcessGroup``, a one-axis ``DeviceMesh``, or a team, which is
    given back. Tensors and signals are allocated for a team by ``empty(…, team=t)``; a kernel's team is that
    of its symmetric arguments. The same ranks give the same team, until ``finalize``.
    """
    mine = _need()
    if isinstance(ranks, Outside):
        return ranks
    distributed = sys.modules.get("torch.distributed") if isinstance(ranks, int) else None
    if distributed is not None and distributed.is_available():
        if ranks == distributed.GroupMember.NON_GROUP_MEMBER:  # what torch's new_group gives ranks outside
            return Outside(())
    if isinstance(ranks, Team):
        return _joined(mine, ranks)
    members = _members(ranks)
    if (known := mine.teams.get(members)) is not None:
        return known
    if not members or len(set(members)) != len(members) or not all(0 <= r < mine.world.size for r in members):
        raise TileValueError(
            f"team({list(members)})", expected=f"different ranks out of 0 … {mine.world.size - 1}"
        )
    return mine.make_team(members) if mine.place.rank in members else Outside(members)


def world_team() -> Team:
    """The team of all ranks."""
    return _need().world


# ---- the end


def abort(why: str) -> None:
    """Tells all ranks to stop waiting: their waits, in kernels and on hosts, fail with ``why``. The first
    call is heard."""
    found = behind()
    if found is not None:
        found.stop(why)


def at_finalize(drop: Callable[[Iterable[Team]], None]) -> None:
    """Calls ``drop(teams)`` in every ``finalize`` to come, while this rank is still there: whoever keeps
    symmetric memory for a team drops it. A table with teams as weak keys does not: memory holds its team."""
    _keepers.append(drop)


def finalize() -> None:
    """Leaves the job; collective. Tensors that are still alive keep their memory, out of other ranks'
    reach.

    Where a rank has died, and ``init(recover=True)`` made this job, it is collective among those that are
    left: the next ``init()`` joins them, numbered anew in their order."""
    global _process, _left
    with _lock if sim.here() is None else contextlib.nullcontext():
        found = behind()
        if found is None:
            return
        for drop in _keepers:
            drop(list(found.teams.values()))
        left = found.finalize()
        if found is _process:
            _process, _left = None, left or _left


def _leave() -> None:
    """At the end of the process: the others learn that this rank has ended."""
    found = behind()
    if found is not None:
        found.leave()


_hooked = False


def _hook_exits(place: World) -> None:
    global _hooked
    if place.launcher == "mpich" and place.size > 1 and os.environ.get("PMI_FD", "").isdecimal():
        native.library().ts_exit_ends_job(int(os.environ["PMI_FD"]))
    if _hooked:
        return
    _hooked = True
    atexit.register(_leave)
    before = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
        abort(f"{kind.__name__}: {error}")
        before(kind, error, traceback)
        _abort_mpi(place)

    sys.excepthook = hook


def _abort_mpi(place: World) -> None:
    """After an exception that nobody caught: where MPI has been started it ends the job, since MPI_Finalize
    would wait for the others."""
    mpi = sys.modules.get("mpi4py.MPI")
    if (
        mpi is not None
        and place.launcher in ("openmpi", "mpich", "slurm")
        and mpi.Is_initialized()
        and not mpi.Is_finalized()
    ):
        sys.stdout.flush()
        sys.stderr.flush()
        # The launcher ends with what it has read so far, this rank's and that of one that failed first.
        time.sleep(0.2)
        mpi.COMM_WORLD.Abort(1)
