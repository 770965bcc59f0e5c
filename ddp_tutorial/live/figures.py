"""The matplotlib backend of ranks that stay: figures are shown as all else that a cell shows."""

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from ddp_tutorial.live import display
from ddp_tutorial.processes import figures


class FigureManager(figures.FigureManager):
    """What pyplot asks to show its figures."""

    @staticmethod
    def show_in_parent(figure: Figure) -> None:
        """Show it as `display` does."""
        display.display(figure)


class FigureCanvas(FigureCanvasAgg):
    """What pyplot draws on."""

    manager_class = FigureManager
