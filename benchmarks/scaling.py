#!/usr/bin/env python3
"""Time of an MoE layer, forward and backward, over tokens, experts and ranks, by `moe sweep`: rows as
JSON lines and three plots in one SVG.

Ranks are threads of one machine and share the same tokens: what grows with their number is the cost of
dividing work, not the work.
"""
import argparse
import json
import math
import pathlib

import table_lines

LAYER = ["--hidden-size", "256", "--moe-ffn-hidden-size", "512", "--topk", "2", "--threads", "1"]
TOKENS = [64 << (2 * i) for i in range(5)]          # 64 .. 16,384
EXPERTS = [4 << i for i in range(7)]                # 4 .. 256
RANKS = [1 << i for i in range(7)]                  # 1 .. 64
SHARED_TOKENS = 8192
WIDTH, HEIGHT, MARGIN = 330, 250, 48
COLORS = ["#1f5fa8", "#c2571a", "#3a7d44"]


def points(experts, ranks, tokens):
    """The settings of a point, as lists of flags."""
    return ["--num-experts", str(experts), "--ranks", str(ranks), "--tokens-per-rank", str(tokens)]


def panels():
    """Title, axis, and by name of a line its points (value on the axis, flags)."""
    yield "tokens, 1 rank", "tokens", {
        f"{experts} experts": [(t, points(experts, 1, t)) for t in TOKENS] for experts in (8, 64)}
    yield "experts, 1 rank", "experts", {
        f"{tokens} tokens": [(e, points(e, 1, tokens)) for e in EXPERTS] for tokens in (256, 4096)}
    yield f"ranks, {SHARED_TOKENS} tokens in all, 64 experts", "ranks", {
        "64 experts": [(r, points(64, r, SHARED_TOKENS // r)) for r in RANKS]}


def measure(args, flags):
    """The row of one point."""
    row, = table_lines.run([args.moe, "sweep", *LAYER, *flags, "-r", str(args.repetitions), "-J",
                            "/dev/stdout", "--quiet"], table_lines.clean_environment())
    return row


def log_scale(low, high, length):
    def place(value):
        return length * (math.log(value) - math.log(low)) / (math.log(high) - math.log(low))
    return place


def text(x, y, content, extra=""):
    return f'<text x="{x:.1f}" y="{y:.1f}" {extra}>{content}</text>'


def draw_panel(left, title, axis, lines):
    """Both axes logarithmic: what grows in proportion is a line of slope 1, drawn dashed."""
    xs = sorted({x for line in lines.values() for x, _ in line})
    ys = [y for line in lines.values() for _, y in line]
    decades = range(math.floor(math.log10(min(ys))), math.ceil(math.log10(max(ys))) + 1)
    low, high = 10.0**decades[0], 10.0**decades[-1]
    x_of = log_scale(xs[0], xs[-1], WIDTH)
    y_of = log_scale(low, high, HEIGHT)
    top = MARGIN
    parts = [f'<rect x="{left}" y="{top}" width="{WIDTH}" height="{HEIGHT}" fill="none" stroke="#999"/>',
             text(left, top - 12, f"step time over {title}", 'font-weight="bold"'),
             text(left + WIDTH / 2, top + HEIGHT + 36, axis, 'text-anchor="middle"')]
    for x in xs:
        parts.append(text(left + x_of(x), top + HEIGHT + 18, f"{x:,}", 'text-anchor="middle"'))
    for time in (step * 10.0**power for power in decades for step in (1, 2, 5)):
        if time > high:
            continue
        y = top + HEIGHT - y_of(time)
        parts += [f'<path d="M{left} {y:.1f}h{WIDTH}" stroke="#ddd"/>',
                  text(left - 6, y + 4, f"{time:g} ms", 'text-anchor="end"')]
    if axis != "ranks":
        x_end = min(xs[-1], xs[0] * high / ys[0])
        parts.append(f'<path d="M{left} {top + HEIGHT - y_of(ys[0]):.1f}L{left + x_of(x_end):.1f} '
                     f'{top + HEIGHT - y_of(ys[0] * x_end / xs[0]):.1f}" stroke="#999" '
                     'stroke-dasharray="4 4" fill="none"/>')
    for i, (name, line) in enumerate(lines.items()):
        places = [(left + x_of(x), top + HEIGHT - y_of(y)) for x, y in line]
        path = "L".join(f"{x:.1f} {y:.1f}" for x, y in places)
        color = COLORS[i % len(COLORS)]
        parts.append(f'<path d="M{path}" fill="none" stroke="{color}" stroke-width="2"/>')
        parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{color}"/>' for x, y in places]
        parts.append(text(left + 8, top + 18 + 16 * i, name, f'fill="{color}"'))
    return parts


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--moe", default="build/release/moe/cli/moe")
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--rows", type=pathlib.Path, default=pathlib.Path("build/scaling.jsonl"))
    parser.add_argument("--svg", type=pathlib.Path, default=pathlib.Path("build/scaling.svg"))
    args = parser.parse_args()
    parts = []
    with open(args.rows, "w", encoding="utf-8") as rows:
        for i, (title, axis, lines) in enumerate(panels()):
            measured = {}
            for name, line in lines.items():
                for x, flags in line:
                    row = measure(args, flags)
                    rows.write(json.dumps(row) + "\n")
                    measured.setdefault(name, []).append((x, row["step_ms"]))
                    print(f"{title}: {name}, {x} {axis}: {row['step_ms']:.2f} ms", flush=True)
            parts += draw_panel(MARGIN + 20 + i * (WIDTH + 70), title, axis, measured)
    width, height = 3 * (WIDTH + 70) + MARGIN, HEIGHT + 2 * MARGIN + 10
    args.svg.write_text(
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        'font-family="sans-serif" font-size="12">\n<rect width="100%" height="100%" fill="#fff"/>\n'
        + "\n".join(parts) + "\n</svg>\n", encoding="utf-8")


if __name__ == "__main__":
    main()
