from .exhibits import MUSEUM as MUSEUM
from .invariants import INVARIANTS as INVARIANTS
from .invariants import examine as examine
from .parts import Exhibit as Exhibit
