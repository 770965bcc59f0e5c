"""Train a model that is split into consecutive pipeline stages on different ranks.

`schedules` defines the order of the forward and backward passes, and validates a schedule before it runs. `stages`
splits a model at named modules. `runner` executes a schedule with sends and receives. `parallel` computes the gradient
of an optimizer step, with one pipeline or several parallel pipelines.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
