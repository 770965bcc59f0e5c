"""Sphinx's settings for the book. Its sources are made by `pages.py`; `python book/build.py` does all of it."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))  # `ours`, `pages`

project = "ddp_tutorial"
html_title = "ddp_tutorial"
language = "en"

extensions = ["myst_nb", "ours"]
nb_execution_mode = "off"  # what is shown is what was committed
nb_merge_streams = True
myst_enable_extensions = ["dollarmath"]
myst_heading_anchors = 3
smartquotes = False  # "--steps" has two hyphens

html_theme = "furo"
html_theme_options = {"navigation_with_keys": True}
html_math_renderer = "mathml"
html_static_path = ["static"]
html_css_files = ["book.css"]
html_js_files = ["book.js"]
html_copy_source = False
html_show_sphinx = False
html_show_copyright = False
html_permalinks_icon = "#"
templates_path: list[str] = []

maximum_signature_line_length = 100
toc_object_entries = False
python_display_short_literal_types = True
