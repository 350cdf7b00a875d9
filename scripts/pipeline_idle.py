#!/usr/bin/env python3
"""What each stage of a pipeline did in a step, from the trace of a run:

    moe train --data FILE --ranks 4 --pp 4 --trace trace.json
    scripts/pipeline_idle.py trace.json [--step N] [--width COLUMNS]

A line a rank: the micro-batches whose forward (0 1 2 ...), backward (a b c ...) or, apart from it,
weight gradients (A B C ...) it ran, dots for waits, and the share of waits in the time from the
first pass of any rank to the last. With --pipeline-schedule 1f1b-overlap backwards have a line of
their own. Without --step: the last step of the trace."""
import argparse
import json
import string
import sys

PASSES = {"forward": string.digits, "backward": string.ascii_lowercase,
          "weight gradients": string.ascii_uppercase}


def passes(trace):
    """(step, lane, name, call, begin, end) of the passes, without the waits for their rows. A lane
    is 100 (rank + 1) and the number of one of the rank's streams."""
    waits, found = {}, []
    for event in trace["traceEvents"]:
        if event["ph"] != "X":
            continue
        begin, lane = event["ts"], event["tid"]
        end = begin + event["dur"]
        if event["name"] == "pipeline receive":
            waits.setdefault(lane, []).append((begin, end))
        elif event["name"] in PASSES:
            args = event["args"]
            found.append([args["step"], lane, event["name"], args["call"], begin, end])
    for one in found:  # a receive is the first event of its pass
        for begin, end in waits.get(one[1], []):
            if one[4] <= begin and end <= one[5]:
                one[4] = end
    return found


def draw(found, width):
    first, last = min(one[4] for one in found), max(one[5] for one in found)
    per_column = max((last - first) / width, 1e-9)
    lines, busy, until = {}, {}, {}  # by lane; by rank
    for _, lane, name, call, begin, end in sorted(found, key=lambda one: one[4]):
        line, rank = lines.setdefault(lane, ["."] * width), lane // 100 - 1
        letters = PASSES[name]
        left = min(int((begin - first) / per_column), width - 1)
        right = max(left + 1, round((end - first) / per_column))
        line[left:right] = [letters[call % len(letters)]] * (min(right, width) - left)
        # Two passes at a time count once.
        begin = max(begin, until.get(rank, begin))
        busy[rank] = busy.get(rank, 0.0) + max(end - begin, 0)
        until[rank] = max(end, until.get(rank, end))
    for lane in sorted(lines):
        rank, text = lane // 100 - 1, "".join(lines[lane])
        if rank in busy:
            idle = 100 * (1 - busy.pop(rank) / (last - first))
            yield f"rank {rank:<3} {text}  idle {idle:5.1f} %"
        else:
            yield " " * 9 + text


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace")
    parser.add_argument("--step", type=int)
    parser.add_argument("--width", type=int, default=80)
    options = parser.parse_args()
    try:
        with open(options.trace) as file:
            found = passes(json.load(file))
    except (OSError, ValueError, KeyError, TypeError) as error:
        sys.exit(f"{options.trace}: no trace of moe train: {error}")
    step = options.step or max((one[0] for one in found), default=0)
    found = [one for one in found if one[0] == step]
    if not found:
        sys.exit(f"{options.trace}: no passes of a pipeline in step {step}")
    print("\n".join(draw(found, max(options.width, 10))))


if __name__ == "__main__":
    main()
