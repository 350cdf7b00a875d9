#!/usr/bin/env python3
"""One MoE layer, forward and backward, on more cores and on more ranks than cores, as a Markdown
table.

The same tokens on one core, on two by threads, on two by ranks, and on eight ranks: ways take turns,
round by round, and a ratio is taken inside a round.
"""
import argparse

import table_lines as lines

TOKENS = 4096
# Name, ranks, threads per rank.
WAYS = [("1 rank x 1 thread", 1, 1), ("1 rank x 2 threads", 1, 2), ("2 ranks x 1 thread", 2, 1),
        ("8 ranks x 1 thread", 8, 1)]
SHAPES = [("E 8 k 2 H 1024 F 2816", "--num-experts 8 --topk 2 --moe-ffn-hidden-size 2816"),
          ("E 64 k 6 H 1024 F 512", "--num-experts 64 --topk 6 --moe-ffn-hidden-size 512")]


def step_ms(args, shape, ranks, threads):
    """Median time of forward and backward, of the slowest rank."""
    command = [args.moe, "bench", "layer", *shape.split(), "--hidden-size", "1024", "--tokens",
               str(TOKENS // ranks), "--ranks", str(ranks), "--threads", str(threads), "-T", "0",
               "-w", "1", "-n", str(args.calls), "-o", "jsonl"]
    command += ["--pin"] if ranks * threads <= lines.CORES else []
    rows = lines.run(command, lines.clean_environment())
    return rows[0]["step_us"] / 1e3 if rows else None


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--moe", required=True, help="the program `moe`")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--calls", type=int, default=3)
    args = parser.parse_args()
    print(f"{lines.machine()}; {TOKENS} tokens in all.\n")
    lines.head(["layer", "way", "ms", "times as fast as 1 rank x 1 thread",
                "time / that of 2 ranks x 1 thread"])
    for name, shape in SHAPES:
        rounds = [[step_ms(args, shape, ranks, threads) for _, ranks, threads in WAYS]
                  for _ in range(args.rounds)]
        rounds = [times for times in rounds if None not in times]
        for i, (way, _, _) in enumerate(WAYS):
            lines.row([name, way, lines.spread([times[i] for times in rounds], ".0f"),
                       lines.spread([times[0] / times[i] for times in rounds], ".2f"),
                       lines.spread([times[i] / times[2] for times in rounds], ".2f")])


if __name__ == "__main__":
    main()
