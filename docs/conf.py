"""Sphinx: Markdown pages, and the public API from its docstrings."""

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

from zeroshard.version import __version__

project = "zeroshard"
author = "the zeroshard authors"
release = version = __version__
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_copybutton"]
exclude_patterns = ["_build"]
html_theme = "furo"
html_static_path = ["_static"]
html_css_files = ["zeroshard.css"]
copybutton_exclude = ".linenos, .go, .gp"  # outputs and prompts
html_title = f"zeroshard {release}"
html_show_sourcelink = False
html_copy_source = False
html_show_copyright = False
default_role = "code"  # what stands in backticks in a docstring
myst_heading_anchors = 3

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_preserve_defaults = True
napoleon_use_ivar = True  # attributes that a docstring lists are not documented a second time
python_maximum_signature_line_length = 88


def keep_colons(app: Any, what: str, name: str, found: object, options: object, lines: list[str]) -> None:
    """Put an attribute's docstring together again where napoleon took what comes before a colon for a type."""
    types = [line for line in lines if line.startswith(":type: ")]
    if what in ("attribute", "property") and len(lines) > 2 and types:
        first, *others = (line for line in lines if line not in types)
        lines[:] = [f"{types[0].removeprefix(':type: ')}: {first}", *others]


def setup(app: Any) -> None:
    """Run after napoleon, whose priority is 500."""
    app.connect("autodoc-process-docstring", keep_colons, priority=600)
