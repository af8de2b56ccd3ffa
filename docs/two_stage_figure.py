"""Draws docs/two_stage.svg, the two-stage reduction with three ranks: `python docs/two_stage_figure.py`."""

from __future__ import annotations

from pathlib import Path

COLOURS = ("#2f6fb3", "#d95f02", "#1b9e77")  # of the owners of the three parts, from the palette of all pictures
LANES = (74, 194, 314)  # where the ranks' lanes start
PART, FLOAT, ROW = 58, 44, 13  # a part's width; heights of floats and of an encoded row
INK = "#333"


def text(x: float, y: float, words: str, size: int = 13, anchor: str = "middle", colour: str = INK) -> str:
    return f'<text x="{x}" y="{y}" font-size="{size}" text-anchor="{anchor}" fill="{colour}">{words}</text>'


def floats(x: float, y: float, owner: int, height: int = FLOAT) -> str:
    return f'<rect x="{x}" y="{y}" width="{PART}" height="{height}" rx="3" fill="{COLOURS[owner]}"/>'


def row(x: float, y: float, owner: int) -> str:
    """Encoded bytes: codes and, at the end, scales."""
    codes = f'<rect x="{x}" y="{y}" width="{PART}" height="{ROW}" rx="2" fill="{COLOURS[owner]}" fill-opacity="0.45"/>'
    scales = f'<rect x="{x + PART - 12}" y="{y}" width="12" height="{ROW}" rx="2" fill="{COLOURS[owner]}"/>'
    return codes + scales


def arrow(x0: float, y0: float, x1: float, y1: float, owner: int, dashed: bool = False) -> str:
    bend = (x1 - x0) * 0.45
    dash = ' stroke-dasharray="5 4"' if dashed else ""
    path = f"M{x0} {y0} C{x0 + bend} {y0} {x1 - bend} {y1} {x1} {y1}"
    line = f'stroke="{COLOURS[owner]}" stroke-width="1.6"{dash} marker-end="url(#tip{owner})"'
    return f'<path d="{path}" fill="none" {line}/>'


def tensor(x: float, lane: int) -> list[str]:
    return [floats(x + part * (PART + 3), lane + 22, part) for part in range(3)]


def drawing() -> str:
    tips = "".join(
        f'<marker id="tip{owner}" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
        f'<path d="M0 0 L8 4 L0 8 z" fill="{colour}"/></marker>'
        for owner, colour in enumerate(COLOURS)
    )
    shapes = [f"<defs>{tips}</defs>", '<rect width="1010" height="470" rx="8" fill="#fff"/>']
    heads = ((150, "its tensor, cut into", "one part per owner"), (400, "encoded rows,", "and its own part"))
    heads += ((545, "sum in fp32,", "in rank order"), (660, "encoded", "again"), (885, "decoded, by the", "owner too"))
    for x, above, below in heads:
        shapes += [text(x, 26, above), text(x, 43, below)]
    for rank, lane in enumerate(LANES):
        shapes.append(f'<rect x="8" y="{lane - 12}" width="994" height="108" rx="6" fill="#f4f4f6"/>')
        shapes.append(text(30, lane + 48, f"rank {rank}", 13, "middle"))
    for rank, lane in enumerate(LANES):
        shapes += tensor(62, lane) + tensor(795, lane)
        shapes += [floats(516, lane + 22, rank), row(631, lane + 37, rank)]
        shapes += [arrow(432, lane + 44, 512, lane + 44, rank), arrow(577, lane + 44, 627, lane + 44, rank)]
        for source, from_lane in enumerate(LANES):
            y = lane + (2, 34, 66)[source]
            own = source == rank
            shapes.append(floats(370, y, rank, 24) if own else row(370, y + 6, rank))
            shapes.append(arrow(246, from_lane + 28 + 16 * rank, 366, y + 12, rank, dashed=own))
            shapes.append(arrow(692, lane + 44, 791, from_lane + 28 + 16 * rank, rank))
    shapes += [
        row(62, 436, 0),
        text(128, 447, "a row of bytes: codes, scales", 12, "start"),
        '<path d="M330 443 h40" stroke="#333" stroke-width="1.6" stroke-dasharray="5 4"/>',
        text(378, 447, "stays at home, exact", 12, "start"),
        text(1000, 447, "every rank sends 2(N-1)/N of the encoded tensor", 12, "end"),
    ]
    body = "\n".join(shapes)
    style = 'font-family="system-ui, sans-serif" role="img" aria-label="The two-stage reduction with three ranks"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 1010 470" {style}>\n{body}\n</svg>\n'


if __name__ == "__main__":
    (Path(__file__).parent / "two_stage.svg").write_text(drawing())
