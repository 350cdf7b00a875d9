#!/usr/bin/env python3
"""What ptxas made of each CUDA kernel, against the table that is kept.

  ptxas_table.py [--update] LOG_FOLDER TABLE

LOG_FOLDER holds what `nvcc -Xptxas -v` printed, one *.log per object (cmake/ptxas_log.sh). TABLE has one
row per kernel and GPU: registers a thread, bytes of shared memory a block, bytes of stack, of spill stores
and of spill loads a thread. --update writes it. Without, exit code 1 if a kernel spills more than its row
says, or if kernels and rows are not the same; other differences are printed only, since they come
with every version of ptxas. Rows of GPUs that nothing was compiled for are left alone by both.
"""

import pathlib
import re
import subprocess
import sys

FIELDS = ("registers", "shared", "stack", "spill_stores", "spill_loads")
ENTRY = re.compile(r"Compiling entry function '(\w+)' for '(\w+)'")
FRAME = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
USED = re.compile(r"Used (\d+) registers(?:.*?, (\d+) bytes smem)?")


def readable(names):
    """Mangled -> 'moe::permute::GatherKernel<float>': without arguments and unnamed namespaces."""
    names = sorted(names)
    text = subprocess.run(["c++filt"], input="\n".join(names), capture_output=True, text=True, check=True)
    result = {}
    for name, plain in zip(names, text.stdout.splitlines()):
        # nvcc makes the unnamed namespace unique with a hash of the build.
        plain = re.sub(r"(_GLOBAL__N__\w+|\(anonymous namespace\))::", "", plain)
        result[name] = re.sub(r"^void ", "", plain[: plain.rindex("(")])
    return result


def measured(folder):
    """{(kernel, gpu): {field: number}} of all logs."""
    found = {}
    for log in sorted(pathlib.Path(folder).glob("*.log")):
        key, frame = None, (0, 0, 0)
        for line in log.read_text().splitlines():
            if match := ENTRY.search(line):
                key, frame = match.groups(), (0, 0, 0)
            elif match := FRAME.search(line):
                frame = tuple(map(int, match.groups()))
            elif (match := USED.search(line)) and key:
                found[key] = dict(zip(FIELDS, (int(match[1]), int(match[2] or 0)) + frame))
    names = readable({name for name, _ in found})
    # CUB's kernels change with the toolkit.
    return {(names[name], gpu): row for (name, gpu), row in found.items() if not names[name].startswith("cub::")}


def kept(table):
    rows = {}
    for line in pathlib.Path(table).read_text().splitlines()[1:]:
        kernel, gpu, *numbers = line.split("\t")
        rows[kernel, gpu] = dict(zip(FIELDS, map(int, numbers)))
    return rows


def write(table, rows):
    lines = ["\t".join(("kernel", "gpu") + FIELDS)]
    lines += ["\t".join(key + tuple(str(row[f]) for f in FIELDS)) for key, row in sorted(rows.items())]
    pathlib.Path(table).write_text("\n".join(lines) + "\n")


def differences(now, before):
    """(what fails, what is only said)"""
    bad, said = [], []
    for key in sorted(now.keys() - before.keys()):
        bad.append(f"{key[0]} on {key[1]}: not in the table")
    for key in sorted(before.keys() - now.keys()):
        bad.append(f"{key[0]} on {key[1]}: in the table, but not compiled")
    for key in sorted(now.keys() & before.keys()):
        for field in FIELDS:
            old, new = before[key][field], now[key][field]
            if old != new:
                worse = field.startswith("spill") and new > old
                (bad if worse else said).append(f"{key[0]} on {key[1]}: {field} {old} -> {new}")
    return bad, said


def main():
    arguments = sys.argv[1:]
    update = "--update" in arguments
    paths = [a for a in arguments if not a.startswith("--")]
    if len(paths) != 2 or len(arguments) - update != 2:
        sys.exit(__doc__)
    now = measured(paths[0])
    if not now:
        sys.exit(f"ptxas_table: no kernels in {paths[0]}: build the target moe_kernels first")
    before = {} if update and not pathlib.Path(paths[1]).exists() else kept(paths[1])
    gpus = {gpu for _, gpu in now}
    others = {key: row for key, row in before.items() if key[1] not in gpus}
    if update:
        write(paths[1], now | others)
        print(f"ptxas_table: {len(now)} rows written to {paths[1]}")
        return
    bad, said = differences(now, {key: before[key] for key in before.keys() - others.keys()})
    print("\n".join(said + bad + [f"ptxas_table: {len(now)} rows, {len(bad)} failures"]))
    if bad:
        sys.exit(f"ptxas_table: after a look at each, run: {sys.argv[0]} --update {' '.join(paths)}")


if __name__ == "__main__":
    main()
