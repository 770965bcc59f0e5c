"""All the bugs, by subject."""

from ddp_tutorial.museum.checkpoints import CHECKPOINTS
from ddp_tutorial.museum.control import CONTROL
from ddp_tutorial.museum.data import SAMPLES
from ddp_tutorial.museum.gradients import GRADIENTS
from ddp_tutorial.museum.metrics import METRICS

MUSEUM = (*GRADIENTS, *SAMPLES, *CONTROL, *CHECKPOINTS, *METRICS)
