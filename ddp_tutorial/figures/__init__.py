"""How is it drawn?

`plots` draws numbers, and has the figures of `diagrams` (what ranks hold and send) and `step_plots` (what they do when)
under its name, too; `run_plots` draws the logs of runs. `live` puts sliders before figures in a notebook. Drawing does
not need torch.
"""
