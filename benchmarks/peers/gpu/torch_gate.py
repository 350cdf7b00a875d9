#!/usr/bin/env python3
"""PyTorch's gate (softmax over the experts, top-k, renormalised weights, rows per expert) and plan
(slots sorted by expert)."""

import sys

import torch

import peer

SETS = 4  # sets of logits, used in turn: a single one would stay in the L2 cache


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


def plan(ids, experts):
    """Slots [S] in the order of their experts, stable, and where each expert's begin [E]."""
    slots = ids.view(-1)
    counts = peer.count(slots, experts)
    return slots.argsort(stable=True), counts.cumsum(0) - counts


def plan_error(result, ids):
    """Infinite unless every slot stands once, by expert and then by number."""
    order, begins = result
    keys = ids.view(-1) * ids.numel() + torch.arange(ids.numel(), device=ids.device)
    experts = torch.arange(begins.numel(), device=ids.device)
    in_order = bool((keys[order].diff() > 0).all())
    first = torch.searchsorted(ids.view(-1)[order].contiguous(), experts)
    return 0.0 if in_order and torch.equal(first, begins) else float("inf")


def main():
    args = peer.arguments(__doc__, {"tokens": 65536, "experts": 256, "topk": 8},
                          {"tokens": 64, "experts": 16, "topk": 4})
    logits = [peer.random(args, args.tokens, args.experts) for _ in range(SETS)]
    ids = [gate(one, args.topk)[1] for one in logits]
    times = peer.time_ways(args, {
        "gate": lambda call: gate(logits[call % SETS], args.topk),
        "plan": lambda call: plan(ids[call % SETS], args.experts),
    })
    gates, plans = peer.Report("gate", args), peer.Report("plan", args)
    gates.add("torch softmax, topk", times["gate"],
              error=error_of(gate(logits[0], args.topk), logits[0], args.topk), bound=1e-5)
    plans.add("torch argsort", times["plan"], error=plan_error(plan(ids[0], args.experts), ids[0]),
              bound=0)
    return gates.close() or plans.close()


if __name__ == "__main__":
    sys.exit(main())
