"""How do ranks train a model that is cut into stages, one behind the other?

`schedules` says who does what, and checks it before it runs; `stages` cuts a model, by the names of its modules;
`runner` executes any schedule over send and receive; `parallel` makes an optimiser step's gradient of it, also with
several pipelines side by side.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
