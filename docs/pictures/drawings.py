"""Drawings as SVG, for light and dark pages: the three ways to split a model, and speed beside llama.cpp."""

import html
import re
from pathlib import Path

STYLE = """<style>
svg { --page: #ffffff; --ink: #1f1d1a; --soft: #676258; --line: #c9c4b8; --card: #fbfaf7; --a: #1f6f6b; --b: #c47a2c; --c: #5b6bb5; --rest: #b9b4a8; }
@media (prefers-color-scheme: dark) {
  svg { --page: #151514; --ink: #ecebe6; --soft: #a5a198; --line: #4a4843; --card: #1d1d1b; --a: #4fb0a6; --b: #d9924a; --c: #8f9de0; --rest: #77736a; }
}
text { font: 14px ui-sans-serif, system-ui, -apple-system, "Segoe UI", Roboto, "Noto Sans", sans-serif; fill: var(--ink); }
.title { font-size: 17px; font-weight: 600; } .soft { fill: var(--soft); font-size: 13px; } .bold { font-weight: 600; }
.mono { font-family: ui-monospace, "SF Mono", Menlo, Consolas, "DejaVu Sans Mono", monospace; font-size: 13px; fill: var(--a); }
.middle { text-anchor: middle; } .end { text-anchor: end; }
.page { fill: var(--page); } .card { fill: var(--card); stroke: var(--line); stroke-width: 1.5; } .spare { fill: none; stroke: var(--line); stroke-dasharray: 4 4; }
.a { fill: var(--a); } .b { fill: var(--b); } .c { fill: var(--c); } .rest { fill: var(--rest); }
.way { fill: none; stroke: var(--soft); stroke-width: 1.8; marker-end: url(#tip); } .axis { stroke: var(--line); }
</style>
<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto-start-reverse">
<path d="M0 0 8 4 0 8z" fill="context-stroke"/></marker></defs>"""

MODEL_LAYERS = 6
PANEL, PANEL_GAP = 300, 30
WIDTH, MARGIN = 960, 24
ROW_HEIGHT, BAR_HEIGHT = 58, 18
# Widths of names, and of the figures beside a bar.
NAMES, FIGURES = 170, 110


def svg(height: float, title: str, parts: list[str]) -> str:
    """The background is drawn too: a page may be dark where the system is light."""
    x, y, width, height = -MARGIN, -MARGIN, WIDTH + 2 * MARGIN, height + 2 * MARGIN
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="{x} {y} {width} {height}" width="{width}" height="{height}" role="img">'
    return "\n".join([head, f"<title>{title}</title>", STYLE, box(x, y, width, height, "page", 12), *parts, "</svg>", ""])


def text(x: float, y: float, words: str, style: str = "") -> str:
    return f'<text x="{x:g}" y="{y:g}"' + (f' class="{style}"' if style else "") + f">{html.escape(words)}</text>"


def box(x: float, y: float, width: float, height: float, style: str, radius: float = 8) -> str:
    return f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="{radius:g}" class="{style}"/>'


def way(path: str) -> str:
    return f'<path d="{path}" class="way"/>'


def split() -> str:
    panels = [
        ("Every layer over processes", "--tensor-parallel 2", "Each rank has a part of every layer;", "sums join them. For sockets and hosts.", ranks()),
        ("Layers over your machines", "--cluster", "A model that fits on none of them alone.", "They find each other; your key encrypts.", machines()),
        ("Layers over peers", "--swarm", "Machines that need not trust each other.", "They see activations: send no secrets.", peers()),
    ]  # fmt: skip
    parts = []
    for index, (title, option, first, second, drawing) in enumerate(panels):
        parts.append(f'<g transform="translate({index * (PANEL + PANEL_GAP)} 0)">')
        parts += [text(PANEL / 2, 22, title, "title middle"), text(PANEL / 2, 45, option, "mono middle"), *drawing]
        parts += [text(PANEL / 2, 282, first, "soft middle"), text(PANEL / 2, 301, second, "soft middle"), "</g>"]
    return svg(302, "Three ways to split a model", parts)


def ranks() -> list[str]:
    parts = [box(30, 62, 240, 196, "card")]
    for layer in range(MODEL_LAYERS):
        y = 74 + layer * 26
        parts += [box(46, y, 96, 18, "a", 4), box(158, y, 96, 18, "b", 4), text(150, y + 14, "+", "soft middle")]
    return [*parts, text(94, 247, "rank 0", "soft middle"), text(206, 247, "rank 1", "soft middle")]


def machines() -> list[str]:
    parts = []
    names = [("desk", "a", 2), ("kitchen", "b", 3), ("attic", "c", 1)]
    for index, (name, colour, layers) in enumerate(names):
        x = 6 + index * 104
        parts += [box(x, 92, 80, 118, "card"), text(x + 40, 232, name, "soft middle")]
        for layer in range(layers):
            parts.append(box(x + 12, 151 - layers * 13 + layer * 26 + 4, 56, 18, colour, 4))
        if index > 0:
            parts.append(way(f"M{x - 22} 151H{x - 4}"))
    return [*parts, way("M254 86C250 60 50 60 46 86")]


def peers() -> list[str]:
    parts = [box(4, 120, 84, 62, "card"), text(46, 147, "you: text", "soft middle"), text(46, 166, "and head", "soft middle")]
    places = [(150, 98, "a", 2), (236, 151, "b", 3), (150, 204, "c", 1)]
    for x, y, colour, layers in places:
        parts.append(f'<circle cx="{x}" cy="{y}" r="36" class="card"/>')
        parts += [box(x - 20, y - layers * 8 + layer * 16 + 2, 40, 12, colour, 3) for layer in range(layers)]
    parts += [f'<circle cx="{x}" cy="{y}" r="24" class="spare"/>' + text(x, y + 4, "spare", "soft middle") for x, y in [(262, 84), (262, 222)]]
    return [*parts, way("M80 117L112 104"), way("M184 112L206 127"), way("M206 176L188 187"), way("M112 198L82 186")]


def speed(results: Path) -> str:
    section, prompt, rows = latest_comparison(results.read_text())
    largest = [max(ratio(bars[column]) for bars in rows) for column in (1, 2)]
    # The bar of llama.cpp, to which that of consort is in proportion.
    unit = (WIDTH - NAMES - 2 * FIGURES) / sum(largest)
    columns = [NAMES, NAMES + unit * largest[0] + FIGURES]
    parts = [text(0, 14, "Tokens per second with two threads", "title"), text(0, 36, section, "soft")]
    parts += [box(WIDTH - 190, 2, 14, 14, "a", 3), text(WIDTH - 170, 14, "consort")]
    parts += [box(WIDTH - 90, 2, 14, 14, "rest", 3), text(WIDTH - 70, 14, "llama.cpp")]
    parts += [text(x, 72, name, "bold") for x, name in zip(columns, [f"prompt of {prompt} tokens", "answer"])]
    for index, (model, *bars) in enumerate(rows):
        y = 86 + index * ROW_HEIGHT
        parts.append(text(NAMES - 14, y + BAR_HEIGHT + 6, model, "end"))
        for x, (ours, theirs) in zip(columns, bars):
            end = x + unit * ratio((ours, theirs))
            parts += [box(x, y, end - x, BAR_HEIGHT, "a", 3), text(end + 8, y + 14, ours)]
            parts.append(text(end + 16 + 9 * len(ours), y + 14, f"{ratio((ours, theirs)):.1f} ×", "bold"))
            parts += [box(x, y + BAR_HEIGHT + 3, unit, BAR_HEIGHT, "rest", 3), text(x + unit + 8, y + BAR_HEIGHT + 17, theirs, "soft")]
    return svg(86 + len(rows) * ROW_HEIGHT - 14, "Speed of consort beside llama.cpp", parts)


def ratio(bars: tuple[str, str]) -> float:
    return float(bars[0]) / float(bars[1])


def latest_comparison(results: str) -> tuple[str, str, list[tuple]]:
    """The first comparison with llama.cpp: its date and machine, the length of the prompt, and of each model with two threads the
    speed of consort and llama.cpp for the prompt and for the answer."""
    for section in results.split("\n## ")[1:]:
        header = re.search(r"^\| model \| threads \| prefill (\d+): consort \| llama.cpp \|.*\n\|[-:| ]+\n((?:\|.*\n)+)", section, re.M)
        if header is None:
            continue
        heading, _, prose = section.partition("\n")
        machine = " ".join(prose.split()).split(". ")[0]
        rows, model = [], ""
        for line in header[2].splitlines():
            cells = [cell.strip() for cell in line.strip("|").split("|")]
            model = cells[0] or model
            if cells[1] == "2":
                rows.append((model, (cells[2], cells[3]), (cells[5], cells[6])))
        return f"{heading.split(',')[0]}, {machine}", header[1], rows
    raise SystemExit("bench/results.md has no comparison with llama.cpp")
