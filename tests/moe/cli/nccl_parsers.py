"""Reads what `moe bench --format nccl` printed as four programs read nccl-tests' output, each by its
own rules, written here from what they are: python3 nccl_parsers.py FILE ROWS. Exits 1 unless each
finds ROWS rows with numbers in both halves, and all find the same numbers.

superbench (microsoft/superbenchmark)   rows stand between the lines with 'out-of-place' and 'Out of
    bounds values'; columns are counted from the end, as the line of names has them; every figure
    goes through float()
cloudai (NVIDIA/cloudai)                a row starts with a digit and has 13 words; one whose size,
    times or bandwidths are no numbers is dropped
ramble (GoogleCloudPlatform/ramble)     one expression: a blank before every field, and figures of
    at least two digits
a log grader of a benchmark group       one expression over the whole line: figures are digits and
    points, counts of wrong elements are any word
"""
import re
import sys

FIGURES = ("time", "algbw", "busbw")


def superbench(lines):
    begin = max(i for i, line in enumerate(lines) if "out-of-place" in line)
    end = max(i for i, line in enumerate(lines) if "Out of bounds values" in line)
    names, rows = None, []
    for line in lines[begin + 1:end]:
        words = line.lstrip("#").split()
        if names is None and "time" in words and "busbw" in words:
            names = words
        elif words and words[0].isdigit():
            out = [float(words[names.index(name) - len(names)]) for name in FIGURES]
            names.reverse()
            into = [float(words[-1 - names.index(name)]) for name in FIGURES]
            names.reverse()
            rows.append([int(words[names.index("size")]), *out, *into])
    return rows


def cloudai(lines):
    rows = []
    for line in lines:
        words = line.split()
        if len(words) != 13 or not words[0][0].isdigit():
            continue
        try:
            rows.append([int(words[0])] + [float(words[i]) for i in (5, 6, 7, 9, 10, 11)])
        except ValueError:
            pass
    return rows


def by_expression(figure, start):
    half = rf"\s+({figure})\s+({figure})\s+({figure})\s+\S+"
    row = re.compile(rf"{start}(\d+)\s+\d+\s+\S+\s+\S+\s+-?\d+{half}{half}\s*$")

    def read(lines):
        found = [match.groups() for match in map(row.match, lines) if match]
        return [[int(groups[0])] + [float(text) for text in groups[1:]] for groups in found]

    return read


def main():
    lines = open(sys.argv[1]).read().splitlines()
    readers = {"superbench": superbench, "cloudai": cloudai,
               "ramble": by_expression(r"[0-9]+\.?[0-9]+", r"\s+"),
               "grader": by_expression(r"[\d.]+", r"\s*")}
    found = {name: read(lines) for name, read in readers.items()}
    for name, rows in found.items():
        assert len(rows) == int(sys.argv[2]), f"{name} finds {len(rows)} rows"
        assert rows == found["cloudai"], f"{name} reads other numbers: {rows}"
        assert all(row[1] > 0 and row[4] > 0 for row in rows), f"{name}: no times: {rows}"
    average = re.search(r"Avg bus bandwidth\s+:\s+([0-9]+\.?[0-9]+)", "\n".join(lines))
    halves = [row[i] for row in found["cloudai"] for i in (3, 6)]
    assert abs(float(average[1]) - sum(halves) / len(halves)) < 0.01, "another average"
    assert re.search(r"Out of bounds values\s*:\s*0 OK", "\n".join(lines)), "wrong values"


main()
