from .faults import Fault as Fault
from .faults import inject as inject
from .fingerprints import fingerprinted as fingerprinted
from .hangs import CollectiveError as CollectiveError
from .hangs import watching as watching
