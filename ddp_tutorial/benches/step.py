"""One training step on random tokens, for the benchmarks of ddp.py: a model of about 5 million parameters."""

import torch

from ddp_tutorial.ddp import DataParallel, DDPConfig, data_parallel
from ddp_tutorial.model import GPT, loss_sum
from ddp_tutorial.phases import phase
from ddp_tutorial.world import World

CONTEXT, SAMPLES = 64, 8  # tokens of a sample, samples of a rank


class Step:
    """A model, an optimiser, and one step of them each time it is called. The tokens differ from rank to rank."""

    def __init__(self, world: World, config: DDPConfig) -> None:
        torch.manual_seed(0)
        self.module = GPT(layers=6, heads=4, width=256, context=CONTEXT)
        self.model: DataParallel = data_parallel(self.module, world, config)
        self.optimizer = torch.optim.AdamW(self.module.parameters(), lr=1e-3, fused=True)
        generator = torch.Generator().manual_seed(world.rank)
        self.tokens = torch.randint(256, (SAMPLES, CONTEXT + 1), generator=generator)

    def loss(self) -> torch.Tensor:
        """The mean loss on this rank's tokens."""
        return loss_sum(self.model(self.tokens[:, :-1]), self.tokens[:, 1:]) / (SAMPLES * CONTEXT)

    def __call__(self) -> None:
        with phase("forward"):
            loss = self.loss()
        with phase("backward"):
            loss.backward()
        with phase("finish"):
            self.model.finish()
        with phase("update"):
            self.optimizer.step()
            self.optimizer.zero_grad()
