from .averaging import CountingLink as CountingLink
from .averaging import average as average
from .config import LocalConfig as LocalConfig
from .outer import OuterNesterov as OuterNesterov
from .rounds import Rounds as Rounds
from .strategies import DiLoCo as DiLoCo
from .strategies import LocalSGD as LocalSGD
from .strategies import PostLocalSGD as PostLocalSGD
