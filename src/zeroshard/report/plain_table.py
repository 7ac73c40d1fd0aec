"""The tables of the commands that print lists of figures: without lines, and as narrow as possible."""

from collections.abc import Sequence

from rich.box import SIMPLE_HEAD
from rich.table import Table


def plain_table(title: str = "", left: Sequence[str] = (), right: Sequence[str] = (), caption: str = "") -> Table:
    """An empty table with its title and its caption to the left, columns of text, and columns of numbers."""
    table = Table(
        title=f"\n{title}" if title else None,
        title_justify="left",
        caption=caption or None,
        caption_justify="left",
        box=SIMPLE_HEAD,
        show_edge=False,
        padding=(0, 1, 0, 0),  # with the edges and rich's own padding, names of layers break in 80 columns
    )
    for column in left:
        table.add_column(column, overflow="fold")
    for column in right:
        table.add_column(column, justify="right", no_wrap=True)
    return table
