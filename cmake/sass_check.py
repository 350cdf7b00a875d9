#!/usr/bin/env python3
"""What the loops of kernels became, in the GPU's own instructions.

  sass_check.py [--cuobjdump PROGRAM] [--table] RULES BINARY...

BINARY is anything that holds cubins: a program, an object, a *.cubin. Each of its kernels is disassembled and
its loops are found. The exit code is 1
  - if a loop without loops inside reads global memory 16 bytes at a time and writes less at a time, or uses
    local memory (spilled registers, arrays that are indexed), unless a rule of its kernel bounds just that, or
  - if a kernel does not meet one of RULES.
A row of RULES names a kernel, without template arguments or with the beginning of them, and bounds one counter
of one loop in each of its instances, for each GPU: of the loop that has the most of the counter `loop`, without
the loops inside it, or if that is "kernel" of all its code. A rule of a kernel that is not there fails. --table
prints instead the counters of every loop without loops inside or with products.

  slots    instructions                      local  accesses of local memory
  load16   16-byte loads of global memory    async  16-byte copies from global to shared memory
  load     narrower ones                     flight loads under way before one is waited for, at most
  store16  16-byte stores to global memory   mma    matrix products of a tensor core
  store    narrower ones                     call   calls, such as of the slow path of a division
  fma      float32 multiply-adds
"""

import argparse
import collections
import functools
import operator
import pathlib
import re
import subprocess
import sys

sys.dont_write_bytecode = True
from ptxas_table import readable  # noqa: E402: after the line that keeps the source folder clean

COUNTERS = ("slots", "load16", "load", "store16", "store", "local", "async", "flight", "mma", "call", "fma")
FIELDS = ("kernel", "loop", "counter", "at_least", "at_most", "why")
GPU = re.compile(r"\s*code for (\w+)")
FUNCTION = re.compile(r"\s*Function : (\w+)")
LINE = re.compile(r"\s+/\*([0-9a-f]{4,})\*/\s+(@!?U?P\w+ )?\s*([A-Z][\w.]*)(.*?) ;")
REGISTER = re.compile(r"\bR(\d+)")
Instruction = collections.namedtuple("Instruction", "address predicated op parts operands")


def disassembled(cuobjdump, binary):
    """(gpu, mangled kernel, instructions) of each kernel."""
    run = subprocess.run([cuobjdump, "-sass", binary], capture_output=True, text=True)
    if run.returncode:
        sys.exit(f"sass_check: {cuobjdump} -sass {binary}: {run.stderr.strip()}")
    gpu, code = None, None
    for line in run.stdout.splitlines():
        if match := LINE.match(line):
            op, *parts = match[3].split(".")
            code.append(Instruction(int(match[1], 16), bool(match[2]), op, parts, match[4]))
        elif match := GPU.match(line):
            gpu = match[1]
        elif match := FUNCTION.match(line):
            code = []
            yield gpu, match[1], code


def target(instruction):
    return int(instruction.operands.split("0x")[-1].split()[0], 16)


def blocks_of(code):
    """[(instructions, numbers of the blocks that may follow)]: functions that are called are not reached."""
    place = {x.address: i for i, x in enumerate(code)}
    joins = {}  # barrier register -> target of BSYNC, from the last BSSY before
    goes = {}
    for i, x in enumerate(code):
        after = [i + 1] if i + 1 < len(code) else []
        if x.op == "BSSY":
            joins[x.operands.split(",")[0].strip()] = place[target(x)]
        if x.op in ("BRA", "JMP"):
            always = not x.predicated and "P" not in x.operands and "DIV" not in x.parts and "CONV" not in x.parts
            goes[i] = [place[target(x)]] + ([] if always else after)
        elif x.op == "BSYNC":
            goes[i] = [joins.get(x.operands.strip(), i + 1)] + (after if x.predicated else [])
        elif x.op in ("EXIT", "RET", "BRX", "JMX"):
            goes[i] = after if x.predicated else []
    starts = sorted({0} | {i + 1 for i in goes if i + 1 < len(code)} | {t for to in goes.values() for t in to})
    number = {start: n for n, start in enumerate(starts)}
    ends = starts[1:] + [len(code)]
    return [(code[start:end], [number[t] for t in goes.get(end - 1, [end] if end in number else [])])
            for start, end in zip(starts, ends)]


def loops(blocks, nodes):
    """(blocks of the loop, whether it has none inside) of each loop that lies within `nodes`."""
    after = {n: [s for s in blocks[n][1] if s in nodes] for n in nodes}
    reach = {n: sum(1 << s for s in set(after[n])) for n in nodes}  # sets of blocks, as bits
    changed = True
    while changed:
        changed = False
        for n in sorted(nodes, reverse=True):
            more = functools.reduce(operator.or_, (reach[s] for s in after[n]), reach[n])
            changed |= more != reach[n]
            reach[n] = more
    left = {n for n in nodes if reach[n] >> n & 1}
    while left:
        head = min(left)
        body = {n for n in left if reach[head] >> n & 1 and reach[n] >> head & 1}
        left -= body
        inner = list(loops(blocks, body - {head}))
        yield body, not inner
        yield from inner


def size(instruction):
    """Bytes of an access."""
    return next((int(p.lstrip("US")) // 8 for p in instruction.parts if re.fullmatch(r"[US]?(8|16|64|128)", p)), 4)


def flight(code):
    """The most loads issued before an instruction that needs one of them, over two rounds of a loop."""
    most, waiting = 0, []
    for x in code * 2:
        used = set(map(int, REGISTER.findall(x.operands)))
        needed = [i for i, registers in enumerate(waiting) if registers & used]
        if needed:
            waiting = waiting[needed[-1] + 1 :]
        if x.op in ("LDG", "LD"):
            first = int(REGISTER.search(x.operands)[1])
            waiting.append(set(range(first, first + max(1, size(x) // 4))))
        most = max(most, len(waiting))
    return most


def counters(code):
    count = dict.fromkeys(COUNTERS, 0)
    count["slots"] = len(code)
    for x in code:
        if x.op in ("LDG", "LD"):
            count["load16" if size(x) == 16 else "load"] += 1
        elif x.op in ("STG", "ST"):
            count["store16" if size(x) == 16 else "store"] += 1
        elif x.op in ("LDL", "STL"):
            count["local"] += 1
        elif x.op == "LDGSTS":
            count["async"] += size(x) == 16
        elif x.op in ("HMMA", "HGMMA"):
            count["mma"] += 1
        elif x.op == "CALL":
            count["call"] += 1
        elif x.op == "FFMA":
            count["fma"] += 1
    count["flight"] = flight([x for x in code if x.op != "NOP"])
    return count


def measured(cuobjdump, binaries):
    """{(kernel, gpu): ([(innermost, counters) of its loops], counters of all its code)}"""
    found = {}
    for binary in binaries:
        for gpu, name, code in disassembled(cuobjdump, binary):
            found[name, gpu] = code
    names = readable({name for name, _ in found})
    result = {}
    for (name, gpu), code in found.items():
        if names[name].startswith("cub::"):  # the toolkit's
            continue
        blocks = blocks_of(code)
        nested = list(loops(blocks, set(range(len(blocks)))))
        rows = []
        result[names[name], gpu] = rows, counters(code)
        for body, innermost in nested:
            own = body.difference(*(other for other, _ in nested if other < body))
            rows.append((innermost, counters([x for n in sorted(own) for x in blocks[n][0]])))
    return result


def rules(file):
    header, *rows = pathlib.Path(file).read_text().splitlines()
    if tuple(header.split("\t")) != FIELDS:
        sys.exit(f"sass_check: {file} must begin with a row of {', '.join(FIELDS)}, separated by tabs")
    return [dict(zip(FIELDS, row.split("\t"), strict=True)) for row in rows]


def is_of(rule, kernel):
    return re.match(re.escape(rule["kernel"]) + r"(?!\w)", kernel)


def everywhere(found, wanted):
    for (kernel, gpu), (rows, _) in sorted(found.items()):
        bounded = {rule["counter"] for rule in wanted if is_of(rule, kernel)}
        for innermost, count in rows:
            if innermost and count["load16"] and count["store"] and "store" not in bounded:
                yield f"{kernel} on {gpu}: a loop reads 16 bytes at a time and writes less, {count['store']} times"
            if innermost and count["local"] and "local" not in bounded:
                yield f"{kernel} on {gpu}: a loop uses local memory, {count['local']} times"


def failures(rule, found):
    instances = {key: kernel for key, kernel in sorted(found.items()) if is_of(rule, key[0])}
    if not instances:
        yield f"{rule['kernel']}: not there"
    for (name, gpu), (rows, whole) in instances.items():
        if rule["loop"] == "kernel":
            hot, where = whole, "the kernel"
        else:
            hot = max((count for _, count in rows), key=lambda count: count[rule["loop"]], default=None)
            where = f"the loop with the most {rule['loop']}"
        got = hot[rule["counter"]] if hot else 0
        low, high = int(rule["at_least"] or 0), int(rule["at_most"] or sys.maxsize)
        if not low <= got <= high:
            yield (f"{name} on {gpu}: {rule['counter']} {got} in {where}, expected "
                   f"{rule['at_least']}..{rule['at_most']}: {rule['why']}")


def table(found):
    yield "  ".join(f"{name:>7}" for name in COUNTERS) + "  gpu      kernel"
    for (kernel, gpu), (rows, _) in sorted(found.items()):
        for innermost, count in rows:
            if innermost or count["mma"] or count["fma"]:
                yield "  ".join(f"{count[name] or '':>7}" for name in COUNTERS) + f"  {gpu:<7}  {kernel}"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cuobjdump", default="cuobjdump")
    parser.add_argument("--table", action="store_true")
    parser.add_argument("rules")
    parser.add_argument("binary", nargs="+")
    given = parser.parse_args()
    found = measured(given.cuobjdump, given.binary)
    if given.table:
        print("\n".join(table(found)))
        return
    wanted = rules(given.rules)
    bad = list(everywhere(found, wanted)) + [line for rule in wanted for line in failures(rule, found)]
    print("\n".join(bad + [f"sass_check: {len(found)} kernels, {len(wanted)} rules, {len(bad)} failures"]))
    if bad:
        sys.exit(1)


if __name__ == "__main__":
    main()
