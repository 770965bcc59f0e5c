"""Implement a matplotlib backend for ranks that are launched from a notebook.

`plt.show()` sends the open figures to the parent, which displays them under the cell. On a rank, Matplotlib's default
backend cannot draw into the notebook, so it would print `Figure(640x480)`. The environment variable MPLBACKEND selects
this module, so only ranks that draw figures import matplotlib.
"""

import io

from matplotlib.backend_bases import FigureManagerBase
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from ddp_tutorial.processes.rank import send_figure


class FigureManager(FigureManagerBase):
    """Figure manager that sends figures to the parent process."""

    @classmethod
    def pyplot_show(cls, *, block: bool | None = None) -> None:
        """Send all open figures to the parent, and close them."""
        from matplotlib import pyplot  # pyplot imports this module

        for number in pyplot.get_fignums():
            cls.show_in_parent(pyplot.figure(number))
        pyplot.close("all")

    @staticmethod
    def show_in_parent(figure: Figure) -> None:
        """Send one figure to the parent."""
        send_figure(png_of(figure))


class FigureCanvas(FigureCanvasAgg):
    """Canvas that renders figures with Agg."""

    manager_class = FigureManager


def png_of(figure: Figure) -> bytes:
    """Return the figure as a PNG image, with the size and resolution of a notebook figure."""
    picture = io.BytesIO()
    figure.savefig(picture, format="png", bbox_inches="tight", dpi=72)
    return picture.getvalue()
