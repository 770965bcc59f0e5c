"""Widgets show the figure of their values, and leave no other figures."""

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


def test_the_widget_description_does_not_contain_the_picture():
    assert len(repr(explore(bar, height=range(1, 9)))) < 3000


def test_without_a_kernel_the_first_figure_is_shown():
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


def test_sliders_start_at_the_first_values_and_redraw_when_moved():
    before = plt.get_fignums()
    height, width, message, picture = explore(draw, height=[3, 9], width=[2, 7]).children
    assert (height.value, width.value) == (3, 2)
    first = bytes(picture.value)
    height.value = 9
    assert first.startswith(PNG)
    assert bytes(picture.value) != first
    assert message.value == ""
    assert plt.get_fignums() == before


def test_sliders_can_start_at_other_values_in_order():
    height, width, _, picture = explore(draw, start={"height": 9}, height=[1, 3, 9], width=[2, 7]).children
    assert height.options == (1, 3, 9)
    assert (height.value, width.value) == (9, 2)
    assert bytes(picture.value) == bytes(explore(draw, height=[9], width=[2]).children[-1].value)


@pytest.mark.parametrize("start", [{"height": 4}, {"depth": 3}])
def test_a_start_value_outside_the_slider_is_rejected(start):
    with pytest.raises(ValueError, match=r"the start value of slider .* must be one of its values"):
        explore(draw, start=start, height=[3, 9], width=[2, 7])


def test_a_choice_that_cannot_be_drawn_is_reported_below_the_last_picture():
    height, width, message, picture = explore(draw, height=[3, 9], width=[2, 7]).children
    height.value = 9
    last = bytes(picture.value)
    width.value = 7
    assert message.value == "9 x 7 is too large"
    assert bytes(picture.value) == last
    height.value = 3
    assert message.value == ""
