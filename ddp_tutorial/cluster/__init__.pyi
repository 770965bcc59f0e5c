from .cluster import Cluster as Cluster
from .cluster import why_not as why_not
from .running import Ended as Ended
from .running import Process as Process
from .running import wait as wait
