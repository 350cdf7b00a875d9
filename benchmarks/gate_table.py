#!/usr/bin/env python3
"""The gate and the plan beside PyTorch, as a Markdown table.

Gate: `kernel_bench gate`, logits to scores, slots, weights and counts; the peer's softmax, top-k,
renormalised weights and bincount. Plan: the phase of that name in `moe bench layer`, with experts
so narrow that nothing else takes memory; the peer's stable argsort and inverse. They take turns on
one core, round by round, each gives a median of some calls; ratios are taken inside a round.
"""
import table_lines
from table_lines import spread

PARTS = ("gate", "plan", "gate + plan")
NARROW = 8  # H and F


def product(args, tokens, experts, topk):
    """Milliseconds of the parts, and the gate's share of memcpy in percent."""
    shape = ["--tokens", str(tokens), "--num-experts", str(experts), "--topk", str(topk),
             "--threads", "1"]
    env = table_lines.one_thread()
    gate = table_lines.kernels([args.kernel_bench, "gate", "--benchmark_filter=forward"] + shape,
                               args.calls, env)["forward"]
    layer = table_lines.run(
        [args.moe, "bench", "layer", "--ranks", "1", "--hidden-size", str(NARROW),
         "--moe-ffn-hidden-size", str(NARROW), "-n", str(args.calls), "-T", "0", "-o", "jsonl"] +
        shape, env)
    plan, = (line["time_us"] for line in layer
             if (line["pass"], line["phase"]) == ("forward", "plan"))
    times = {"gate": 1e-3 * gate["real_time"], "plan": 1e-3 * plan}
    return times | {"gate + plan": sum(times.values())}, gate["copy_pct"]


def one_round(args, peers, core, tokens, experts, topk):
    """(times of ours, share of memcpy, {peer: times})"""
    ours, share = product(args, tokens, experts, topk)
    core.check()
    theirs = {}
    for name, peer in peers.items():
        times = peer.ask({"tokens": tokens, "experts": experts, "topk": topk,
                          "calls": args.calls})["ms"]
        theirs[name] = times | {"gate + plan": sum(times.values())}
        core.check()
    return ours, share, theirs


def main():
    parser = table_lines.core_arguments(__doc__.splitlines()[0])
    table_lines.add_kernels(parser)
    table_lines.add_torch(parser)
    parser.add_argument("--experts", default="64,256")
    parser.add_argument("--tokens", type=int, default=65536)
    parser.add_argument("--topk", type=int, default=8)
    parser.add_argument("--calls", type=int, default=5, help="timed calls in a round")
    args = parser.parse_args()
    core = table_lines.Core(args)
    peers = table_lines.torch_workers(args, "torch_gate.py")

    print(f"{table_lines.machine()}; one core; {args.tokens} tokens, top-{args.topk}; "
          f"{args.rounds} rounds of {args.calls} calls\n")
    table_lines.head(["experts", "part", "ms"] + [f"times {name}" for name in peers] +
                     ["share of memcpy, %", "rounds"])
    for experts in map(int, args.experts.split(",")):
        kept, mark = core.rounds(
            args, lambda: one_round(args, peers, core, args.tokens, experts, args.topk))
        for part in PARTS:
            table_lines.row(
                [experts, part, spread([ours[part] for ours, _, _ in kept], ".2f")] +
                [spread([theirs[name][part] / ours[part] for ours, _, theirs in kept], ".2f")
                 for name in peers] +
                [spread([share for _, share, _ in kept], ".0f") if part == "gate" else "",
                 f"{len(kept)}{mark}"])


if __name__ == "__main__":
    main()
