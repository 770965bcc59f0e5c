"""Launch ranks, and report their output, results and errors.

Scripts call `run` (in `starting`). Under torchrun or Slurm, `run` joins the existing ranks. Otherwise, `run` launches
ranks on this machine. `launch` runs any function on several local ranks. `rank` contains the code that runs in each
rank. `transport` sends calls and results between processes. `errors` describes rank failures. `console` shows the
ranks' output, `logs` copies the parent's logging setup, and `figures` sends matplotlib figures to the parent. `doctor`
checks which features work on this machine.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
