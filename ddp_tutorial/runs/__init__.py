"""Record training runs, and read and compare the records.

`folder` defines the files of a run. `step_log` writes the metrics, `rank_logs` writes the log of each rank, and `usage`
measures each rank's memory usage and phase durations. `summaries` reads and compares runs. `summaries` and `folder` do
not import torch.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
