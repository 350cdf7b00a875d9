#!/usr/bin/env python3
"""Whether kernels have the instructions that they are written for.

  ptx_check.py RULES PTX...

PTX are files that `nvcc -ptx` wrote. A row of RULES names a kernel, without template arguments or with the
beginning of them, and a regular expression that lines of every one of its instances must match: how often at
least, and why. Exit code 1 if an instance has fewer, or if a rule's kernel is in no file. Tests on the simulator cannot see this: a kernel
that copies element by element gives the same results.
"""

import pathlib
import re
import sys

sys.dont_write_bytecode = True
from ptxas_table import readable  # noqa: E402: after the line that keeps the source folder clean

FIELDS = ("kernel", "instruction", "at_least", "why")
PREDICATE = re.compile(r"@!?%p\d+\s+")
ENTRY = re.compile(r"\.entry (\w+)\(")


def kernels(files):
    """{kernel: its lines} of all files."""
    found = {}
    for file in files:
        lines = None
        for line in pathlib.Path(file).read_text().splitlines():
            if match := ENTRY.search(line):
                lines = found.setdefault(match[1], [])
            elif line == "}":
                lines = None
            elif lines is not None:
                lines.append(PREDICATE.sub("", line.strip()))
    names = readable(found)
    return {names[name]: lines for name, lines in found.items()}


def rules(file):
    header, *rows = pathlib.Path(file).read_text().splitlines()
    if tuple(header.split("\t")) != FIELDS:
        sys.exit(f"ptx_check: {file} must begin with a row of {', '.join(FIELDS)}, separated by tabs")
    return [dict(zip(FIELDS, row.split("\t"), strict=True)) for row in rows]


def failures(rule, found):
    kernel = re.compile(re.escape(rule["kernel"]) + r"(?!\w)")
    instances = {name: lines for name, lines in found.items() if kernel.match(name)}
    if not instances:
        return [f"{rule['kernel']}: in none of the files"]
    bad = []
    for name, lines in sorted(instances.items()):
        count = sum(bool(re.match(rule["instruction"], line)) for line in lines)
        if count < int(rule["at_least"]):
            bad.append(f"{name}: {count} of {rule['instruction']}, expected {rule['at_least']} or more: {rule['why']}")
    return bad


def main():
    if len(sys.argv) < 3:
        sys.exit(__doc__)
    found = kernels(sys.argv[2:])
    wanted = rules(sys.argv[1])
    bad = [line for rule in wanted for line in failures(rule, found)]
    print("\n".join(bad + [f"ptx_check: {len(found)} kernels, {len(wanted)} rules, {len(bad)} failures"]))
    if bad:
        sys.exit(1)


if __name__ == "__main__":
    main()
