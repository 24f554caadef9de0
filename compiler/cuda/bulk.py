"""Copies between blocks of a cluster by cp.async.bulk (PTX ISA 9.0, "cp.async.bulk"; passes/gpu_bulk.py says which), as thread IR.

Order. One thread of the sender announces a copy's bytes to the receiver's barrier ``landed`` (mbarrier.expect_tx there) and then issues the
copy, whose bytes the same barrier counts down when they are there (complete_tx, which releases at the cluster's scope). An expectation
comes before its own completion, since the copy is issued behind it by the same thread. Then:

- Sender's threads → copy: what they wrote to the source is there for the engine by their proxy fences and the meeting in front of the copy
  (passes/fences.py, as for TMA's stores).
- Copy → receiver: the sender's arrival at the cluster's barrier releases the announcement, which the receiver's thread acquires there. It
  arrives at ``landed``, whose phase (count 1) ends when that arrival is made and every byte announced has been counted, and waits for it
  with acquire at the cluster's scope. No phase can end early: before the arrival by the count, behind it by the bytes announced, and
  nobody announces any between the two barriers of the cluster around the wait.
- Receiver's thread → everyone: the second barrier of the cluster. Behind it all threads of the cluster know that all copies have landed,
  so their sources and destinations may be written again, and blocks may end.
- Threads → later copies: reads and writes by threads of what a copy will write are of another proxy; each thread of the cluster makes a
  proxy fence in front of the first barrier, the issuing thread another one behind it.

At most a block's shared memory is announced between two barriers, below the 2^20 bytes that an mbarrier counts.
"""

from __future__ import annotations

from typing import Any

from tilescale.compiler.gpu.build import all_of, at, call
from tilescale.compiler.gpu.places import widened
from tilescale.compiler.ir.statements import sequence
from tilescale.compiler.passes.gpu_bulk import rows_of
from tilescale.compiler.tvm_compat import tirx


def put(node: Any, cx: Any) -> Any:
    """A copy into another block, by one thread."""
    src, dst, peer, landed = node.args
    how = rows_of(node, cx.layouts)
    assert how is not None
    rank, barrier = widened(cx.scalar(peer), "int32"), at(cx.places[landed.source].buf, tirx.IntImm("int32", 0))
    block, row = tirx.Var("block", "int32"), tirx.Var("row", "int32")
    number = lambda n: tirx.IntImm("int32", n)  # noqa: E731
    cx.bind_range(row, how.count)
    places, tests = [], []
    for side, region in enumerate((src, dst)):
        index = [r.min for r in region.region]
        for pair in how.axes:
            index[pair[side]] = index[pair[side]] + row
        buf, flat, found, _ = cx.access(region.source, index, node, bool(side))
        places.append(at(buf, tirx.IntImm("int32", 0) if how.whole else flat))
        tests += found
    copied: Any = call("copy_to_block", places[1], places[0], barrier, block, number(how.bytes), span=node.span)
    copied = copied if not tests else tirx.IfThenElse(all_of(tests), copied, cx.fail("bounds", node, "a copy outside its tile"))
    if how.count > 1:
        copied = tirx.For(row, number(0), number(how.count), tirx.ForKind.SERIAL, copied, span=node.span)
    announced = call("mbarrier_expect_there", barrier, block, number(how.bytes * how.count), span=node.span)
    return cx.once(sequence([tirx.Bind(block, rank), call("fence_proxy_async"), announced, copied]))


def await_puts(node: Any, cx: Any) -> Any:
    """One thread arrives at the own barrier, and waits until all bytes that were announced are there."""
    landed, count = node.args
    barrier = at(cx.places[landed.source].buf, tirx.IntImm("int32", 0))
    parity = tirx.bitwise_and(cx.scalar(count), tirx.IntImm("int32", 1))
    return cx.once(sequence([call("mbarrier_arrive", barrier), call("mbarrier_wait_cluster", barrier, parity, span=node.span)]))
