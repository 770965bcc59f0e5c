from .exhibits import MUSEUM as MUSEUM
from .laws import LAWS as LAWS
from .laws import examine as examine
from .parts import Exhibit as Exhibit
