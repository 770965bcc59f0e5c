from .cluster import Cluster as Cluster
from .cluster import unsupported_reason as unsupported_reason
from .running import CommandResult as CommandResult
from .running import Process as Process
from .running import wait as wait
