"""Diagnose hangs, diverging replicas, crashes and slow ranks in a running program.

- `recorder` reads the collectives that a rank has entered, and the source lines that called them.
- `hangs` monitors a run's ranks. If ranks wait for each other forever, `hangs` reports where they wait, and terminates
  them.
- `fingerprints` detects mismatched collectives before they run.
- `faults` injects faults, for example a crash or a delay.
- `checks` runs detectors in any training loop, before each optimizer step.
- `detector` defines the base class of detectors, and `instrumentation` records data about each step.

The detectors are in the following modules:

- `replicas` compares the weights of the ranks.
- `nonfinite` locates the first NaN or infinity.
- `spikes` detects sudden jumps in the gradient norm, and a diverging loss.
- `unused` lists parameters without a gradient.
- `overlap` detects samples and random numbers that more than one rank uses.
- `pace` detects stragglers and ranks that wait for data.
- `memory` detects memory leaks.

Most of these tools are context managers that wrap the training loop. The loop does not depend on this subpackage.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
