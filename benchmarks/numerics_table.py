#!/usr/bin/env python3
"""A training step in layout-invariant numerics beside `fast`, as a Markdown table.

`moe train` runs with either, in turn, round by round; a run gives the median time of its steps after
the first. The ratio is taken inside a round; the table has the median over rounds and, in
brackets, the quartiles. The best steps of all rounds stand beside it: what is left when nothing
else wanted the cores.
"""
import argparse
import json
import pathlib
import random
import statistics
import sys
import tempfile

import table_lines as lines

LARGE = "--hidden-size 1024 --num-layers 1 --num-attention-heads 16 --micro-batches 1 --ranks 1"
DEMO = "--num-experts 8 --topk 2 --lr 0.002"
# Name, tokens of a rank in a round, steps, flags.
SHAPES = [
    *[(f"E 8 k 2 H 1024 F 2816, T {tokens}", tokens, 3,
       f"{LARGE} --num-experts 8 --topk 2 --moe-ffn-hidden-size 2816") for tokens in (1024, 4096)],
    *[(f"E 64 k 6 H 1024 F 512, T {tokens}", tokens, 3,
       f"{LARGE} --num-experts 64 --topk 6 --moe-ffn-hidden-size 512") for tokens in (1024, 4096)],
    ("demo's model, 1 rank, T 4096", 4096, 8, f"{DEMO} --ranks 1 --micro-batches 1"),
    ("demo: 4 ranks, T 512", 512, 16, f"{DEMO} --ranks 4 --ep 2"),
]
NUMERICS = ("fast", "layout-invariant")
LENGTH = 128  # tokens per sequence


def step_times(args, text, out, numerics, shape):
    """Milliseconds of a run's steps after the first."""
    _, tokens, steps, flags = shape
    command = [args.moe, "train", "--data", str(text), "--out", str(out), "--numerics", numerics,
               "--seq-length", str(LENGTH), "--micro-batch-size", str(tokens // LENGTH), "--steps",
               str(steps + 1), "--eval-sequences", "1", "--threads", "1", "--quiet", *flags.split()]
    if lines.run(command, lines.clean_environment()) is None:
        sys.exit(f"{' '.join(command)} did not end in time")
    with open(out / "metrics.jsonl", encoding="utf-8") as metrics:
        rows = [json.loads(line) for line in metrics]
    return [row["step_ms"] for row in rows if row.get("step", 0) > 1]


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--moe", required=True, help="the program `moe`")
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    print(f"{lines.machine()}\n")
    lines.head(["training step", "fast, ms", "layout-invariant / fast", "of the best steps"])
    with tempfile.TemporaryDirectory() as folder:
        text = pathlib.Path(folder, "text")
        words = random.Random(1)
        text.write_text(" ".join(f"{words.randrange(5000):x}" for _ in range(400_000)),
                        encoding="ascii")
        for shape in SHAPES:
            times = {numerics: [] for numerics in NUMERICS}
            for _ in range(args.rounds):
                for numerics in NUMERICS:
                    times[numerics].append(
                        step_times(args, text, pathlib.Path(tempfile.mkdtemp(dir=folder)),
                                       numerics, shape))
            medians = {n: [statistics.median(run) for run in times[n]] for n in NUMERICS}
            best = {n: min(min(run) for run in times[n]) for n in NUMERICS}
            ratios = [b / a for a, b in zip(medians["fast"], medians["layout-invariant"])]
            lines.row([shape[0], lines.spread(medians["fast"], ".0f"), lines.spread(ratios, ".3f"),
                       f"{best['layout-invariant'] / best['fast']:.3f}"])


if __name__ == "__main__":
    main()
