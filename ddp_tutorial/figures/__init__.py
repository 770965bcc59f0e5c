"""How is it drawn?

`plots` draws numbers, and has the figures of `diagrams` (what ranks hold and send) and `step_plots` (what they do when)
under its name, too; `run_plots` draws the logs of runs. `timeline` records when each rank computed and when its link
carried something. `live` puts sliders before figures in a notebook. Only `timeline` imports torch.
"""
