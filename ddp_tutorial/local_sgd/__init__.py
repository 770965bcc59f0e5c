"""Train with local SGD. Each rank takes several steps on its own, and then the ranks average their weights.

`rounds` defines when weights are averaged, and `averaging` computes the averages and counts the bytes sent. `loss`
exchanges the ranks' losses at the end of a round. `outer` defines DiLoCo's outer optimizer. If the ranks' weights
differ when a checkpoint is saved, `state` saves each rank's weights. `strategies` contains the strategies for the
trainer.

Stich, "Local SGD converges fast and communicates little", ICLR 2019. Lin et al., "Don't use large mini-batches, use
local SGD", ICLR 2020. Douillard et al., "DiLoCo: Distributed low-communication training of language models", 2023.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
