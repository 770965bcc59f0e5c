"""Implement the matplotlib backend for a pool's ranks. The backend displays figures through `display`."""

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from ddp_tutorial.live import display
from ddp_tutorial.processes import figures


class FigureManager(figures.FigureManager):
    """Figure manager that displays figures through `display`."""

    @staticmethod
    def show_in_parent(figure: Figure) -> None:
        """Display one figure through `display`."""
        display.display(figure)


class FigureCanvas(FigureCanvasAgg):
    """Canvas that renders figures with Agg."""

    manager_class = FigureManager
