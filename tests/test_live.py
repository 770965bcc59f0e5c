"""The slider shows the figure that it names, and leaves none behind."""

import matplotlib.pyplot as plt
import pytest

from ddp_tutorial.live import slider

PNG = b"\x89PNG"


def figures(*heights):
    frames = {}
    for height in heights:
        frames[f"{height} high"], axes = plt.subplots(figsize=(2, 2))
        axes.bar([0], [height])
        axes.set_ylim(0, 10)
    return frames


def test_the_picture_follows_the_slider():
    choice, picture = slider(figures(1, 5, 9), "bar").children
    assert choice.description == "bar"
    assert choice.options == ("1 high", "5 high", "9 high")
    seen = []
    for name in ("1 high", "9 high", "5 high", "1 high"):
        choice.value = name
        seen.append(bytes(picture.value))
    assert all(each.startswith(PNG) for each in seen)
    assert len(set(seen)) == 3
    assert seen[0] == seen[3]


def test_figures_are_closed_and_the_notebook_shows_none_of_them_itself():
    before = plt.get_fignums()
    frames = figures(1, 2)
    slider(frames, "bar")
    assert plt.get_fignums() == before


def test_what_the_widget_says_of_itself_does_not_hold_the_pictures():
    assert len(repr(slider(figures(*range(1, 9)), "bar"))) < 3000


def test_without_a_figure_it_says_so():
    with pytest.raises(ValueError, match="at least one figure"):
        slider({}, "bar")
