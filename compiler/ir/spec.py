"""What a well-formed program is, level by level, as one table, and the verifier that reads it. Run after
every pass.

tile        meaning only: operations on regions of buffers; no layouts, no order among independent copies
scheduled   the same operations, cut into roles and rings: who issues what, into which stage, guarded by which
tokens thread      flat buffers, indices and instructions; no operation of the language is left
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tilescale.compiler.ir.operations import REGISTRY
from tilescale.compiler.ir.pointed import POINTED
from tilescale.compiler.ir.source import loc_of
from tilescale.compiler.ir.tokens import counter_of
from tilescale.compiler.tvm_compat import EXTERN_CALLS, IF_THEN_ELSE, ir, structural_walk, tirx
from tilescale.errors import InternalError

TILE, SCHEDULED, THREAD = "tile", "scheduled", "thread"
SCOPES = (
    "global",
    "global.symm",
    "global.signal",
    "global.packets",
    "shared",
    "shared.signal",
    "shared.barrier",
    "local.fragment",
    "local",
    "local.var",
)
LOOPS = ("serial", "parallel", "pipelined", "persistent", "unroll", "vectorized")
#: who may own a role region; regions of different roles that stand next to each other run at once, behind
#: them all have ended
ROLES = ("all", "producer", "communicator", "consumer")
RING_OPS = ("ts.ring_acquire", "ts.ring_commit", "ts.ring_wait", "ts.ring_release")
SHUFFLE_IN_A_BRANCH = "a shuffle in a branch of an expression, where not all lanes may be"
ATTRS = {
    TILE: {"ts.kernel", "thread_extent", "ts.scale"},
    SCHEDULED: {"ts.kernel", "thread_extent", "ts.scale", "ts.role"},
    THREAD: {"thread_extent"},
}


@dataclass(frozen=True)
class Rule:
    """One line of the table: for nodes of ``kind`` at ``levels``, ``holds(node)``; otherwise ``says``."""

    kind: Any
    levels: tuple[str, ...]
    holds: Callable[[Any], bool]
    says: str


def _known_op(call: Any) -> bool:
    name = getattr(call.op, "name", "")
    known = name.startswith(("ts.math.", "ts.scale_")) or name == POINTED or name in REGISTRY
    return known or not name.startswith("ts.")


def _at_home(level: str) -> Callable[[Any], bool]:
    """Whether an operation may stand at a level."""
    return lambda c: (op := REGISTRY.get(getattr(c.op, "name", ""))) is None or level in op.levels


def _declared(call: Any) -> bool:
    """Whether a call has the attributes that its operation declares, and none beside them and the scales that
    it acts at."""
    op = REGISTRY.get(getattr(call.op, "name", ""))
    if op is None:
        return True
    given = set(call.attrs.keys()) if call.attrs is not None else set()
    needed = {a for a in op.attributes if not a.endswith("?")}
    return needed <= given and given <= {a.removesuffix("?") for a in op.attributes} | {"executor", "reach"}


def _counts(token: Any) -> bool:
    counter = counter_of(token)
    return counter is not None and counter.ty.storage_scope == "local.var"


def _is_instruction(name: str) -> bool:
    """Scalar functions have names of their own where the target's compiler has them too."""
    return not name.startswith("ts.") or name.startswith("ts.math.")


def _has_no_shuffle(*branches: Any) -> bool:
    """A shuffle waits for all lanes of its warp, and the branches of a condition are evaluated by the lanes
    that choose them."""
    found: list[Any] = []

    def look(call: Any) -> None:
        if getattr(call.op, "name", "") in EXTERN_CALLS and str(call.args[0].value).startswith("ts::shuffle"):
            found.append(call)

    for branch in branches:
        structural_walk(branch, (ir.Call, look))
    return not found


def _region_fits(region: Any) -> bool:
    return len(region.region) == len(region.source.ty.shape)


RULES: tuple[Rule, ...] = (
    Rule(ir.Call, (TILE, SCHEDULED), _known_op, "an operation that is not registered"),
    Rule(ir.Call, (TILE,), _at_home(TILE), "an operation that a pass makes later"),
    Rule(ir.Call, (SCHEDULED,), _at_home(SCHEDULED), "an operation that a pass has expanded"),
    Rule(ir.Call, (TILE, SCHEDULED), _declared, "attributes that the operation does not declare, or lacks"),
    Rule(
        ir.Call,
        (THREAD,),
        lambda c: _is_instruction(getattr(c.op, "name", "")),
        "an operation of the language is left",
    ),
    Rule(
        ir.Call,
        (THREAD,),
        lambda c: getattr(c.op, "name", "") != IF_THEN_ELSE or _has_no_shuffle(*c.args[1:]),
        SHUFFLE_IN_A_BRANCH,
    ),
    Rule(tirx.Select, (THREAD,), lambda e: _has_no_shuffle(e.true_value, e.false_value), SHUFFLE_IN_A_BRANCH),
    Rule((tirx.And, tirx.Or), (THREAD,), lambda e: _has_no_shuffle(e.b), SHUFFLE_IN_A_BRANCH),
    Rule(
        ir.TensorRegion,
        (TILE, SCHEDULED),
        _region_fits,
        "a region with another number of axes than its buffer",
    ),
    Rule(ir.TensorRegion, (THREAD,), lambda r: False, "a region is left"),
    Rule(
        tirx.AllocBuffer,
        (TILE, SCHEDULED),
        lambda s: s.buffer.ty.storage_scope in SCOPES,
        "an allocation in an unknown scope",
    ),
    Rule(
        tirx.AttrStmt,
        (TILE,),
        lambda s: s.attr_key in ATTRS[TILE],
        "an attribute that the tile level does not have",
    ),
    Rule(
        tirx.AttrStmt,
        (SCHEDULED,),
        lambda s: s.attr_key in ATTRS[SCHEDULED],
        "an attribute that the scheduled level does not have",
    ),
    Rule(
        tirx.AttrStmt,
        (SCHEDULED,),
        lambda s: s.attr_key != "ts.role" or str(s.node.value) in ROLES,
        "a role that there is not",
    ),
    Rule(
        ir.Call,
        (SCHEDULED,),
        lambda c: getattr(c.op, "name", "") not in RING_OPS or _counts(c),
        "a ring token without a counter",
    ),
    Rule(tirx.AttrStmt, (THREAD,), lambda s: s.attr_key in ATTRS[THREAD], "an attribute is left"),
    Rule(
        tirx.For,
        (TILE, SCHEDULED),
        lambda s: (
            not s.annotations or "ts.kind" not in s.annotations or str(s.annotations["ts.kind"]) in LOOPS
        ),
        "a loop of an unknown kind",
    ),
    Rule(tirx.BufferStore, (THREAD,), lambda s: len(s.indices) == 1, "an access with more than one index"),
    Rule(ir.TensorLoad, (THREAD,), lambda e: len(e.indices) == 1, "an access with more than one index"),
)


#: what the rules are about, and what `_defined_once` looks at
KINDS = (
    ir.Call,
    ir.TensorRegion,
    ir.TensorLoad,
    tirx.Select,
    tirx.And,
    tirx.Or,
    tirx.AllocBuffer,
    tirx.DeclBuffer,
    tirx.Bind,
    tirx.AttrStmt,
    tirx.For,
    tirx.BufferStore,
)


class Verifier:
    """Checks a program behind each pass. The rules of single nodes are asked once a level of each node: what
    a pass leaves as it is has been judged."""

    def __init__(self) -> None:
        # node by address; the nodes stay alive with it, so that no other gets the address of one
        self._judged: dict[str, dict[int, Any]] = {}
        self._last: tuple[str, Any] = "", None  # the level and the function that were judged last

    def verify(self, func: Any, level: str, after: str) -> None:
        """Checks every node of a function against the table.

        Raises:
            InternalError: names the pass that broke it, the rule and the place.
        """
        before, known = self._last
        if before == level and _unchanged(func, known):  # most passes have nothing to do in most kernels
            return
        nodes: list[Any] = []
        structural_walk(func.body, (KINDS, nodes.append))
        judged = self._judged.setdefault(level, {})
        fresh = [n for n in nodes if hash(n) not in judged]
        kinds = _by_kind(fresh)
        for rule in (r for r in RULES if level in r.levels):
            of_rule = (n for kind, some in kinds.items() if issubclass(kind, rule.kind) for n in some)
            bad = next((n for n in of_rule if not rule.holds(n)), None)
            if bad is not None:
                place = loc_of(getattr(bad, "span", None))
                raise InternalError(
                    f"after {after}: {rule.says} at the {level} level: {str(bad)[:200]}", loc=place
                )
        judged |= {hash(n): n for n in fresh}
        if level != THREAD:
            _defined_once(func, _by_kind(nodes), level, after)
        if level == SCHEDULED:
            _roles_and_rings(func, nodes, after)
        self._last = level, func


def _unchanged(func: Any, known: Any) -> bool:
    """Whether a function has the body and the parameters of another one, node for node."""
    return func.body.same_as(known.body) and list(map(hash, func.params)) == list(map(hash, known.params))


def _by_kind(nodes: list[Any]) -> dict[type, list[Any]]:
    """Nodes by their class: there are many nodes for each rule, and to ask each whether it is of the rule's
    kind took longer than the rules."""
    kinds: dict[type, list[Any]] = {}
    for n in nodes:
        kinds.setdefault(type(n), []).append(n)
    return kinds


def verify(func: Any, level: str, after: str) -> None:
    """Checks every node of a function against the table, once.

    Raises:
        InternalError: names the pass that broke it, the rule and the place.
    """
    Verifier().verify(func, level, after)


def _defined_once(func: Any, kinds: dict[type, list[Any]], level: str, after: str) -> None:
    """Every variable has one definition, and every buffer that is used is a parameter or allocated. They are
    told apart by address: an expression's == makes another expression."""
    seen = [n.var for n in kinds.get(tirx.Bind, ())]
    seen += [n.loop_var for n in kinds.get(tirx.For, ())]
    seen += [n.buffer for n in kinds.get(tirx.AllocBuffer, ())]
    at = list(map(hash, seen))
    if len(set(at)) != len(at):
        twice = next(v for k, v in enumerate(seen) if at[k] in at[:k])
        raise InternalError(f"after {after}: {twice.name} is defined twice at the {level} level")
    known = {*at, *map(hash, func.params), *(hash(n.buffer) for n in kinds.get(tirx.DeclBuffer, ()))}
    used = (n for kind in (ir.TensorRegion, ir.TensorLoad) for n in kinds.get(kind, ()))
    unknown = next((n for n in used if hash(n.source) not in known), None)
    if unknown is not None:
        raise InternalError(
            f"after {after}: {unknown.source.name} is used and never allocated", loc=loc_of(unknown.span)
        )


def _roles_and_rings(func: Any, nodes: list[Any], after: str) -> None:
    """Roles are not nested, a producer has a consumer, and a ring's tokens are complete: one role fills it,
    one reads it (the same, or a producer and a consumer), each with a counter that no other role touches."""
    tokens: dict[int, dict[str, set[str]]] = {}
    counters: dict[Any, set[str]] = {}
    regions = [n for n in nodes if isinstance(n, tirx.AttrStmt) and n.attr_key == "ts.role"]

    def broken(what: str, node: Any) -> InternalError:
        return InternalError(
            f"after {after}: {what} at the {SCHEDULED} level", loc=loc_of(getattr(node, "span", None))
        )

    for s in regions:
        inner: list[Any] = []
        structural_walk(
            s.body,
            (tirx.AttrStmt, lambda x, inner=inner: inner.append(x) if x.attr_key == "ts.role" else None),
        )
        if inner:
            raise broken("a role region in another one", inner[0])
        role, calls = str(s.node.value), list[Any]()
        structural_walk(s.body, (ir.Call, calls.append))
        for call in calls:
            name = getattr(call.op, "name", "")
            if name in RING_OPS:
                tokens.setdefault(int(call.attrs["ring"]), {}).setdefault(name, set()).add(role)
                counters.setdefault(counter_of(call), set()).add(role)
            elif (op := REGISTRY.get(name)) is not None and op.fills:
                tokens.setdefault(int(call.attrs["ring"]), {}).setdefault("copy", set()).add(role)
    roles = [str(s.node.value) for s in regions]
    if roles.count("producer") != roles.count("consumer"):
        raise broken("a producer without its consumer", func.body)
    for ring, kinds in tokens.items():
        if missing := set(RING_OPS) - kinds.keys():
            raise broken(f"ring {ring} has no {sorted(missing)[0]}", func.body)
        fills, reads = kinds["ts.ring_acquire"], kinds["ts.ring_wait"]
        if (
            len(fills) != 1
            or len(reads) != 1
            or (fills != reads and (fills, reads) != ({"producer"}, {"consumer"}))
        ):
            raise broken(f"ring {ring} is filled by {sorted(fills)} and read by {sorted(reads)}", func.body)
        if (
            kinds["ts.ring_commit"] != fills
            or kinds.get("copy", fills) != fills
            or kinds["ts.ring_release"] != reads
        ):
            raise broken(f"ring {ring}'s copies and tokens stand in different roles", func.body)
    for counter, owners in counters.items():
        if len(owners) > 1:
            raise broken(f"{counter.name} counts for {sorted(owners)}", func.body)
