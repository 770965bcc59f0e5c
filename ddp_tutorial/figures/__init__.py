"""Figures of measurements, runs, schedules and the state of ranks.

`plots` draws measurements and re-exports the figures of `diagrams` (the data that ranks hold and send) and `step_plots`
(timelines and step times). `run_plots` draws the logs of runs. `live` adds sliders to figures in a notebook. Drawing
does not require torch.
"""

from ddp_tutorial.config import require_package

require_package("matplotlib", "notebooks")
