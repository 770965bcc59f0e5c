"""A matplotlib backend for ranks that are started from a notebook: `plt.show()` sends the figures to the parent, which
shows them below the cell. A rank has no notebook: matplotlib's own backend would print `Figure(640x480)` there.

It is named by MPLBACKEND, so that matplotlib is imported only on ranks that draw.
"""

import io

from matplotlib.backend_bases import FigureManagerBase
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from ddp_tutorial.processes.rank import send_figure


class FigureManager(FigureManagerBase):
    """What pyplot asks to show its figures."""

    @classmethod
    def pyplot_show(cls, *, block: bool | None = None) -> None:
        """Show all open figures, and close them, as in a notebook."""
        from matplotlib import pyplot  # which imports this module

        for number in pyplot.get_fignums():
            cls.show_in_parent(pyplot.figure(number))
        pyplot.close("all")

    @staticmethod
    def show_in_parent(figure: Figure) -> None:
        """Send it to the parent."""
        send_figure(png_of(figure))


class FigureCanvas(FigureCanvasAgg):
    """What pyplot draws on."""

    manager_class = FigureManager


def png_of(figure: Figure) -> bytes:
    """The figure as a notebook draws it."""
    picture = io.BytesIO()
    figure.savefig(picture, format="png", bbox_inches="tight", dpi=72)
    return picture.getvalue()
