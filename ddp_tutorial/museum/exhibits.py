"""Collect all bugs, by topic."""

from ddp_tutorial.museum.accumulation import ACCUMULATION
from ddp_tutorial.museum.checkpoints import CHECKPOINTS
from ddp_tutorial.museum.control import CONTROL
from ddp_tutorial.museum.data import SAMPLES
from ddp_tutorial.museum.gradients import GRADIENTS
from ddp_tutorial.museum.metrics import METRICS

MUSEUM = (*GRADIENTS, *ACCUMULATION, *SAMPLES, *CONTROL, *CHECKPOINTS, *METRICS)
