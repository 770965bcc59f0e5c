"""Widgets show the figure that they name, and leave none behind."""

import base64

import matplotlib.pyplot as plt
import pytest
from nbformat.v4 import new_code_cell, new_notebook, new_output

from ddp_tutorial.experiments.notebooks import tidy
from ddp_tutorial.figures.live import explore

PNG = b"\x89PNG"


def bar(height):
    figure, axes = plt.subplots(figsize=(2, 2))
    axes.bar([0], [height])
    axes.set_ylim(0, 10)
    return figure


def test_the_picture_follows_the_slider():
    choice, _, picture = explore(bar, height=[1, 5, 9]).children
    assert choice.description == "height"
    assert choice.options == (1, 5, 9)
    seen = []
    for height in (1, 9, 5, 1):
        choice.value = height
        seen.append(bytes(picture.value))
    assert all(each.startswith(PNG) for each in seen)
    assert len(set(seen)) == 3
    assert seen[0] == seen[3]


def test_what_the_widget_says_of_itself_does_not_hold_the_picture():
    assert len(repr(explore(bar, height=range(1, 9)))) < 3000


def test_where_no_kernel_runs_the_figure_that_it_begins_with_stands_in_its_place():
    widget = explore(bar, start={"height": 5}, height=[1, 5])
    shown = widget._repr_mimebundle_()
    assert base64.b64decode(shown["image/png"]) == bytes(widget.children[-1].value)
    cell = new_code_cell("x", outputs=[new_output("display_data", data=shown)])
    tidy(new_notebook(cells=[cell]))
    assert cell.outputs[0].data == {"image/png": shown["image/png"]}


def draw(height, width):
    if height * width > 50:
        raise ValueError(f"{height} x {width} is too large")
    return bar(height)


def test_sliders_begin_with_the_first_values_and_draw_anew_when_one_is_moved():
    before = plt.get_fignums()
    height, width, message, picture = explore(draw, height=[3, 9], width=[2, 7]).children
    assert (height.value, width.value) == (3, 2)
    first = bytes(picture.value)
    height.value = 9
    assert first.startswith(PNG)
    assert bytes(picture.value) != first
    assert message.value == ""
    assert plt.get_fignums() == before


def test_sliders_can_begin_elsewhere_so_that_their_values_stay_in_order():
    height, width, _, picture = explore(draw, start={"height": 9}, height=[1, 3, 9], width=[2, 7]).children
    assert height.options == (1, 3, 9)
    assert (height.value, width.value) == (9, 2)
    assert bytes(picture.value) == bytes(explore(draw, height=[9], width=[2]).children[-1].value)


@pytest.mark.parametrize("start", [{"height": 4}, {"depth": 3}])
def test_a_start_that_is_on_no_slider_is_refused(start):
    with pytest.raises(ValueError, match="is not a value of slider"):
        explore(draw, start=start, height=[3, 9], width=[2, 7])


def test_a_choice_that_cannot_be_drawn_is_told_and_the_picture_stays():
    height, width, message, picture = explore(draw, height=[3, 9], width=[2, 7]).children
    height.value = 9
    last = bytes(picture.value)
    width.value = 7
    assert message.value == "9 x 7 is too large"
    assert bytes(picture.value) == last
    height.value = 3
    assert message.value == ""
