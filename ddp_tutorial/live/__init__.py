"""How do I look inside ranks that are alive, change something, and go on?

`pool` has `Ranks`: ranks that stay, keep their variables from call to call, and outlive an error, an interrupt and a
hang. `crew` and `person` are how it keeps them, all and each; `places` where they are, on this machine or on hosts of a
cluster (`hosted`); `member` is the other side of it, `moments` what the two sides tell one another, `shown` what a
cell leaves on each rank, `figures` how a rank's plots come home, `script` the cells so far as a script for torchrun.
`magics` is all of it in a notebook: `%load_ext ddp_tutorial`, `%ranks`, `%%ranks`.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
