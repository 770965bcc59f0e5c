from .folder import Run as Run
from .folder import load_run as load_run
from .step_log import StepLog as StepLog
from .summaries import find_runs as find_runs
