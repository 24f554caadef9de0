"""A small transformer, split over ranks by tensor parallelism, learns the text of docs/LANGUAGE.md.

Look at: `Block` reads like the block of one GPU. Between its layers each rank has its own rows; what gathers
and scatters them is inside the products.
"""

import common
import torch
import training

from tilescale import nn as tsnn


class Block(torch.nn.Module):
    """Attention and feed-forward layer, each behind a norm and added to what came."""

    def __init__(self, features, heads, kv_heads, hidden, **how):
        super().__init__()
        self.first, self.second = tsnn.RMSNorm(features, **how), tsnn.RMSNorm(features, **how)
        self.attention = tsnn.ParallelAttention(features, heads, kv_heads, 8, **how)
        self.mlp = tsnn.ParallelMLP(features, hidden, **how)

    def forward(self, x, batch, rows):
        x = x + self.attention(self.first(x), batch, rows)
        return x + self.mlp(self.second(x), rows)


class Transformer(torch.nn.Module):
    """Bytes to the loss of the next ones. x are rows (m, features): of all tokens of the batch, one sequence
    behind another, each rank has a part."""

    def __init__(self, layers, features, heads, kv_heads, hidden, **how):
        super().__init__()
        self.table = tsnn.VocabParallelEmbedding(training.WORDS, features, **how)
        self.blocks = torch.nn.ModuleList(
            Block(features, heads, kv_heads, hidden, **how) for _ in range(layers)
        )
        self.norm = tsnn.RMSNorm(features, **how)
        self.head = tsnn.LinearCrossEntropy(features, training.WORDS, **how)

    def forward(self, tokens):
        """tokens: (batch, length + 1)."""
        batch, given = tokens.shape[0], tokens[:, :-1].flatten()
        x = self.table(given)
        for block in self.blocks:
            x = block(x, batch, len(given))
        return self.head(self.norm(x), tokens[:, 1:].flatten(), len(given))


def run(args):
    """The losses of all steps."""
    mesh = training.start()
    torch.manual_seed(args.seed)  # on all ranks: parameters are those of one rank, cut
    how = {"group": mesh["tp"], "device": common.device()}
    model = Transformer(args.layers, args.features, 24, 24, args.hidden, **how)
    kind = common.device().type

    def loss_of(tokens):
        with torch.autocast(kind, torch.bfloat16, enabled=kind == "cuda"):
            return model(tokens)

    return training.train(model, loss_of, args)


def main(argv=None):
    parser = training.options(__doc__, steps=200, batch=8, length=64, layers=2, features=96, hidden=192)
    losses = run(parser.parse_args(argv))
    return int(not losses[-1] < losses[0])


if __name__ == "__main__":
    raise SystemExit(main())
