#!/usr/bin/env python3
"""The table that gpu_check.sh ends with, from the JSON and steps.tsv in its output folder.

Usage: gpu_table.py DIR. Exit code 1 if a step failed. A ratio is our speed over that of what it is
compared with: 85 % of a copy is a kernel that takes 1 / 0.85 of the copy's time for the same bytes.
"""

import json
import pathlib
import sys


def kernels(document):
    """Medians of kernel_bench, each with the shape that all kernels of the document have."""
    return [document["context"] | row | {"kernel": row["run_name"].split("/")[1]}
            for row in document["benchmarks"] if row.get("aggregate_name") == "median"]


def read(folder):
    """Rows of `moe bench layer`, kernels, lines of peers, and steps as (name, exit code, seconds, SM
    clock in MHz after it, last line)."""
    layers, ours, peers, steps = [], [], [], []
    for path in sorted(folder.glob("*.json")):
        try:
            document = json.loads(path.read_text())
        except ValueError:
            continue  # its step has failed
        if isinstance(document, list):
            layers += document
        else:
            ours += kernels(document)
    for path in sorted(folder.glob("*.jsonl")):
        for line in path.read_text().splitlines():
            try:
                peers.append(json.loads(line))
            except ValueError:
                pass  # truncated by the time-out
    for line in (folder / "steps.tsv").read_text().splitlines():
        name, code, seconds, clock, last = line.split("\t", 4)
        steps.append((name, int(code), int(seconds), clock, last))
    return layers, ours, peers, steps


class Goal:
    """What a row must reach: a limit on a time in us, or a least ratio."""

    def __init__(self, at_most_us=None, at_least=None):
        self._us, self._ratio = at_most_us, at_least

    def cells(self, us, ratio):
        if self._us is not None:
            return f"<= {self._us} us", "yes" if us <= self._us else "NO"
        return f">= {self._ratio:.0%}", "yes" if (ratio or 0) >= self._ratio else "NO"


def size(value, unit):
    """Three digits; microseconds from 1000 on as milliseconds."""
    if unit == "us" and value >= 1000:
        value, unit = value / 1000, "ms"
    return f"{value:.3g} {unit}" if value < 1000 else f"{value:.0f} {unit}"


class Table:
    """Rows of text; counts goals."""

    HEAD = ("what", "ours", "against", "reaches", "ratio", "goal", "met")

    def __init__(self):
        self._rows, self.goals, self.met = [self.HEAD], 0, 0

    def add(self, what, ours, unit, against="", reaches=None, us=None, goal=None):
        """`ours` and `reaches` in `unit`, of which less is better if it is us."""
        ratio = None
        if reaches:
            ratio = reaches / ours if unit == "us" else ours / reaches
        goal_cells = goal.cells(us, ratio) if goal else ("", "")
        self.goals += goal is not None
        self.met += goal_cells[1] == "yes"
        compared = (against, size(reaches, unit), f"{ratio:.0%}") if reaches else ("", "", "")
        self._rows.append((what, size(ours, unit), *compared, *goal_cells))

    def missing(self, what, goal):
        self.goals += 1
        self._rows.append((what, "-", "", "", "", goal.cells(0, 0)[0], "NO"))

    def alone(self, what, against, reaches, unit):
        """What the others reach where we have nothing."""
        self._rows.append((what, "-", against, size(reaches, unit), "", "", ""))

    def print(self):
        widths = [max(len(row[i]) for row in self._rows) for i in range(len(self.HEAD))]
        for row in self._rows:
            print("  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip())


def pick(rows, **keys):
    """The first row with these values."""
    for row in rows:
        if all(row.get(k) == v for k, v in keys.items()):
            return row
    return None


def shape_of(row, names):
    return " ".join(f"{letter} {row[key]}" for letter, key in names if row.get(key) is not None)


def gate_rows(table, ours, peers):
    """The selection and the plan, which have goals, and the gate that training has instead."""
    rows = [row for row in ours if row["op"] == "gate"]
    for kernel, op, at_most_us in (("select", "gate", 20), ("plan", "plan", 15)):
        row, goal = pick(rows, kernel=kernel), Goal(at_most_us=at_most_us)
        if row is None:
            table.missing(op, goal)
            continue
        what = shape_of(row, (("T", "tokens"), ("E", "experts"), ("k", "topk")))
        what += f" {row['dtype']}" if op == "gate" else ""
        us = row["real_time"]
        table.add(f"{op} {what}", us, "us", "copy of its bytes", floor_us(row), us, goal)
        for peer in peers:
            if peer["op"] == op and peer["status"] == "ok":
                table.add("", us, "us", peer["peer"], peer["time_us"])
    for row in rows:
        if row["kernel"] in ("forward", "backward"):
            table.add(f"gate with scores, {row['kernel']}, {row['dtype']}", row["real_time"], "us",
                      "copy of its bytes", floor_us(row))


def floor_us(row):
    """How long a copy takes that reads and writes as many bytes in all, measured with the row."""
    copy = row.get("copy_gbytes_per_s")
    return row["work"] / copy / 1e3 if copy else None


def copy_rows(table, ours, peers):
    """Kernels that move rows, each against the copy measured with it."""
    copy = pick(peers, op="copy", status="ok")
    for op in ("permute", "combine"):
        rows = [row for row in ours if row["op"] == op]
        if not rows:
            table.missing(op, Goal(at_least=0.85))
        for row in rows:
            forward = row["kernel"] in ("gather", "combine")
            what = f"{op} {row['kernel']}" if row["kernel"] != op else op
            if forward:
                what += " " + shape_of(row, (("T", "tokens"), ("H", "hidden"), ("k", "topk")))
            limit = row.get("copy_gbytes_per_s") or (copy or {}).get("gbytes_per_s")
            table.add(what, row["gbytes_per_s"], "GB/s", "device copy", limit,
                      goal=Goal(at_least=0.85) if forward else None)
    if copy:
        table.add("device copy by torch", copy["gbytes_per_s"], "GB/s")


def gemm_rows(table, ours, peers):
    """Grouped products, against one by cuBLAS timed before their calls, or else by torch."""
    goal = Goal(at_least=0.45)
    right = [p for p in peers if p["op"] == "gemm" and p["status"] == "ok"]
    dense = next((p for p in right if p["peer"].startswith("cuBLAS")), {})
    if pick(ours, op="gemm", kernel="forward") is None:
        table.missing("grouped GEMM", goal)
    for row in ours:
        if row["op"] != "gemm":
            continue
        speed, forward = row["gflops_per_s"] / 1e3, row["kernel"] == "forward"
        what = f"grouped GEMM {row['kernel']}"
        if forward:
            what += " " + shape_of(row, (("E", "experts"), ("H", "hidden"), ("F", "ffn"),
                                         ("T", "tokens"), ("k", "topk")))
        limit = (row.get("peak_gflops_per_s") or 0) / 1e3 or dense.get("tflops_per_s")
        table.add(what, speed, "TFLOP/s", "cuBLAS, one product", limit,
                  goal=goal if forward else None)
        for peer in right if forward else ():
            table.add("", speed, "TFLOP/s", peer["peer"], peer["tflops_per_s"])


def layer_rows(table, layers, peers):
    """Layers, by how gradients are summed."""
    names = (("T", "tokens"), ("E", "experts"), ("H", "hidden"), ("F", "ffn"), ("k", "topk"))
    timed = [row for row in layers
             if (row["phase"], row["status"], row["pass"]) == ("all", "ok", "forward")]
    for suffix, key in ((" forward", "time_us"), (" forward + backward", "step_us")):
        others = [p for p in peers if p["op"] == "layer" and p["status"] == "ok"
                  and p["peer"].endswith(suffix)]
        for peer in others if not timed else ():
            table.alone("layer" + suffix, peer["peer"][:-len(suffix)], peer["time_us"], "us")
        for row in timed:
            table.add(f"layer{suffix} {shape_of(row, names)}, {row['numerics']}", row[key], "us")
            for peer in others:
                table.add("", row[key], "us", peer["peer"][:-len(suffix)], peer["time_us"])


def main():
    folder = pathlib.Path(sys.argv[1])
    layers, ours, peers, steps = read(folder)
    for name, code, _, _, last in steps:
        if name == "device" and code == 0:
            print(last)
    table = Table()
    gate_rows(table, ours, peers)
    copy_rows(table, ours, peers)
    gemm_rows(table, ours, peers)
    layer_rows(table, layers, peers)
    table.print()
    failed = [step for step in steps if step[1] != 0]
    clocks = [int(step[3]) for step in steps if step[3].isdigit()]
    if clocks:
        print(f"SM clock just after the steps: {min(clocks)} to {max(clocks)} MHz")
    for name, code, seconds, _, last in failed:
        print(f"FAILED  {name}: exit code {code} after {seconds} s: {last}")
    print(f"{len(steps) - len(failed)} of {len(steps)} steps ran, {table.met} of {table.goals} "
          f"goals met, {sum(step[2] for step in steps)} s; JSON and logs: {folder}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
