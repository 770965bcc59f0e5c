"""Figures that could mislead: what is compared stands on one axis, and nothing is drawn that was not given."""

import matplotlib.pyplot as plt

from ddp_tutorial.figures import plots


def test_dots_of_all_groups_stand_on_one_logarithmic_axis_with_their_medians() -> None:
    groups = {"reading": {"one": [900.0, 1000.0, 5000.0], "two": [9e5, 1e6, 1.1e6]}, "training": {"one": [90.0, 100.0]}}
    figure = plots.dots_by_group(groups, "samples per second", "title")
    reading, training = figure.axes
    assert reading.get_xscale() == training.get_xscale() == "log"
    assert reading.get_xlim() == training.get_xlim()
    low, high = reading.get_xlim()
    assert low < 90
    assert high > 1.1e6
    assert [text.get_text() for text in reading.texts] == ["1,000", "1,000,000"]
    assert [text.get_text() for text in training.texts] == ["95"]
    assert [list(line.get_xdata()) for line in reading.lines] == [[900, 5000], [1000], [9e5, 1.1e6], [1e6]]
    plt.close(figure)
