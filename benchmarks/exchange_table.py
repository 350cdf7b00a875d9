#!/usr/bin/env python3
"""Exchange between threads beside Open MPI and memcpy, as a Markdown table.

Product (`moe bench`, ranks as threads, pinned), peer (MPI's own MPI_Alltoallv and MPI_Allreduce)
and limit (every core copies as many bytes as a rank of its own, at the same time) take turns, round
by round. Each gives a median over its calls. A ratio is taken inside a round, so that what the
machine does to one it does to all; the table has the median over rounds and, in brackets, the
quartiles. The loop by which rounds are dropped is an empty one.
"""
import argparse
import time

import table_lines
from table_lines import CORES, spread

SIZES = [64 << 10, 256 << 10, 1 << 20, 4 << 20, 16 << 20, 64 << 20]


def environment():
    """Open MPI's copies through the kernel lose to those through memory. Open MPI 4 calls the
    transport vader, 5 sm."""
    return table_lines.clean_environment(
        OMPI_ALLOW_RUN_AS_ROOT="1", OMPI_ALLOW_RUN_AS_ROOT_CONFIRM="1",
        OMPI_MCA_rmaps_base_oversubscribe="1", OMPI_MCA_btl_vader_single_copy_mechanism="none",
        OMPI_MCA_smsc="^cma,knem,xpmem")


def run(command):
    """Seconds that an empty loop takes before the command, and the command's medians, size by size;
    None if it did not end in time."""
    begin = time.perf_counter()
    for _ in range(200_000):
        pass
    calibration = time.perf_counter() - begin
    rows = table_lines.run(command, environment())
    return calibration, None if rows is None else [row["time_us_p50"] for row in rows]


def commands(args, op, ranks, sizes):
    """What a round runs, by column."""
    moe = [args.moe, "bench", op, "--ranks", str(ranks), "-b", str(sizes[0]), "-e", str(sizes[-1]),
           "-f", "4", "-n", str(args.calls), "-T", "0", "-o", "jsonl"]
    product = moe + (["--pin"] if ranks <= CORES else [])
    product += ["--all-reduce", "direct"] if op == "allreduce" else []
    limit = moe[:2] + ["memcpy", "--ranks", str(min(ranks, CORES)), "--pin"] + moe[5:]
    peer = ["mpirun", "-n", str(ranks), args.peer, op, str(args.calls), *map(str, sizes)]
    return {"product": product, "limit": limit, "peer": peer}


def measure(args, op, ranks):
    """Per size, the rounds as (calibration, times by column); rounds that did not end are left out."""
    wanted = [size for size in SIZES if size <= args.largest]
    rounds = {size: [] for size in wanted}
    # Small and large calls are measured apart: a round is short, and its three parts are close in
    # time.
    for sizes in filter(None, (wanted[:3], wanted[3:])):
        for _ in range(args.rounds):
            columns = {}
            slowest = 0.0
            for name, command in commands(args, op, ranks, sizes).items():
                calibration, columns[name] = run(command)
                slowest = max(slowest, calibration)
            if any(rows is None for rows in columns.values()):
                continue
            for i, size in enumerate(sizes):
                rounds[size].append((slowest, {name: rows[i] for name, rows in columns.items()}))
    return rounds


def print_rows(op, ranks, by_size):
    """A row for each size."""
    fastest = min((calibration for rounds in by_size.values() for calibration, _ in rounds), default=0)
    turns = max(1.0, ranks / CORES)  # ranks that share a core copy one after the other
    for size, rounds in by_size.items():
        if not rounds:
            table_lines.row((op, ranks, size >> 10, "did not end", "", "", 0))
            continue
        kept, mark = table_lines.quiet(rounds, fastest)
        product = [times["product"] for times in kept]
        peer = [times["peer"] / times["product"] for times in kept]
        limit = [100 * turns * times["limit"] / times["product"] for times in kept]
        table_lines.row((op, ranks, size >> 10, spread(product, ".1f"), spread(peer, ".2f"),
                         spread(limit, ".0f"), f"{len(kept)}{mark}"))


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--moe", required=True, help="the program `moe`")
    parser.add_argument("--peer", required=True, help="benchmarks/peers/mpi/exchange.cc, compiled")
    parser.add_argument("--operations", default="alltoall,allreduce")
    parser.add_argument("--ranks", default="2,4,8")
    parser.add_argument("--largest", type=int, default=SIZES[-1], help="bytes a rank")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--calls", type=int, default=20, help="timed calls of a size in a round")
    args = parser.parse_args()
    if args.largest < SIZES[0]:
        parser.error(f"--largest is {args.largest}, expected at least {SIZES[0]}")

    print(f"{table_lines.machine()}; {args.rounds} rounds of {args.calls} calls\n")
    table_lines.head(("operation", "ranks", "KiB a rank", "µs", "times Open MPI",
                      "share of memcpy, %", "rounds"))
    for op in args.operations.split(","):
        for ranks in map(int, args.ranks.split(",")):
            print_rows(op, ranks, measure(args, op, ranks))


if __name__ == "__main__":
    main()
