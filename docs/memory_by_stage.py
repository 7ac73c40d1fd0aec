"""Draws `pictures/memory-by-stage.svg`: bytes per rank at each ZeRO stage, by the paper's formula and as counted.

torchrun --standalone --nproc-per-node 4 docs/memory_by_stage.py docs/pictures/memory-by-stage.svg
"""

import sys
from functools import partial
from pathlib import Path

import torch
from torch import nn

import zeroshard as zs

WIDTH, LAYERS = 256, 8
KINDS = ("parameters", "gradients", "optimizer states")
Bytes = tuple[int, int, int]  # by kind; fp32 master weights are optimizer states, as in the paper

STYLE = """
svg{font-family:system-ui,-apple-system,'Segoe UI',Roboto,'Liberation Sans',sans-serif;font-size:14px}
.page{fill:#ffffff}.axis{stroke:#5f6870;fill:none}text{fill:#23282d}.quiet{fill:#5f6870}.name{font-weight:600}
.k0{fill:#2f6db5;stroke:#2f6db5}.k1{fill:#3d9c5f;stroke:#3d9c5f}.k2{fill:#b5651d;stroke:#b5651d}.formula{fill-opacity:.4}
@media (prefers-color-scheme:dark){.page{fill:#15181b}.axis{stroke:#9ba4ab}text{fill:#e3e6e8}.quiet{fill:#9ba4ab}
.k0{fill:#5794dc;stroke:#5794dc}.k1{fill:#4fb274;stroke:#4fb274}.k2{fill:#d98a45;stroke:#d98a45}}
"""


def formula(stage: int, parameters: int, ranks: int) -> Bytes:
    """Bytes per rank under mixed-precision Adam: 2, 2 and 12 a parameter, divided from stages 3, 2 and 1 on.

    Rajbhandari et al., 1910.02054, section 5 and figure 1.
    """
    parts = (2 * parameters, 2 * parameters, 12 * parameters)
    first = (3, 2, 1)  # the first stage that divides each
    whole = [part // ranks if stage >= divides else part for part, divides in zip(parts, first, strict=True)]
    return whole[0], whole[1], whole[2]


def measured(mesh: zs.Mesh, stage: int) -> Bytes:
    """Bytes that the ledger of this rank counts after a step of a model of `LAYERS` blocks in bf16."""
    blocks = [
        nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)) for _ in range(LAYERS)
    ]
    plan = zs.Plan(zero=stage, precision="bf16", transport="network")
    engine = zs.Engine(nn.Sequential(*blocks), partial(torch.optim.AdamW, lr=1e-3), plan, mesh=mesh)
    engine.backward(engine(torch.randn(2, WIDTH)).float().square().mean())
    engine.step()
    rows = {row.category: row.measured_bytes for row in engine.memory().rows if row.tier == "device"}
    states = rows.get("master weights", 0) + rows["optimizer states"]
    return rows["parameters"], rows["gradients"], states


def parameters() -> int:
    """Parameters of the model."""
    return LAYERS * (8 * WIDTH * WIDTH + 5 * WIDTH)


def draw(counted: list[Bytes], ranks: int) -> str:
    """The picture: for each stage a bar by the formula above one by the count."""
    scale = 520 / (16 * parameters())
    lines = [f'<rect class="page" width="100%" height="100%"/><text class="name" x="20" y="28">{TITLE}</text>']
    for place, kind in enumerate(KINDS):
        x = 110 + 150 * place
        lines.append(
            f'<rect class="k{place}" x="{x}" y="42" width="12" height="12"/><text x="{x + 18}" y="53">{kind}</text>'
        )
    for stage, count in enumerate(counted):
        y = 76 + 56 * stage
        lines.append(f'<text class="name" x="20" y="{y + 27}">stage {stage}</text>')
        for row, (name, parts) in enumerate(
            (("formula", formula(stage, parameters(), ranks)), ("counted", count))
        ):
            x, top = 110.0, y + 22 * row
            for kind, nbytes in enumerate(parts):
                shade = " formula" if name == "formula" else ""
                width = nbytes * scale
                lines.append(
                    f'<rect class="k{kind}{shade}" x="{x:.1f}" y="{top}" width="{width:.1f}" height="18"/>'
                )
                x += width
            text = f"{sum(parts) / 1e6:.2f} MB, {name}"
            lines.append(f'<text class="quiet" x="{x + 8:.1f}" y="{top + 14}">{text}</text>')
    lines.append('<path class="axis" d="M110 70V300"/>')
    head = '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 800 310" width="800" height="310" role="img">'
    described = f"<title>{TITLE}</title><desc>{DESCRIBED}</desc><style>{STYLE}</style>"
    return "\n".join([head + described, *lines, "</svg>"]) + "\n"


TITLE = f"Bytes of model states on each of 4 ranks: {parameters() / 1e6:.1f} million parameters, bf16, Adam"
DESCRIBED = (
    "Two bars for each ZeRO stage, which agree: bytes by the formulas of the ZeRO paper, and counted in a step."
)

if __name__ == "__main__":
    mesh = zs.init_mesh()
    counts = [measured(mesh, stage) for stage in range(4)]
    if mesh.rank == 0:
        Path(sys.argv[1]).write_text(draw(counts, mesh.ranks))
