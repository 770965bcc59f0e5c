"""Why does it hang, drift apart or die?

`recorder` reads which collectives a rank has entered, and from which line of the program. `hangs` watches the ranks of
a run: where they wait for one another for ever, it ends them and says who waits where. `fingerprints` compares
collectives before they run. `faults` brings such things about on purpose. `checks` asks all ranks about each optimizer
step, of any program: have replicas drifted apart (`replicas`), is a number not finite (`nonfinite`), do gradients or
the loss jump (`spikes`), has a parameter no gradient (`unused`), do ranks learn from the same samples (`overlap`), who
is slow or waits for data (`pace`), who keeps more and more memory (`memory`)? `detector` is what each is made of,
`taps` sees a step for it. All of it is attached from outside: nothing below this room knows of it.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
