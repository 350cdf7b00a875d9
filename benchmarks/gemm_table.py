#!/usr/bin/env python3
"""Grouped products beside oneDNN, OpenBLAS and the core's peak, as a Markdown table.

Product (kernel_bench) and peers (benchmarks/peers/cpu/gemm_*.cc) take turns on one core, round by
round, a median of some calls each, all by the CPU clock. Ratios are taken inside a round, against
the fastest peer of that round; oneDNN finds weights packed, so it stands against packed weights of
ours too. The share is of multiply-adds, in bf16 of dot products where the CPU has them; that of
reading, the limit of few rows, of a loop that reads as many bytes as the weights (or their
gradient) have. bf16 is a peer's only where it has it.
"""
import table_lines
from table_lines import spread

# Names of our products in the peers' input.
PRODUCTS = {"forward": "forward", "packed_forward": "forward", "input_grad": "input_gradient",
            "weight_grad": "weight_gradient"}


def ask(peers, args, dtype, rows):
    """Microseconds of each product that a peer has, by (product, peer)."""
    times = {}
    for product in dict.fromkeys(PRODUCTS.values()):
        for name, peer in peers.items():
            answer = peer.ask(f"{product} {dtype} {rows} {args.hidden} {args.ffn} {args.experts} "
                              f"{args.calls}")
            if answer["time_us"] is not None:
                times[product, name] = answer["time_us"]
    return times


def one_round(args, peers, core, dtype, rows):
    """(medians of kernel_bench by product, times of peers)"""
    ours = table_lines.kernels(
        [args.kernel_bench, "gemm", "--cpu-clock", "--tokens", str(rows * args.experts), "--topk",
         "1", "--dtype", dtype, "--hidden-size", str(args.hidden), "--moe-ffn-hidden-size",
         str(args.ffn), "--num-experts", str(args.experts)], args.calls, table_lines.one_thread())
    core.check()
    times = ask(peers, args, dtype, rows)
    core.check()
    return ours, times


def cells(ours, theirs, product, kept):
    """Times, ratios to each peer and to the best, and the shares of both limits."""
    ratios = {name: [times[PRODUCTS[product], name] / line[product]["real_time"]
                     for line, times in kept if (PRODUCTS[product], name) in times]
              for name in theirs}
    best = [min(at_once) for at_once in zip(*(values for values in ratios.values() if values))]
    return ([spread([1e-3 * line[product]["real_time"] for line in ours], ".2f")] +
            [spread(values, ".2f") if values else "" for values in ratios.values()] +
            [spread(best, ".2f") if best else "",
             spread([line[product]["peak_pct"] for line in ours], ".0f"),
             spread([line[product]["read_pct"] for line in ours], ".0f")])


def main():
    parser = table_lines.core_arguments(__doc__.splitlines()[0])
    table_lines.add_kernels(parser)
    parser.add_argument("--peer", action="append", default=[], metavar="NAME=PROGRAM")
    parser.add_argument("--types", default="f32,bf16")
    parser.add_argument("--rows", default="1,8,32,64,128,512", help="of each expert")
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--ffn", type=int, default=2816)
    parser.add_argument("--experts", type=int, default=4)
    parser.add_argument("--calls", type=int, default=3, help="timed calls in a round")
    args = parser.parse_args()
    core = table_lines.Core(args, cpu_clock=True)
    peers = {}
    for text in args.peer:
        name, program = text.split("=", 1)
        peers[name] = table_lines.Worker([program])

    print(f"{table_lines.machine()}; one core; {args.experts} experts, K {args.hidden}, "
          f"O {args.ffn}; {args.rounds} rounds of {args.calls} calls\n")
    table_lines.head(["rows", "type", "product", "ms"] + [f"times {name}" for name in peers] +
                     ["times best", "share of peak, %", "share of reading, %", "rounds"])
    for dtype in args.types.split(","):
        for rows in map(int, args.rows.split(",")):
            kept, mark = core.rounds(args, lambda: one_round(args, peers, core, dtype, rows))
            for product in PRODUCTS:
                table_lines.row([rows, dtype, product] +
                                cells([line for line, _ in kept], peers, product, kept) +
                                [f"{len(kept)}{mark}"])


if __name__ == "__main__":
    main()
