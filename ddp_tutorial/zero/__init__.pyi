from .gradients import ShardedGradients as ShardedGradients
from .model import ShardedModel as ShardedModel
from .optimizer import ShardedOptimizer as ShardedOptimizer
from .pieces import Layout as Layout
from .pieces import piece_of as piece_of
