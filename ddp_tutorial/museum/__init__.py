"""Bugs of distributed training that were found in real programs, each with its fix, and what catches all of them.

Most make no error and no warning: the loss falls, and the model is another one. The modules named after subjects, from
`gradients` to `metrics`, show the bugs, as plain torch that one would write; `correct` has programs that are right.
`laws` says what every program has to keep, whatever it does, and finds who breaks it, without knowing any of the bugs.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
