"""The tables of the commands that print lists of figures: without lines, and as narrow as possible."""

from rich.box import SIMPLE_HEAD
from rich.table import Table


def plain_table(title: str, caption: str = "") -> Table:
    """An empty table with its title and its caption to the left."""
    return Table(
        title=f"\n{title}",
        title_justify="left",
        caption=caption,
        caption_justify="left",
        box=SIMPLE_HEAD,
        show_edge=False,
        padding=(0, 1, 0, 0),  # with the edges and rich's own padding, names of layers break in 80 columns
    )
