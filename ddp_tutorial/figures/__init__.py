"""Figures that show measurements, runs, schedules and the state of ranks.

`plots` draws measurements, and re-exports the figures in `diagrams` (the data that ranks store and send), `step_plots`
(timelines and step times) and `restart_plots`. `run_plots` draws run logs. `live` adds sliders to figures in a
notebook. Drawing does not require torch.
"""

from ddp_tutorial.config import require_package

require_package("matplotlib", "notebooks")
