"""A mixture-of-experts layer: each rank has some of the experts, and tokens travel to those that their router
chose.

Look at: nothing here asks the host how many tokens go where. `moe_route`, `moe_dispatch`, `grouped_matmul`
and `moe_combine` find all sizes on the device, so that a CUDA graph holds the layer whatever the routers
choose.
"""

import common
import torch
from torch.nn.functional import silu

from tilescale import ops


def layer(x, router, up, down, topk, experts):
    """x (tokens, D); router (D, experts), float32, so that no two scores are alike; of this rank's experts
    up (local, D, 2 F), gate and value side by side, and down (local, F, D)."""
    weights, chosen = ops.moe_route(x.float() @ router, topk)
    sent = ops.moe_dispatch(x, chosen, weights, num_experts=experts)
    hidden = ops.grouped_matmul(sent.expanded(), up, sent.sizes, gate="silu")
    return ops.moe_combine(ops.grouped_matmul(hidden, down, sent.sizes), sent)


def run(tokens, D, F, local=2, topk=2, seed=0, launches=1):
    """Calls on this rank; returns the largest error against every token times its experts' weights, by torch
    alone in float32, relative to the greatest number."""
    rank, world = common.ranks()
    experts, worst = local * world, 0.0
    for launch in range(launches):
        s = seed + 5 * launch
        x = common.randn(tokens, D, seed=s, rank=rank).bfloat16()
        router = common.randn(D, experts, seed=s + 1, scale=D**-0.5)
        up = common.randn(experts, D, 2 * F, seed=s + 2, scale=D**-0.5).bfloat16()
        down = common.randn(experts, F, D, seed=s + 3, scale=F**-0.5).bfloat16()
        mine = slice(rank * local, rank * local + local)
        y = layer(x, router, up[mine], down[mine], topk, experts)

        weights, chosen = (x.float() @ router).softmax(-1).topk(topk)
        weights = weights / weights.sum(-1, keepdim=True)
        hidden = torch.einsum("td,edf->tef", x.float(), up.float())
        gate, value = hidden.chunk(2, dim=2)
        every = torch.einsum("tef,efd->ted", silu(gate) * value, down.float())
        want = (every.gather(1, chosen[..., None].expand(-1, -1, D)) * weights[..., None]).sum(1)
        worst = max(worst, common.difference(y, want) / float(want.abs().max()))
    return worst


def main(argv=None):
    args = common.arguments(argv, __doc__, tokens=100, dim=64, hidden=96, local_experts=2, topk=2)
    error = run(args.tokens, args.dim, args.hidden, args.local_experts, args.topk, args.seed)
    what = (
        f"mixture of experts, {args.tokens} tokens a rank, {args.local_experts} experts a rank, top "
        f"{args.topk}"
    )
    return common.report(what, error, 2e-2)


if __name__ == "__main__":
    raise SystemExit(main())
