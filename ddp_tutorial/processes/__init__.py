"""How do ranks start, end, fail and speak?

`run` (in `starting`) is for scripts: it joins the ranks that torchrun or Slurm started, or else starts some here.
`launch` starts ranks on this machine for any function; `rank` is the other side of it, `transport` carries calls and
results between the two, `errors` says what went wrong on a rank, and `console` shows what ranks print, log (`logs`) and
draw (`figures`). `doctor` tries what will work on this machine.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
