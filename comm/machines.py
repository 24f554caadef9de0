"""Are ranks of several nodes on one machine? A launcher's node is what one of its agents started; two of them
may be on one machine, and then their ranks share its memory as those of one node do.

A machine is a boot of a kernel, the mount of /dev/shm and the pid namespace: ranks that have these three in
common can map each other's segments and see each other's processes. Containers of one host have none of the
last two in common, unless they are asked to.
"""

from __future__ import annotations

import os
import select
import socket
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tilescale import env
from tilescale.comm import bootstrap, lines
from tilescale.comm.bootstrap import World
from tilescale.errors import CommError

_SLICE = 0.1  # seconds between looks at who has ended


def identity() -> str:
    """This machine's, as text. Raises CommError where this system has none."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.stat('/dev/shm').st_dev} {os.readlink('/proc/self/ns/pid')}"
    except OSError as error:
        raise CommError(
            f"this machine cannot be told apart from others: {error}", expected="Linux's /proc and /dev/shm"
        ) from None


def check(world: World, gone: Callable[[Sequence[int]], list[int]]) -> None:
    """Returns on every rank where all are on one machine; collective, and only among several nodes.

    ``gone``: those of these ranks that have ended. Raises CommError where ranks are on several machines, and
    where a rank does not come within the wait limit or has ended.
    """
    mine = [world.rank, identity(), socket.gethostname()]
    places = _gathered(world, mine, gone)
    if len({machine for _, machine, _ in places}) == 1:
        return
    ranks: dict[tuple[str, str], list[int]] = {}
    for rank, machine, host in places:
        ranks.setdefault((machine, host), []).append(rank)
    said = "; ".join(f"{host}: {_named(them)}" for (_, host), them in ranks.items())
    raise CommError(
        f"{world.size} ranks on {len(ranks)} machines ({said})",
        expected="all ranks on one machine, with one /dev/shm and one pid namespace: symmetric memory, on "
        "processors and on GPUs, does not reach further",
        hint="torch.distributed between machines; containers of one host: --ipc=host --pid=host",
    )


def _named(ranks: Sequence[int]) -> str:
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, ranks))


def _gathered(
    world: World, mine: list[Any], gone: Callable[[Sequence[int]], list[int]]
) -> list[tuple[int, str, str]]:
    """Every rank's place, in rank order, through rank 0, where torch.distributed would meet too."""
    host, port = os.environ.get("MASTER_ADDR", "127.0.0.1"), bootstrap.meeting_port(world.job)
    limit = env.WAIT_TIMEOUT.get()
    deadline = time.monotonic() + limit

    def look(awaited: Sequence[int]) -> None:
        if ended := gone(awaited):
            verb = "has" if len(ended) == 1 else "have"
            raise CommError(
                f"rank {world.rank}: in init(): {_named(ended)} {verb} ended without a call of init()",
                expected="init() on every rank of the job",
            )
        if time.monotonic() > deadline:
            raise CommError(f"rank {world.rank}: waited {limit:g} s in init() for {_named(awaited)}")

    if world.rank:
        line = lines.connect(host, port, deadline, lambda: look([0]))
        line.send({"job": world.job, "place": mine})
        while (messages := line.receive()) == []:
            look([0])
        line.close()
        if messages is None:
            raise CommError(f"rank {world.rank}: in init(): rank 0 has left before all ranks had come")
        return [(int(rank), machine, name) for rank, machine, name in messages[0]]
    return _serve(world, mine, host, port, look)


def _serve(
    world: World, mine: list[Any], host: str, port: int, look: Callable[[Sequence[int]], None]
) -> list[tuple[int, str, str]]:
    server = lines.listen(host, port)
    places, here, strangers = {0: mine}, list[lines.Line](), list[lines.Line]()
    try:
        while len(places) < world.size:
            look([r for r in range(world.size) if r not in places])
            ends: list[Any] = [server, *strangers]
            for one in select.select(ends, [], [], _SLICE)[0]:
                if one is server:
                    strangers.append(lines.Line(server.accept()[0]))
                elif (messages := one.receive()) != []:
                    strangers.remove(one)
                    # A rank of another job, whose name gives the same port, is refused: it sees the end.
                    if messages is None or messages[0].get("job") != world.job:
                        one.close()
                        continue
                    here.append(one)
                    places[int(messages[0]["place"][0])] = messages[0]["place"]
        whole = [places[rank] for rank in range(world.size)]
        for one in here:
            one.send(whole)
        return [(int(str(rank)), str(machine), str(name)) for rank, machine, name in whole]
    finally:
        for one in [*here, *strangers]:
            one.close()
        server.close()
