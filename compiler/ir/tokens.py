"""The tokens of a ring as statements (compiler/ops/ring.py says what they mean)."""

from __future__ import annotations

from typing import Any

from tilescale.compiler.ir.operations import VOID
from tilescale.compiler.tvm_compat import ir, tirx


def token(kind: str, ring: int, counter: Any, span: Any, tiles: int | None = None) -> Any:
    """``ts.ring_<kind>(counter)`` of a ring, as a statement. ``tiles``: see `RingAcquire`."""
    attrs = {"ring": ring} if tiles is None else {"ring": ring, "tiles": tiles}
    return tirx.Evaluate(ir.Call(f"ts.ring_{kind}", [counter], attrs=attrs, ret_ty=VOID, span=span), span)


def late_release(ring: int, counter: Any, when: Any, span: Any) -> Any:
    """The stage of the round before the counter's has been read, where ``when`` holds."""
    return tirx.Evaluate(
        ir.Call("ts.ring_release", [counter, when], attrs={"ring": ring}, ret_ty=VOID, span=span), span
    )


def counter_of(token: Any) -> Any | None:
    """The variable that counts a token's rounds; the round may be the one behind the variable's. None where
    there is none."""
    count = token.args[0]
    if isinstance(count, tirx.Add) and isinstance(count.b, tirx.IntImm) and int(count.b.value) == 1:
        count = count.a
    return count.source if isinstance(count, ir.TensorLoad) else None
