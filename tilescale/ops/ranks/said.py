"""What ranks' hosts compare of a collective that they call: its name, extents, dtypes.

Most kernels compare at their entry what ranks launch. What goes in packets has no entry, which would take as
long as the packets do, and other extents may give the same packets: sums of the wrong numbers, or waits for
what nobody sends. So each rank's host says beside a launch what it calls, in memory that the hosts share, and
looks at what the others have said of the same call (`Backend.say`). It waits for nobody: of two ranks that
differ the later one finds out, and does not launch.

A CUDA graph's launches were compared when they were captured.
"""

from __future__ import annotations

import functools
import hashlib

from tilescale.errors import LaunchError
from tilescale.ops.ranks.workspace import Workspace

_ALIKE = (
    "arguments of the same shape and dtype on all ranks; where they have different numbers of rows, rows= of "
    "an operation or a layer, alike on all ranks, says how many there are"
)


@functools.lru_cache(maxsize=1024)
def said(*words: object) -> Said:
    """A `Said` for a call that is not prepared."""
    return Said(*words)


class Said:
    """A call of a collective, of which ``words`` say all that is alike on its ranks.

    Raises:
        LaunchError: called, where another rank's call of the same number is another one.
    """

    __slots__ = ("mark", "what")

    def __init__(self, *words: object):
        self.what = " ".join(map(str, words)).encode()[:119]
        self.mark = int.from_bytes(hashlib.blake2b(self.what, digest_size=4).digest(), "little") >> 1

    def __call__(self, space: Workspace) -> None:
        if differs := space.say(self.mark, self.what):
            raise LaunchError(differs, hint=_ALIKE)
