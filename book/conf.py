"""Sphinx settings of the book. `pages.py` writes the sources, and `python book/build.py` runs everything."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))  # for the extension

project = "ddp_tutorial"
html_title = "ddp_tutorial"
language = "en"

extensions = ["myst_nb", "extension"]
nb_execution_mode = "off"  # the book shows the committed outputs
nb_merge_streams = True
myst_enable_extensions = ["dollarmath"]
myst_heading_anchors = 3
smartquotes = False  # keep the two hyphens of "--steps"

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
