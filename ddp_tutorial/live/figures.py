"""A matplotlib backend for ranks: `plt.show()` sends the figures home, where a notebook shows them.

It is named by MPLBACKEND, so that matplotlib is imported only on ranks that draw.
"""

from typing import Any

from matplotlib._pylab_helpers import Gcf
from matplotlib.backend_bases import FigureManagerBase
from matplotlib.backends.backend_agg import FigureCanvasAgg

from ddp_tutorial.live import shown


class FigureManager(FigureManagerBase):
    """What pyplot asks to show its figures."""

    @classmethod
    def pyplot_show(cls, *, block: bool | None = None) -> None:
        """Send all open figures home, and close them, as in a notebook."""
        managers: list[Any] = Gcf.get_all_fig_managers()
        for manager in managers:
            shown.display(manager.canvas.figure)
        Gcf.destroy_all()


class FigureCanvas(FigureCanvasAgg):
    """What pyplot draws on."""

    manager_class = FigureManager
