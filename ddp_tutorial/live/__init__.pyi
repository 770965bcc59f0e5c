from .pool import Ranks as Ranks
