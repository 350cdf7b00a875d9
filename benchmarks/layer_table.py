#!/usr/bin/env python3
"""A mixture-of-experts layer beside PyTorch and the core's peak, as a Markdown table.

Product (`moe bench layer`, one rank, one thread) and PyTorch in its two usual ways
(benchmarks/peers/cpu/torch_layer.py) take turns on one core, round by round, each gives a median of
some calls; ratios are taken inside a round, against the faster way. Forward reads packed weights
(--pack-weights), as a program that does not train does; forward + backward the weights themselves.
The share is of the time that the experts' products take at the peak measured in the round: of
multiply-adds, in bf16 of dot products where the CPU has them.
"""
import table_lines
from table_lines import spread

EXPERTS = {"E8": {"experts": 8, "topk": 2, "ffn": 2816},
           "E64": {"experts": 64, "topk": 6, "ffn": 512}}
PASSES = ("forward", "forward + backward")


def product(args, shape, backward):
    """Milliseconds of the pass."""
    command = [args.moe, "bench", "layer", "--ranks", "1", "--threads", "1",
               "--tokens", str(shape["tokens"]), "--num-experts", str(shape["experts"]),
               "--moe-router-topk", str(shape["topk"]), "--hidden-size", str(shape["hidden"]),
               "--moe-ffn-hidden-size", str(shape["ffn"]), "-d", shape["dtype"],
               "-n", str(args.calls), "-w", "1", "-T", "0", "-o", "jsonl"]
    lines = table_lines.run(command + ([] if backward else ["--pack-weights"]),
                            table_lines.one_thread())
    whole = {line["pass"]: line for line in lines if line["phase"] == "all"}
    return 1e-3 * (whole["forward"]["step_us"] if backward else whole["forward"]["time_us"])


def one_round(args, peers, core, shape, backward):
    """(ms of ours, ms at the peak, {peer: ms of the faster way})"""
    before = core.peak(shape["dtype"])
    ours = product(args, shape, backward)
    peak = max(before, core.peak(shape["dtype"]))
    core.check()
    theirs = {}
    for name, peer in peers.items():
        answer = peer.ask(shape | {"backward": backward, "calls": args.calls})
        theirs[name] = min(answer["ms"].values())
        core.check()
    operations = (6 * shape["tokens"] * shape["topk"] * shape["hidden"] * shape["ffn"] *
                  (3 if backward else 1))
    return ours, operations / peak * 1e-6, theirs


def print_row(args, peers, core, shape, of_pass):
    backward = of_pass == PASSES[1]
    kept, mark = core.rounds(args, lambda: one_round(args, peers, core, shape, backward))
    table_lines.row(
        [shape["tokens"], f"E {shape['experts']} k {shape['topk']} F {shape['ffn']}",
         shape["dtype"], of_pass, spread([ours for ours, _, _ in kept], ".1f")] +
        [spread([theirs[name] / ours for ours, _, theirs in kept], ".2f") for name in peers] +
        [spread([100 * limit / ours for ours, limit, _ in kept], ".0f"), f"{len(kept)}{mark}"])


def main():
    parser = table_lines.core_arguments(__doc__.splitlines()[0])
    table_lines.add_torch(parser)
    parser.add_argument("--types", default="f32,bf16")
    parser.add_argument("--experts", default=",".join(EXPERTS), help="of E8, E64")
    parser.add_argument("--tokens", default="64,1024,4096")
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--passes", default=",".join(PASSES))
    parser.add_argument("--calls", type=int, default=3, help="timed calls in a round")
    args = parser.parse_args()
    core = table_lines.Core(args)
    peers = table_lines.torch_workers(args, "torch_layer.py")

    print(f"{table_lines.machine()}; one core; H {args.hidden}; {args.rounds} rounds of "
          f"{args.calls} calls\n")
    table_lines.head(["tokens", "experts", "type", "pass", "ms"] +
                     [f"times {name}" for name in peers] + ["share of peak, %", "rounds"])
    for dtype in args.types.split(","):
        for of_pass in args.passes.split(","):
            for experts in args.experts.split(","):
                for tokens in map(int, args.tokens.split(",")):
                    shape = EXPERTS[experts] | {"tokens": tokens, "hidden": args.hidden,
                                                "dtype": dtype}
                    print_row(args, peers, core, shape, of_pass)


if __name__ == "__main__":
    main()
