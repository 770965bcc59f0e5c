from .published import CONTEXT_PARALLEL_RUNS as CONTEXT_PARALLEL_RUNS
from .published import PUBLISHED_RUNS as PUBLISHED_RUNS
from .published import PublishedRun as PublishedRun
