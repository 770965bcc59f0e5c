"""Figures that could mislead: comparisons share an axis, and no value is invented."""

import matplotlib.pyplot as plt
import pytest

from ddp_tutorial.ddp.timeline import COMPUTE, LINK, Span, Timeline
from ddp_tutorial.figures import plots
from ddp_tutorial.figures.lanes import lanes
from ddp_tutorial.figures.schedule_plots import schedules
from ddp_tutorial.pipeline.schedules import gpipe, simulate


def test_dots_of_all_groups_share_one_logarithmic_axis_with_medians() -> None:
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


def test_lanes_of_all_panels_share_one_axis() -> None:
    quick = [Span("computes", "forward 0", 5.0, 5.02), Span("link", "gather 1", 5.01, 5.03)]
    slow = [Span("computes", "backward 0", 7.0, 7.1), Span("link", "scatter rest", 7.05, 7.051)]
    figure = lanes({"quick": quick, "slow": slow}, "title")
    first, second = figure.axes
    assert first.get_xlim() == second.get_xlim()
    assert [round(box.get_x(), 6) for box in first.patches] == [0, 10]
    assert [round(box.get_width(), 6) for box in first.patches] == [20, 20]
    assert [box.get_y() for box in first.patches] == [-0.42, 1 - 0.42]
    assert [text.get_text() for text in first.texts] == ["0", "1"]
    assert [text.get_text() for text in second.texts] == ["0"]  # the text would not fit into the other box
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["forward", "backward", "gather", "scatter"]
    plt.close(figure)


def test_repeats_are_drawn_from_zero_on_request() -> None:
    series = {"a launch": {"one": [9.0, 10.0], "two": [18.0, 19.0]}}
    for from_zero in True, False:
        figure = plots.repeats_and_medians(series, "title", "x", "y", from_zero=from_zero)
        assert (figure.axes[0].get_ylim()[0] == 0) == from_zero
        plt.close(figure)


def test_one_point_of_a_sweep_is_marked_below_its_timeline() -> None:
    def step(seconds: float) -> Timeline:
        spans = [Span(COMPUTE, "backward", 3.0, 3.0 + seconds), Span(LINK, "bucket 0", 3.01, 3.02)]
        return Timeline([spans], "a link")

    timelines, several = {0.5: step(0.08), 2.0: step(0.05)}, {0.5: [80.0, 90.0, 85.0], 2.0: [50.0, 70.0, 51.0]}
    figures = [
        plots.one_of_sweep(timelines, x, several, ([0.5, 1, 2], [78, 60, 49]), "title", "MiB") for x in timelines
    ]
    for figure, x, length in zip(figures, timelines, (80, 50), strict=True):
        above, below = figure.axes
        assert above.get_xlim() == pytest.approx((0, 100))  # of the longest, with space for text
        assert max(bar.get_width() for bar in above.patches) == pytest.approx(length)
        lines = [[list(line.get_xdata()), list(line.get_ydata())] for line in below.lines]
        assert lines[-1] == [[x], pytest.approx([length])]
        assert lines[0] == [[0.5, 1, 2], [78, 60, 49]]
        assert [[0.5, 2.0], [80.0, 50.0]] in lines  # the fastest
        assert [label.get_text() for label in below.get_xticklabels()] == ["0.5", "2"]
        plt.close(figure)


@pytest.mark.parametrize(("micro_batches", "numbered"), [(8, 64), (16, 64)])
def test_numbers_appear_only_in_boxes_that_fit_the_longest_number(micro_batches: int, numbered: int) -> None:
    figure = schedules({"plan": simulate(gpipe(4, micro_batches), 1, 2).ranks}, "title")
    assert len(figure.axes[0].texts) == numbered
    plt.close(figure)
