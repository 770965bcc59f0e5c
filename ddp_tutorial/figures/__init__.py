"""How is it drawn?

`plots` draws curves, bars and timelines, `run_plots` the logs of runs. `timeline` records when each rank computed and
when its link carried something. `live` puts sliders before figures in a notebook. Only `timeline` imports torch.
"""
