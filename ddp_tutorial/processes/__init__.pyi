from .errors import RankError as RankError
from .errors import RankTimeoutError as RankTimeoutError
from .launcher import launch as launch
from .rank import progress as progress
from .starting import run as run
