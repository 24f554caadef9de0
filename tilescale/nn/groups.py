"""Groups by name: torch's custom operations take strings and numbers, no groups."""

from __future__ import annotations

import functools
from typing import Any

from tilescale import comm
from tilescale.comm.backend import Team
from tilescale.ops.ranks.groups import Group, members_of, process_group, team_of

#: by name the process group that it was made from, whose library may take large collectives
_named: dict[str, Any] = {}


def name_of(group: Group) -> str:
    """The name of a group, as the operations of `tilescale.nn.products` take it: its ranks. Collective the
    first time.

    Args:
        group: see `tilescale.ops.ranks.groups.team_of`.
    """
    name = ",".join(map(str, team_of(group).members))
    if group is not None and not isinstance(group, Team):
        _named[name] = process_group(group)
    return name


@functools.lru_cache(maxsize=256)
def _ranks(name: str) -> tuple[int, ...]:
    return tuple(map(int, name.split(",")))


def group_of(name: str) -> Group:
    """What has this name, as operations take it. A process group that was destroyed since is dropped: its
    ranks go on without it."""
    found, ranks = _named.get(name), _ranks(name)
    if found is not None and members_of(found) == ranks:
        return found
    _named.pop(name, None)
    return comm.team(ranks)


def team(name: str) -> Team:
    """The team of this name."""
    return team_of(group_of(name))
