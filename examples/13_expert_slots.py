"""Expert slots by atomic updates: tokens take their place at an expert when they come, and nobody sorts or
counts them before.

Look at: T.atomic_add on another rank's counter, whose old value is the token's row there, and T.put, which
leaves the way back beside it. Which row a token gets depends on who comes first; what it gets back does not,
so the result is the same in every run. (11_all_to_all plans on the host, in a fixed order, and needs no
atomic update.)
"""

import common
import torch

import tilescale
import tilescale.comm as comm
import tilescale.language as T


@tilescale.jit
def dispatch(tokens, topk, D, local, rows, blocks=16):
    """``local`` experts a rank, each with room for ``rows`` tokens."""

    @T.prim_func
    def take_slots(
        X: T.Tensor((tokens, D), "float32"),
        owner: T.Tensor((tokens, topk), "int32"),  # the rank of the chosen expert
        which: T.Tensor((tokens, topk), "int32"),  # and its number there
        count: T.SymmTensor((local,), "int32"),  # rows of each expert that are taken; zero at first
        inbox: T.SymmTensor((local, rows, D), "float32"),
        origin: T.SymmTensor((local, rows), "int32"),  # (rank, token, choice) of each row, as one number
    ):
        with T.Kernel(blocks, threads=128) as b:
            with T.Scale("device") as rank, n:
                for s in T.serial(b, tokens * topk, step=blocks):
                    peer, e = owner[s // topk, s % topk], which[s // topk, s % topk]
                    row = T.atomic_add(count[e], 1, dst=peer, return_prev=True)  # mine, whoever else comes
                    T.copy(X[s // topk, 0:D], inbox[e, row, 0:D], dst=peer)
                    T.put(rank * tokens * topk + s, origin[e, row], dst=peer)

    return take_slots


@tilescale.jit
def give_back(tokens, topk, D, local, rows, blocks=16):
    @T.prim_func
    def give_answers(
        answers: T.Tensor((local, rows, D), "float32"),
        count: T.Tensor((local,), "int32"),
        origin: T.Tensor((local, rows), "int32"),
        back: T.SymmTensor((tokens * topk, D), "float32"),  # for each choice of each token
    ):
        with T.Kernel(blocks, threads=128) as b:
            with T.Scale("device"):
                for e in T.serial(local):
                    for row in T.serial(b, count[e], step=blocks):
                        slot = origin[e, row]
                        T.copy(
                            answers[e, row, 0:D],
                            back[slot % (tokens * topk), 0:D],
                            dst=slot // (tokens * topk),
                        )

    return give_answers


def run(tokens, D, local=2, topk=2, seed=0, launches=1):
    """Launches on this rank; returns the largest error against every token times its experts' weights, by
    torch alone."""
    rank, world = common.ranks()
    rows = world * tokens  # a token comes to an expert once at most
    count, origin = comm.empty((local,), torch.int32), comm.empty((local, rows), torch.int32)
    inbox, back = comm.empty((local, rows, D), torch.float32), comm.empty((tokens * topk, D), torch.float32)
    answers, worst = torch.empty(local, rows, D, device=common.device()), 0.0
    for launch in range(launches):
        x = common.randn(tokens, D, seed=seed + launch, rank=rank)
        weights = common.randn(local * world, D, D, seed=seed + launch + 1000, scale=D**-0.5)
        # Some experts are liked by all.
        liked = common.randn(1, local * world, seed=seed + launch + 2000, scale=2)
        logits = common.randn(tokens, local * world, seed=seed + launch + 3000, rank=rank) + liked
        gate, expert = logits.softmax(-1).topk(topk)
        owner, which = ((expert // local).to(torch.int32), (expert % local).to(torch.int32))
        for t in (inbox, back, answers):
            common.poison(t)
        count.zero_()
        dispatch(tokens, topk, D, local, rows)(x, owner, which, count, inbox, origin)
        taken = count.tolist()
        for e in range(local):
            answers[e, : taken[e]] = (inbox[e, : taken[e]] @ weights[rank * local + e]).relu()
        give_back(tokens, topk, D, local, rows)(answers, count, origin, back)
        each = torch.einsum("td,tcde->tce", x, weights[expert]).relu()
        got = (gate[..., None] * back.view(tokens, topk, D)).sum(1)
        worst = max(worst, common.difference(got, (gate[..., None] * each).sum(1)))
    return worst


def main(argv=None):
    args = common.arguments(argv, __doc__, tokens=100, dim=64, local_experts=2, topk=2)
    error = run(args.tokens, args.dim, args.local_experts, args.topk, args.seed)
    what = (
        f"expert slots by atomics, {args.tokens} tokens a rank, {args.local_experts} experts a rank, top "
        f"{args.topk}"
    )
    return common.report(what, error, 1e-5)


if __name__ == "__main__":
    raise SystemExit(main())
