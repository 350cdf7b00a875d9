#!/usr/bin/env python3
"""PyTorch's gate: softmax over the experts, top-k, renormalised weights, rows per expert."""

import sys

import torch

import peer

SETS = 4  # of logits, in turn: one alone would stay in the L2 cache


def gate(logits, topk):
    """logits [T, E] to weights [T, K] in float32, experts [T, K] and counts [E]."""
    weights, ids = torch.softmax(logits, dim=-1, dtype=torch.float32).topk(topk, dim=-1)
    weights = weights / weights.sum(dim=-1, keepdim=True)
    return weights, ids, peer.count(ids, logits.shape[1])


def error_of(result, logits, topk):
    """Against a sort in float64; experts with equal logits may change places."""
    weights, ids, counts = result
    order = logits.double().sort(dim=-1, descending=True).values[:, :topk]
    chosen = logits.double().gather(1, ids)
    if not torch.equal(chosen, order) or int(counts.sum()) != ids.numel():
        return float("inf")
    return peer.relative_error(weights, torch.softmax(order, dim=-1))


def main():
    args = peer.arguments(__doc__, {"tokens": 65536, "experts": 256, "topk": 8},
                          {"tokens": 64, "experts": 16, "topk": 4})
    logits = [peer.random(args, args.tokens, args.experts) for _ in range(SETS)]
    times = peer.time_ways(args, {"torch": lambda call: gate(logits[call % SETS], args.topk)})
    report = peer.Report("gate", args)
    report.add("torch softmax, topk", times["torch"],
               error=error_of(gate(logits[0], args.topk), logits[0], args.topk), bound=1e-5)
    return report.close()


if __name__ == "__main__":
    sys.exit(main())
