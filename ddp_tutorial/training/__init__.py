"""Train any model on any data with any loss.

`step` builds a training step from a config, `trainer` contains the loop, and `config` defines the settings.
`evaluation`, `evaluation_tracker`, `stopping`, `metrics`, `profiling` and `callbacks` implement the periodic actions of
the loop. `tasks` builds a model, data and a loss from a config. `gpt` defines the model of the `gpt` task.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
