"""Who am I among the ranks? Told by the environment that the launcher left; nothing is started and nobody is
asked.

Launchers and what they set:

====================
============================================================================================ ``tilescale
launch``  TILESCALE_JOB and torch's RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT
torchrun              torch's, and TORCHELASTIC_RUN_ID by hand ("env")       torch's alone Open MPI
OMPI_COMM_WORLD_RANK, _SIZE, _LOCAL_RANK, _LOCAL_SIZE MPICH and kin         PMI_RANK, PMI_SIZE, and
MPI_LOCALRANKID, MPI_LOCALNRANKS (Cray: PMI_LOCAL_RANK, PMI_LOCAL_SIZE) Slurm's srun          SLURM_PROCID,
SLURM_LOCALID, SLURM_STEP_ID, SLURM_STEP_NUM_TASKS, SLURM_STEP_TASKS_PER_NODE none                  nothing:
one rank ====================
============================================================================================

Several may be there at once (torchrun inside srun, mpiexec inside a Slurm job); `_choose` says which one
counts.
"""

from __future__ import annotations

import functools
import hashlib
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tilescale import env
from tilescale.errors import CommError

# Below Linux's ephemeral range, so that no outgoing connection sits on the port that a job derives.
FIRST_PORT, PORTS = 20000, 12000

# What tells a process that it is a rank of some other job; SLURM_JOB_ID and the like stay: they only describe
# the allocation.
_RANK_PREFIXES = ("PMI_", "PMIX_", "OMPI_COMM_WORLD_", "MPI_LOCAL", "TORCHELASTIC_")
_RANK_NAMES = frozenset(
    "RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE MASTER_ADDR MASTER_PORT SLURM_PROCID SLURM_LOCALID "
    "NODE_RANK GROUP_RANK GROUP_WORLD_SIZE ROLE_RANK ROLE_NAME ROLE_WORLD_SIZE".split()
)


@dataclass(frozen=True)
class World:
    """This process among the ranks of its job.

    ``rank`` of ``size`` in the job, ``local_rank`` of ``local_size`` on this ``node``: what one agent of the
    launcher started, a machine or one of several nodes on it. ``job`` is 1 to 32 letters and digits, the same
    on all ranks, different between jobs: names in /dev/shm are ``ts-<job>-…``. ``launcher`` is one of
    tilescale, torchrun, env, openmpi, mpich, slurm, none.
    """

    rank: int
    size: int
    local_rank: int
    local_size: int
    job: str
    launcher: str
    node: int = 0


@dataclass(frozen=True)
class _Claim:
    """What one launcher's variables say; ``variable`` is the one that only a rank of that launcher has."""

    launcher: str
    variable: str
    rank: int
    size: int
    local_rank: int
    local_size: int

    def __str__(self) -> str:
        return f"{self.launcher} says rank {self.rank} of {self.size} ({self.variable})"

    def agrees(self, other: _Claim) -> bool:
        return (self.rank, self.size) == (other.rank, other.size)


@functools.cache
def world() -> World:
    """This process's place, read once. Raises CommError where the environment is incomplete or contradicts
    itself.

    Under MPI and Slurm it also sets what torch.distributed reads (RANK, WORLD_SIZE, LOCAL_RANK,
    LOCAL_WORLD_SIZE, and where they are unset MASTER_ADDR and MASTER_PORT), and NODE_RANK. An MPI job over
    several machines exchanges these through mpi4py, so there the first call is collective."""
    me, master = detect(os.environ)
    if me.launcher in ("openmpi", "mpich", "slurm"):
        os.environ.update(
            RANK=str(me.rank),
            WORLD_SIZE=str(me.size),
            LOCAL_RANK=str(me.local_rank),
            LOCAL_WORLD_SIZE=str(me.local_size),
        )
        os.environ.setdefault("MASTER_ADDR", master[0])
        os.environ.setdefault("MASTER_PORT", str(master[1]))
    if me.launcher != "none":
        os.environ["NODE_RANK"] = str(me.node)
    return me


def detect(environ: Mapping[str, str]) -> tuple[World, tuple[str, int]]:
    """The place that ``environ`` describes, and the address and port where torch.distributed may meet. Raises
    CommError."""
    claim = _choose(environ)
    if claim is None:
        job = _digest("none", _identity(os.getpid()))
        return World(0, 1, 0, 1, job, "none"), ("127.0.0.1", _port(job))
    host, port, node = "127.0.0.1", None, _node(claim, environ)
    if claim.launcher == "tilescale":
        job = env.JOB.get(environ) or ""
    elif claim.launcher in ("torchrun", "env"):
        job = _torch_job(claim, environ)
    elif claim.launcher == "slurm":
        names = ("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT")
        job = _digest("slurm", *(environ.get(name, "") for name in names))
        if claim.local_size < claim.size:
            host = _first_host(environ)
    elif claim.local_size == claim.size and (starter := _outside(claim.variable)):
        # One machine: mpiexec's own process there tells jobs apart, and MPI need not start at all. That
        # matters: MPI_Finalize is collective, so a failing rank that had started MPI would wait at exit for
        # ranks that wait for it.
        job = _digest("mpi", _identity(starter))
    else:
        job, host, port, node = _exchange(claim)
    me = World(claim.rank, claim.size, claim.local_rank, claim.local_size, job, claim.launcher, node)
    return me, (host, port or _port(job))


def among(was: World, ranks: Sequence[int]) -> World:
    """The place of a rank in the job of those that are left of its job, in their order. No launcher knows of
    that job."""
    job = _digest("left", was.job, *map(str, ranks))
    rank = ranks.index(was.rank)
    return World(rank, len(ranks), rank, len(ranks), job, "none", was.node)


def without_ranks(environ: Mapping[str, str]) -> dict[str, str]:
    """``environ`` without what makes a process a rank: what a launcher gives the ranks of a new job."""
    return {
        k: v
        for k, v in environ.items()
        if k not in _RANK_NAMES and k != env.JOB.name and not k.startswith(_RANK_PREFIXES)
    }


def _choose(environ: Mapping[str, str]) -> _Claim | None:
    """The launcher that counts, None for a lone process. Raises CommError where two contradict each other.

    Started by hand, or outer and of one task, is overruled. torchrun may run as one agent a task under MPI or
    Slurm; mpiexec inside a Slurm job has its own ranks, and its daemons are the Slurm tasks. Everything else
    must agree.
    """
    torch, mpi, slurm = _torch(environ), _mpi(environ), _slurm(environ)
    outer = [claim for claim in (mpi, slurm) if claim is not None and claim.size > 1]
    if torch is not None and torch.launcher == "env" and (outer or torch.size == 1):
        if torch.size > 1 and not any(torch.agrees(claim) for claim in outer):
            raise _contradiction(torch, outer[0])
        torch = None
    if torch is not None:
        agents = _integer(environ, "GROUP_WORLD_SIZE") if torch.launcher == "torchrun" else None
        for claim in outer:
            if not torch.agrees(claim) and claim.size != agents:
                raise _contradiction(torch, claim)
        return torch
    if mpi is not None and slurm is not None and mpi.agrees(slurm):
        return slurm
    return mpi if mpi is not None and (mpi.size > 1 or not outer) else slurm


def _contradiction(one: _Claim, other: _Claim) -> CommError:
    return CommError(
        f"two launchers started this process and disagree: {one}, {other}",
        expected="one launcher, or torchrun once in each task of the outer one",
        hint=f"start with one of them, or unset the variables of the other (such as {other.variable})",
    )


def _torch(environ: Mapping[str, str]) -> _Claim | None:
    ours, elastic = env.JOB.get(environ) is not None, "TORCHELASTIC_RUN_ID" in environ
    launcher, variable = ("torchrun", "TORCHELASTIC_RUN_ID") if elastic else ("env", "RANK")
    if ours:
        launcher, variable = "tilescale", env.JOB.name
    rank, size = _integer(environ, "RANK"), _integer(environ, "WORLD_SIZE")
    if rank is None and size in (None, 1) and launcher == "env":
        return None
    if rank is None or size is None:
        missing, other = ("RANK", "WORLD_SIZE") if rank is None else ("WORLD_SIZE", "RANK")
        raise CommError(
            f"{other if launcher == 'env' else variable} is set but {missing} is not",
            expected="RANK and WORLD_SIZE together, or neither",
            hint="start with `tilescale launch -n N script.py`, or unset it to run as one rank",
        )
    local_rank, local_size = _integer(environ, "LOCAL_RANK"), _integer(environ, "LOCAL_WORLD_SIZE")
    if launcher == "env" and size > 1:
        if not environ.get("MASTER_PORT"):
            raise CommError(
                f"RANK and WORLD_SIZE={size} are set by hand but MASTER_PORT is not",
                expected="MASTER_ADDR and MASTER_PORT too: they tell jobs that run at once apart",
                hint="start with `tilescale launch -n N script.py`, or set them alike on every rank",
            )
        if environ.get("MASTER_ADDR", "localhost") in ("localhost", "127.0.0.1", "::1"):
            local_rank, local_size = (
                (rank if local_rank is None else local_rank),
                (size if local_size is None else local_size),
            )
    return _claim(
        launcher, variable, rank, size, ("LOCAL_RANK", local_rank), ("LOCAL_WORLD_SIZE", local_size)
    )


def _mpi(environ: Mapping[str, str]) -> _Claim | None:
    found = []
    for launcher, prefix, local in (
        ("openmpi", "OMPI_COMM_WORLD_", ("OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE")),
        ("mpich", "PMI_", ("MPI_LOCALRANKID", "MPI_LOCALNRANKS")),
    ):
        rank, size = _integer(environ, prefix + "RANK"), _integer(environ, prefix + "SIZE")
        if rank is None or size is None:
            continue
        if launcher == "mpich" and local[0] not in environ and "PMI_LOCAL_RANK" in environ:
            local = ("PMI_LOCAL_RANK", "PMI_LOCAL_SIZE")
        if (
            local[0] not in environ
            and (slurm := _slurm(environ)) is not None
            and (slurm.rank, slurm.size) == (rank, size)
        ):
            # srun's own PMI: it names rank and size alone, and Slurm knows the rest.
            found.append(_Claim(launcher, prefix + "RANK", rank, size, slurm.local_rank, slurm.local_size))
            continue
        places = ((name, _integer(environ, name)) for name in local)
        found.append(_claim(launcher, prefix + "RANK", rank, size, *places))
    if len(found) == 2 and not found[0].agrees(found[1]):
        raise _contradiction(*found)
    return found[0] if found else None


def _slurm(environ: Mapping[str, str]) -> _Claim | None:
    # A batch script has SLURM_PROCID too; only tasks that srun started have a step with a number of tasks.
    rank, size = _integer(environ, "SLURM_PROCID"), _integer(environ, "SLURM_STEP_NUM_TASKS")
    if rank is None or not size or "SLURM_STEP_ID" not in environ:
        return None
    counts: list[int] = []
    for count, _, times in re.findall(r"(\d+)(\(x(\d+)\))?", environ.get("SLURM_STEP_TASKS_PER_NODE", "")):
        counts += [int(count)] * int(times or 1)
    node = _integer(environ, "SLURM_NODEID") or 0
    local_size = counts[node] if node < len(counts) else None
    local_rank = ("SLURM_LOCALID", _integer(environ, "SLURM_LOCALID"))
    return _claim("slurm", "SLURM_PROCID", rank, size, local_rank, ("SLURM_STEP_TASKS_PER_NODE", local_size))


def _claim(
    launcher: str,
    variable: str,
    rank: int,
    size: int,
    local_rank: tuple[str, int | None],
    local_size: tuple[str, int | None],
) -> _Claim:
    """A checked claim; one rank alone needs no local names."""
    here, there = local_rank[1], local_size[1]
    if size == 1:
        here, there = here or 0, there or 1
    for name, value in (local_rank, local_size):
        if value is None and size > 1:
            raise CommError(
                f"{variable} says that this is a rank of {launcher}, but {name} is not set",
                expected="the rank's number on this machine, and how many ranks this machine has",
                hint="start with `tilescale launch -n N script.py`, torchrun or mpiexec, which set it",
            )
    assert here is not None and there is not None
    if not (0 <= rank < size and 0 <= here < there <= size):
        raise CommError(
            f"{launcher}'s variables make no sense: rank {rank} of {size}, on this machine {here} of "
            f"{there} ({variable})",
            expected="0 <= rank < size, 0 <= local rank < local size <= size",
        )
    return _Claim(launcher, variable, rank, size, here, there)


def _integer(environ: Mapping[str, str], name: str) -> int | None:
    text = environ.get(name, "").strip()
    if not text:
        return None
    try:
        return int(text)
    except ValueError:
        raise CommError(
            f"the environment variable {name} is {text!r}", expected="an integer", hint=f"unset {name}"
        ) from None


def _node(claim: _Claim, environ: Mapping[str, str]) -> int:
    """The number of this rank's node, where its launcher says it: not MPI's, which exchange it, and 0 where
    nobody has said it by hand."""
    if claim.local_size == claim.size:
        return 0
    names = {"tilescale": "NODE_RANK", "torchrun": "GROUP_RANK", "env": "NODE_RANK", "slurm": "SLURM_NODEID"}
    return _integer(environ, names.get(claim.launcher, "")) or 0


def _torch_job(claim: _Claim, environ: Mapping[str, str]) -> str:
    """A name from what all ranks share. torchrun's run id is "none" unless chosen, so port and restart count
    belong to it."""
    names = ("TORCHELASTIC_RUN_ID", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RESTART_COUNT")
    shared = [environ.get(name, "") for name in names]
    if (
        claim.launcher == "torchrun"
        and claim.local_size == claim.size
        and (agent := _outside(claim.variable))
    ):
        shared.append(_identity(agent))  # one agent: the next job on this port has another
    return _digest("torch", *shared)


def _exchange(claim: _Claim) -> tuple[str, str, int, int]:
    """Collective: job, host and port from rank 0 of an MPI job over several nodes, and this rank's node.

    Ranks of a node have MPI's agent there in common; nodes are numbered in the order of their first ranks."""
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:  # RuntimeError: mpi4py is there, its MPI library is not
        raise CommError(
            f"{claim}, on several nodes, but mpi4py cannot be used: {error}",
            expected="mpi4py, through which the ranks agree on a name and an address",
            hint='pip install "tilescale[mpi]"',
        ) from error
    import secrets
    import socket

    comm = MPI.COMM_WORLD
    if (comm.rank, comm.size) != (claim.rank, claim.size):
        library = MPI.Get_library_version().splitlines()[0].strip("\0 ")
        raise CommError(
            f"{claim}, but mpi4py says rank {comm.rank} of {comm.size}: it uses another MPI ({library})",
            expected="mpi4py and mpiexec of the same MPI",
            hint="use the mpiexec of that MPI, or build mpi4py for this one: pip install --no-binary mpi4py "
            "mpi4py",
        )
    offer = None
    if comm.rank == 0:
        with socket.socket() as probe:
            probe.bind(("", 0))
            offer = (secrets.token_hex(8), socket.gethostname(), probe.getsockname()[1])
    starter = _outside(claim.variable)
    agents = comm.allgather(f"{socket.gethostname()} {_identity(starter) if starter else ''}")
    job, host, port = comm.bcast(offer, root=0)
    return job, host, port, list(dict.fromkeys(agents)).index(agents[claim.rank])


def _first_host(environ: Mapping[str, str]) -> str:
    """The first name of Slurm's node list, such as n001 of ``n[001-004,007],m2``."""
    for name in ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST"):
        if match := re.match(r"(?:[^,\[]|\[[^\]]*\])+", environ.get(name, "")):
            return re.sub(r"\[([^\],-]+)[^\]]*\]", r"\1", match[0])
    raise CommError(
        "SLURM_STEP_NODELIST is not set in a step over several machines",
        expected="what srun sets for its tasks",
    )


#: launcher → the variable that every rank of it has, and the one that holds its number
_NUMBERED = {
    "torchrun": ("TORCHELASTIC_RUN_ID", "RANK"),
    "openmpi": ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_RANK"),
    "mpich": ("PMI_RANK", "PMI_RANK"),
    "slurm": ("SLURM_PROCID", "SLURM_PROCID"),
}


def absent(me: World) -> set[int]:
    """Ranks of a job on one node for which their launcher has no process: they have ended, or are not started
    yet.

    None where nobody can know: ranks that were started by hand, several nodes, of which each has an agent of
    its own, or a launcher outside of this pid namespace.
    """
    if me.local_size < me.size:
        return set()
    if me.launcher not in _NUMBERED or not (starter := _outside(_NUMBERED[me.launcher][0])):
        return set()
    mark = f"\0{_NUMBERED[me.launcher][1]}=".encode()
    parents: dict[int, int] = {}
    numbers: dict[int, int] = {}
    for entry in os.scandir("/proc"):
        if not entry.name.isdigit():
            continue
        pid = int(entry.name)
        try:
            # Empty where it has ended and nobody has taken note.
            environ = b"\0" + Path(f"/proc/{pid}/environ").read_bytes()
            parents[pid] = int(_stat(pid)[1])
            if mark in environ:
                numbers[pid] = int(environ.partition(mark)[2].partition(b"\0")[0])
        except (OSError, ValueError, CommError):
            continue  # another user's, or it ended meanwhile
    found = {number for pid, number in numbers.items() if below(pid, starter, parents)}
    return set(range(me.size)) - found - {me.rank}


def below(pid: int, ancestor: int, parents: Mapping[int, int]) -> bool:
    """Whether a process descends from another, by a table of parents."""
    seen = set[int]()
    while pid in parents and pid not in seen:
        seen.add(pid)
        pid = parents[pid]
        if pid == ancestor:
            return True
    return False


def _outside(variable: str) -> int:
    """The nearest ancestor that lacks ``variable``: the launcher's own process on this machine, whatever
    wraps the rank.

    0 where that process is outside this pid namespace.
    """
    pid = os.getppid()
    while pid > 1:
        try:
            inside = f"\0{variable}=".encode() in b"\0" + Path(f"/proc/{pid}/environ").read_bytes()
        except OSError:
            inside = False  # another user's process is the launcher's daemon, not a rank
        if not inside:
            return pid
        pid = int(_stat(pid)[1])
    return pid


def _identity(pid: int) -> str:
    """A process, told apart from all others of this machine: pid, start time (clock ticks since boot), pid
    namespace."""
    return f"{pid}.{_stat(pid)[19]}.{os.readlink('/proc/self/ns/pid')}"


def _stat(pid: int) -> list[str]:
    """The fields of /proc/pid/stat from the third (state) on; the second, a name, may hold anything
    (proc(5))."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError as error:
        raise CommError(
            f"/proc/{pid}/stat cannot be read: {error}", expected="Linux's /proc, which names jobs here"
        ) from error


def _digest(*parts: str) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def meeting_port(job: str) -> int:
    """Where ranks of a job on several nodes meet before they share memory; not torch.distributed's port."""
    return FIRST_PORT + (_port(job) - FIRST_PORT + PORTS // 2) % PORTS


def _port(job: str) -> int:
    return FIRST_PORT + int(hashlib.sha256(job.encode()).hexdigest()[:8], 16) % PORTS
