"""How a box of packets (``T.Packets``) lies in symmetric memory, for all who write or read one.

A packet is 16 bytes: twice four bytes of data and the four bytes of the launch's number. Each half is stored
and loaded as one 64-bit word, so whoever sees the number has the data beside it, and nobody releases or
acquires ("LL", low latency: NCCL's protocol of that name).

    word 0                 how many launches have used the box, above ``SHIFT``; counted by its own rank
    words HEAD …           the packets of launches of even number, then those of odd number

Launches that use a box are numbered from 1. Launch e writes the half ``e % 2``. So the packets of the launch
in front of it stay where they are, and nothing is cleared: older ones have another number. When a packet may
be written over is argued in compiler/passes/packets.py.

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


def each(bits: int) -> int:
    """How many elements of so many bits a packet has."""
    return DATA * 8 // bits


def length(shape: Sequence[Any], bits: int) -> Any:
    """The words of a box: of both halves, and what stands in front. Extents are ints or symbolic."""
    count: Any = 1
    for extent in shape:
        count = extent * count
    return 2 * WORDS * count // each(bits) + HEAD
