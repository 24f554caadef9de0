"""Expert all-to-all: tokens go to the ranks of the experts that their gate chose, and the experts' answers
come back.

Look at: counts that only the data decides, which differ from expert to expert and from rank to rank. dispatch
has no signal at all: a launch ends on a rank when everything that was aimed at it has arrived, so the host
code after it may read. combine needs them: its blocks add up what other ranks send back in the same launch.
"""

import common
import torch

import tilescale
import tilescale.comm as comm
import tilescale.language as T
from tilescale import ops


@tilescale.jit
def dispatch(tokens, topk, D, local, world, blocks=16, dtype="bfloat16"):
    """``local`` experts a rank. A slot is one (token, chosen expert); slots are sorted by expert, so those
    for a rank are a run."""
    slots = tokens * topk

    @T.prim_func
    def moe_dispatch(
        X: T.Tensor((tokens, D), dtype),
        token: T.Tensor((slots,), "int32"),  # slot → its token
        start: T.Tensor((world + 1,), "int32"),  # rank → the first of its slots
        counts: T.Tensor((world, local), "int32"),  # how many slots for each expert of each rank
        inbox: T.SymmTensor((world, slots, D), dtype),  # from each rank, at most all of its slots
        got: T.SymmTensor((world, local), "int32"),
    ):
        with T.Kernel(blocks, threads=128) as b:
            with T.Scale("device") as rank, n:
                for step in T.serial(n):
                    peer = (rank + 1 + step) % n
                    if b == 0:
                        T.copy(counts[peer, 0:local], got[rank, 0:local], dst=peer)
                    for s in T.serial(start[peer] + b, start[peer + 1], step=blocks):
                        T.copy(X[token[s], 0:D], inbox[rank, s - start[peer], 0:D], dst=peer)

    return moe_dispatch


@tilescale.jit
def combine(tokens, topk, D, world, blocks=16, dtype="bfloat16"):
    slots = tokens * topk

    @T.prim_func
    def moe_combine(
        answers: T.Tensor((world, slots, D), dtype),
        rows: T.Tensor((world,), "int32"),  # how many rows of answers each rank gets
        gate: T.Tensor((tokens, topk), "float32"),
        owner: T.Tensor((tokens, topk), "int32"),  # the rank of the chosen expert
        place: T.Tensor((tokens, topk), "int32"),  # and the row of its answer among those from that rank
        back: T.SymmTensor((world, slots, D), dtype),
        returned: T.Signal((world,)),
        Y: T.Tensor((tokens, D), dtype),
    ):
        with T.Kernel(blocks, threads=128) as b:
            acc, row = T.alloc_fragment((D,), "float32"), T.alloc_fragment((D,), dtype)
            with T.Scale("device") as rank, n:
                for step in T.serial(n):
                    peer = (rank + 1 + step) % n
                    for s in T.serial(b, rows[peer], step=blocks):
                        T.copy(answers[peer, s, 0:D], back[rank, s, 0:D], dst=peer)
                    # Releases all that this block put to the peer; each block counts once.
                    T.signal(returned[rank], dst=peer)
                for source in T.serial(n):
                    T.wait(returned[source], blocks)  # acquires all answers from this source
                for t in T.serial(b, tokens, step=blocks):
                    T.clear(acc)
                    for c in T.serial(topk):
                        T.copy(back[owner[t, c], place[t, c], 0:D], row)
                        for d in T.Parallel(D):
                            acc[d] += gate[t, c] * row[d]
                    T.copy(acc, Y[t, 0:D])

    return moe_combine


def route(logits, topk, world):
    """What the kernels need to know, from a token's logits over all experts: gate (tokens, topk), its
    experts, and the slots."""
    gate, expert = ops.moe_route(logits, topk)
    expert = expert.long()
    local = logits.shape[1] // world
    order = expert.flatten().argsort(stable=True)  # sorted slot → (token, choice)
    counts = torch.bincount(expert.flatten(), minlength=logits.shape[1]).view(world, local)
    start = torch.cat([counts.new_zeros(1), counts.sum(1).cumsum(0)])
    owner = expert // local
    place = order.argsort().view_as(expert) - start[owner]
    ints = [x.to(torch.int32).contiguous() for x in (order // topk, start, counts, owner, place)]
    return gate, expert, ints


def run(tokens, D, local=2, topk=2, seed=0, launches=1):
    """Launches on this rank; returns the largest error against every token times its experts' weights, by
    torch alone."""
    rank, world = common.ranks()
    experts, slots = local * world, tokens * topk
    inbox, back = (comm.empty((world, slots, D), torch.bfloat16) for _ in range(2))
    got = comm.empty((world, local), torch.int32)
    returned = comm.signals((world,))
    y, answers = (
        torch.empty(shape, dtype=torch.bfloat16, device=common.device())
        for shape in ((tokens, D), (world, slots, D))
    )
    worst = 0.0
    for launch in range(launches):
        x = common.randn(tokens, D, seed=seed + launch, rank=rank).bfloat16()
        weights = common.randn(experts, D, D, seed=seed + launch + 1000, scale=D**-0.5).bfloat16()
        # Some experts are liked by all: uneven counts.
        liked = common.randn(1, experts, seed=seed + launch + 2000, scale=2)
        logits = common.randn(tokens, experts, seed=seed + launch + 3000, rank=rank) + liked
        gate, expert, (token, start, counts, owner, place) = route(logits, topk, world)
        for t in (inbox, back, y, answers):
            common.poison(t)
        dispatch(tokens, topk, D, local, world)(x, token, start, counts, inbox, got)
        for source in range(world):  # each expert on its rows; those from one source are sorted by expert
            for e, piece in enumerate(inbox[source, : got[source].sum()].split(got[source].tolist())):
                low = int(got[source, :e].sum())
                answers[source, low : low + len(piece)] = (piece @ weights[rank * local + e]).relu()
        rows = got.sum(1, dtype=torch.int32)
        combine(tokens, topk, D, world)(answers, rows, gate, owner, place, back, returned, y)
        each = torch.einsum("td,tcde->tce", x.float(), weights[expert].float()).relu()
        worst = max(worst, common.difference(y, (gate[..., None] * each).sum(1)))
    return worst


def main(argv=None):
    args = common.arguments(argv, __doc__, tokens=100, dim=64, local_experts=2, topk=2)
    error = run(args.tokens, args.dim, args.local_experts, args.topk, args.seed)
    what = (
        f"expert all-to-all, {args.tokens} tokens a rank, {args.local_experts} experts a rank, top "
        f"{args.topk}"
    )
    return common.report(what, error, 3e-2)


if __name__ == "__main__":
    raise SystemExit(main())
