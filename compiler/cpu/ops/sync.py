"""How the operations of compiler/ops/sync.py are done on the CPU."""

from __future__ import annotations

from typing import Any

from tilescale.compiler.builder.values import as_expr
from tilescale.compiler.cpu.lower import Lowering as CpuLowering
from tilescale.compiler.ir.lowerings import lowers
from tilescale.compiler.ir.signals import COMPARISONS
from tilescale.compiler.ir.statements import sequence
from tilescale.compiler.ops.participants import behind_misfits
from tilescale.compiler.ops.sync import SCALE_CODES
from tilescale.compiler.ops.team import team_of_call
from tilescale.compiler.tvm_compat import tirx


@lowers("cpu", "barrier")
def lower_barrier(call: Any, cx: CpuLowering) -> Any:
    reach = str(call.attrs["reach"])
    if reach == "block":
        return tirx.Evaluate(as_expr(0))  # an executor's threads are one thread here: program order is enough
    cx.waits = True
    if reach == "device":
        cx.device = True
    site = cx.site("barrier", reach, call)
    met = _team_barrier(call, cx, cx.executor_count(), site)
    if met is None:
        met = cx.observed(
            cx.call("ts_barrier", as_expr(SCALE_CODES[reach]), as_expr(cx.executor_count()), site), site
        )
    return behind_misfits(
        call, cx, lambda text: cx.call("ts_fail", cx.site("collective", "", call, text)), met
    )


@lowers("cpu", "team_sync")
def lower_team_sync(call: Any, cx: CpuLowering) -> Any:
    cx.waits = cx.device = True
    site = cx.site("collective", "", call)
    met = _team_barrier(call, cx, 0, site)
    if met is None:
        met = cx.observed(cx.call("ts_team_sync", site), site)
    return behind_misfits(
        call, cx, lambda text: cx.call("ts_fail", cx.site("collective", "", call, text)), met
    )


@lowers("cpu", "signal")
def lower_signal(call: Any, cx: CpuLowering) -> Any:
    peer = cx.scalar(call.args[2]) if len(call.args) > 2 else None
    site = cx.site("signal", cx.name_of(call.args[0]), call)
    return sequence(cx.signalled(call, call.args[0], call.args[1], str(call.attrs["op"]), peer, site))


@lowers("cpu", "wait")
def lower_wait(call: Any, cx: CpuLowering) -> Any:
    cx.waits = True
    site = cx.site(
        "wait", cx.name_of(call.args[0]), call, cx.counter_of(call.args[0], str(call.attrs["reach"]))
    )
    code = COMPARISONS.index(str(call.attrs["cmp"]))
    waiting = cx.call("ts_wait", cx.address(call.args[0]), cx.scalar(call.args[1]), as_expr(code), site)
    return cx.observed(waiting, site)


def _team_barrier(call: Any, cx: CpuLowering, executors: int, site: Any) -> Any:
    """A barrier of a team inside the kernel on the CPU (``ts_meet_among``); None where ``call`` is
    everyone's. executors: of each block, 0: the same block of each member."""
    among, _ = team_of_call(call)
    if among is None:
        return None
    terms = [cx.scalar(t) for t in among.operands()]
    frame = tirx.decl_buffer((len(terms),), "int32", "team", data_alignment=8, layout=None, scope="local")
    fill = [tirx.BufferStore(frame, t, [as_expr(k)]) for k, t in enumerate(terms)]
    ranks = 0 if among.form == "range" else len(terms) - 1
    at = tirx.address_of(tirx.BufferLoad(frame, [as_expr(0)]))
    meet = cx.call("ts_meet_among", as_expr(executors), site, as_expr(ranks), at)
    return sequence([tirx.AllocBuffer(frame), *fill, cx.observed(meet, site)])
