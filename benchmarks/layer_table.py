#!/usr/bin/env python3
"""A mixture-of-experts layer beside PyTorch, kt-kernel and the core's peak, as a Markdown table.

Product (`moe bench layer`, one rank, one thread), PyTorch in its two usual ways
(benchmarks/peers/cpu/torch_layer.py) and kt-kernel (kt_layer.py; forward in bf16) take turns on one
core, round by round, each gives a median of some calls; ratios are taken inside a round, against
the faster way. Forward reads packed weights (--pack-weights), as a program that does not train
does, and as kt-kernel does; forward + backward the weights themselves.
The shares are of two limits, measured in the round: the time of the experts' products at the peak
of multiply-adds, in bf16 of what its products run on, and, forward, the time in which a loop reads
as many bytes as the weights of the experts that have a token.
"""
import table_lines
from table_lines import spread

EXPERTS = {"E8": {"experts": 8, "topk": 2, "ffn": 2816},
           "E64": {"experts": 64, "topk": 6, "ffn": 512}}
PASSES = ("forward", "forward + backward")
KT = "kt-kernel"


def calls_of(args, shape):
    """Timed calls in a round: of few tokens more, since each is short."""
    return args.calls * max(1, min(16, 256 // shape["tokens"]))


def product(args, shape, backward):
    """Milliseconds of the pass."""
    calls = calls_of(args, shape)
    command = [args.moe, "bench", "layer", "--ranks", "1", "--threads", "1",
               "--tokens", str(shape["tokens"]), "--num-experts", str(shape["experts"]),
               "--moe-router-topk", str(shape["topk"]), "--hidden-size", str(shape["hidden"]),
               "--moe-ffn-hidden-size", str(shape["ffn"]), "-d", shape["dtype"],
               "-n", str(calls), "-w", str(1 + calls // 5), "-T", "0", "-o", "jsonl"]
    lines = table_lines.run(command + ([] if backward else ["--forward-only", "--pack-weights"]),
                            table_lines.one_thread())
    whole = {line["pass"]: line for line in lines if line["phase"] == "all"}
    return 1e-3 * whole["forward"]["step_us"]


def reading(args, shape):
    """Milliseconds in which a loop reads the weights of as many experts as can have a token."""
    active = min(shape["experts"], shape["tokens"] * shape["topk"])
    rows = table_lines.kernels(
        [args.kernel_bench, "gemm", "--threads", "1", "--tokens", "1", "--topk", "1",
         "--num-experts", str(active), "--hidden-size", str(shape["hidden"]),
         "--moe-ffn-hidden-size", str(3 * shape["ffn"]), "-d", shape["dtype"],
         "--benchmark_filter=/packed_forward/"], args.calls, table_lines.one_thread())
    size = active * shape["hidden"] * 3 * shape["ffn"] * {"f32": 4, "bf16": 2}[shape["dtype"]]
    return 1e-6 * size / rows["packed_forward"]["read_gbytes_per_s"]


def one_round(args, peers, core, shape, backward):
    """(ms of ours, ms at the peak, ms of reading or None, {peer: ms of the faster way})"""
    before = core.peak(shape["dtype"])
    ours = product(args, shape, backward)
    peak = max(before, core.peak(shape["dtype"]))
    core.check()
    read = None if backward else reading(args, shape)
    core.check()
    theirs = {}
    for name, peer in peers.items():
        if name.startswith(KT) and (backward or shape["dtype"] != "bf16"):
            continue
        answer = peer.ask(shape | {"backward": backward, "calls": calls_of(args, shape)})
        theirs[name] = min(answer["ms"].values())
        core.check()
    operations = (6 * shape["tokens"] * shape["topk"] * shape["hidden"] * shape["ffn"] *
                  (3 if backward else 1))
    return ours, operations / peak * 1e-6, read, theirs


def print_row(args, peers, core, shape, of_pass):
    backward = of_pass == PASSES[1]
    kept, mark = core.rounds(args, lambda: one_round(args, peers, core, shape, backward))
    table_lines.row(
        [shape["tokens"], f"E {shape['experts']} k {shape['topk']} F {shape['ffn']}",
         shape["dtype"], of_pass, spread([ours for ours, *_ in kept], ".1f")] +
        [spread([theirs[name] / ours for ours, _, _, theirs in kept], ".2f")
         if name in kept[0][3] else "" for name in peers] +
        [spread([100 * peak / ours for ours, peak, *_ in kept], ".0f"),
         "" if backward else spread([100 * read / ours for ours, _, read, _ in kept], ".0f"),
         f"{len(kept)}{mark}"])


def main():
    parser = table_lines.core_arguments(__doc__.splitlines()[0])
    table_lines.add_torch(parser)
    table_lines.add_kernels(parser)
    parser.add_argument("--types", default="f32,bf16")
    parser.add_argument("--experts", default=",".join(EXPERTS), help="of E8, E64")
    parser.add_argument("--tokens", default="64,1024,4096")
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--passes", default=",".join(PASSES))
    parser.add_argument("--calls", type=int, default=3, help="timed calls in a round; below 256 tokens more")
    args = parser.parse_args()
    core = table_lines.Core(args)
    peers = (table_lines.torch_workers(args, "torch_layer.py") |
             table_lines.workers(args, KT, "kt_kernel", "kt_layer.py"))

    print(f"{table_lines.machine()}; one core; H {args.hidden}; {args.rounds} rounds of "
          f"{args.calls} calls\n")
    table_lines.head(["tokens", "experts", "type", "pass", "ms"] +
                     [f"times {name}" for name in peers] + ["share of peak, %", "share of reading, %", "rounds"])
    for dtype in args.types.split(","):
        for of_pass in args.passes.split(","):
            for experts in args.experts.split(","):
                for tokens in map(int, args.tokens.split(",")):
                    shape = EXPERTS[experts] | {"tokens": tokens, "hidden": args.hidden,
                                                "dtype": dtype}
                    print_row(args, peers, core, shape, of_pass)


if __name__ == "__main__":
    main()
