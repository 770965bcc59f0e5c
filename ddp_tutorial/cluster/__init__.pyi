from .cluster import Cluster as Cluster
from .cluster import Ended as Ended
from .cluster import Process as Process
from .cluster import why_not as why_not
