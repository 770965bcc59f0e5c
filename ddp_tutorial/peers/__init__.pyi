from .side_by_side import NAMES as NAMES
from .side_by_side import Outcome as Outcome
from .side_by_side import train_with as train_with
from .work import Work as Work
from .work import digits as digits
from .work import gpt as gpt
from .work import stories as stories
