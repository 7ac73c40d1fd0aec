"""Sphinx: Markdown pages, and the public API from its docstrings."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

from zeroshard.version import __version__

project = "zeroshard"
author = "the zeroshard authors"
release = version = __version__
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
exclude_patterns = ["_build"]
html_theme = "furo"
html_title = f"zeroshard {release}"
html_show_sourcelink = False
html_copy_source = False
myst_heading_anchors = 3

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_preserve_defaults = True
napoleon_use_ivar = True  # attributes that a docstring lists are not documented a second time
python_maximum_signature_line_length = 88
