"""How a box of packets (``T.Packets``) lies in symmetric memory, for all who write or read one.

A packet is 16 bytes: twice four bytes of data and the four bytes of the launch's number. Each half is stored
and loaded as one 64-bit word, so whoever sees the number has the data beside it, and nobody releases or
acquires ("LL", low latency: NCCL's protocol of that name).

    word 0                 how many launches have used the box, above ``SHIFT``; counted by its own rank
    words HEAD …           the packets of launches of even number, then those of odd number

Launches that use a box are numbered from 1. Launch e writes the half ``e % 2``. So the packets of the launch
in front of it stay where they are, and nothing is cleared: older ones have another number. When a packet may
be written over is argued in compiler/passes/packets.py.

A **dense** box, of floats, has no numbers: a packet is one word, of data alone, so that all that crosses is
data. Stored is the complement of the data, and a word of zero means `EMPTY`: memory is empty when it is new.
Data of ones alone would be that word. It is stored as 1, and comes with its lowest bit zero. All ones are a
NaN in every dtype of `DENSE`, and so is that. Nothing else changes on its way. Who takes a packet stores
EMPTY in its place, so a packet is taken once in a launch. "Lamport" is the field's name for it.

A launch that fails may leave packets in a dense box, and get more behind its end. A later one would take them
for its own. It is enough that the rank whose box it is launches no more with it: nobody else reads there. On
CPUs word `FAILED` says so, and such a launch is refused. A failed launch stops the job, so a rank that had
not begun it takes nothing of it in a later one either. The simulator refuses a box that is not empty. On GPUs
there is no such launch: one that fails ends the process's use of the GPU, or, where jobs recover, all waits
of the rank are void from then on, in every launch, and the host says that results are worth nothing
(ts/team.cuh, `give_up`). ``comm.finalize`` puts old boxes out of reach, and boxes of the next job are zero.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

#: words (of 8 bytes) in front of the packets: a line of the cache, of which the first word is used
HEAD = 16
#: bits of the first word below the count, where a GPU counts the blocks that have ended
SHIFT = 32
#: bytes of data in a packet, and words (of 8 bytes) that it takes
DATA, WORDS = 8, 2
#: dtypes of dense boxes; the word where there is no packet; the word of a box that says that a launch failed
DENSE, EMPTY, FAILED = ("bfloat16", "float16", "float32"), 0, 1


def each(bits: int) -> int:
    """How many elements of so many bits a packet has."""
    return DATA * 8 // bits


def words(dense: bool) -> int:
    """The words of a packet."""
    return 1 if dense else WORDS


def length(shape: Sequence[Any], bits: int, dense: bool = False) -> Any:
    """The words of a box: of both halves, and what stands in front. A dense box has a word more, and so an
    odd number: none is taken for one of the other kind, whose packets would be misread. Extents are ints or
    symbolic."""
    count: Any = 1
    for extent in shape:
        count = extent * count
    return 2 * words(dense) * count // each(bits) + HEAD + int(dense)
