"""A small mixture of experts, split over ranks by tensor and expert parallelism, learns the text of
docs/LANGUAGE.md.

Look at: the rows that a rank has between layers are the tokens that it brings to the experts. How many go
where stays on the device; a bias that moves once a step keeps the experts busy.
"""

import common
import torch
import training

from tilescale import nn as tsnn


class Block(torch.nn.Module):
    """Attention and experts, each behind a norm and added to what came."""

    def __init__(self, features, heads, hidden, experts, topk, **how):
        super().__init__()
        self.first, self.second = tsnn.RMSNorm(features, **how), tsnn.RMSNorm(features, **how)
        self.attention = tsnn.ParallelAttention(features, heads, head_dim=8, **how)
        self.experts = tsnn.ExpertParallelMoE(
            features, hidden, experts, topk, scores="sigmoid", bias_rate=0.001, shared=hidden, **how
        )

    def forward(self, x, batch, rows):
        x = x + self.attention(self.first(x), batch, rows)
        return x + self.experts(self.second(x), rows)


class Mixture(torch.nn.Module):
    """Bytes to the loss of the next ones; x are rows (m, features), of which each rank has a part."""

    def __init__(self, layers, features, *sizes, **how):
        super().__init__()
        self.table = tsnn.VocabParallelEmbedding(training.WORDS, features, **how)
        self.blocks = torch.nn.ModuleList(Block(features, *sizes, **how) for _ in range(layers))
        self.norm = tsnn.RMSNorm(features, **how)
        self.head = tsnn.LinearCrossEntropy(features, training.WORDS, **how)

    def forward(self, tokens):
        """tokens: (batch, length + 1)."""
        given = tokens[:, :-1].flatten()
        x = self.table(given)
        for block in self.blocks:
            x = block(x, tokens.shape[0], len(given))
        return self.head(self.norm(x), tokens[:, 1:].flatten(), len(given))

    def balance(self):
        """Once a step."""
        for block in self.blocks:
            block.experts.update_bias()


def run(args):
    """The losses of all steps."""
    mesh = training.start()
    torch.manual_seed(args.seed)  # on all ranks: parameters are those of one rank, cut
    how = {"group": mesh["tp"], "device": common.device()}
    model = Mixture(args.layers, args.features, 24, args.hidden, args.experts, args.topk, **how)
    kind = common.device().type

    def loss_of(tokens):
        with torch.autocast(kind, torch.bfloat16, enabled=kind == "cuda"):
            return model(tokens)

    return training.train(model, loss_of, args, model.balance)


def main(argv=None):
    sizes = {"layers": 2, "features": 96, "hidden": 192, "experts": 24, "topk": 2}
    parser = training.options(__doc__, steps=200, batch=8, length=64, **sizes)
    losses = run(parser.parse_args(argv))
    return int(not losses[-1] < losses[0])


if __name__ == "__main__":
    raise SystemExit(main())
