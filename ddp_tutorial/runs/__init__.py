"""What is kept of a run, and how is it read back?

`folder` knows the files of a run, `step_log` writes its numbers and `rank_logs` what each rank says, `usage` measures
memory and seconds of all ranks. `summaries` reads many runs and compares them; it and `folder` never import torch.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
