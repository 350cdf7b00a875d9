"""PyTorch's gate and plan, for benchmarks/gate_table.py: softmax over the experts, top-k,
renormalised weights and rows per expert; slots sorted by expert and the place of each.

A request has tokens, experts, topk and calls.
"""
import torch

import worker


def gate(logits, topk):
    """logits [T, E] to weights [T, K], experts [T, K] and counts [E]."""
    weights, ids = torch.softmax(logits, dim=-1).topk(topk, dim=-1)
    weights = weights / weights.sum(dim=-1, keepdim=True)
    return weights, ids, torch.bincount(ids.view(-1), minlength=logits.shape[1])


def plan(ids):
    """Slots [S] in the order of their experts, stable, and the inverse: the row of each slot."""
    order = ids.view(-1).argsort(stable=True)
    rows = torch.empty_like(order)
    rows[order] = torch.arange(order.numel())
    return order, rows


def check(logits, topk):
    """Against a sort in float64; experts with equal logits may change places."""
    weights, ids, counts = gate(logits, topk)
    largest = logits.double().sort(dim=-1, descending=True).values[:, :topk]
    if not torch.equal(logits.double().gather(1, ids), largest) or counts.sum() != ids.numel():
        raise ValueError("not the largest logits")
    error = worker.relative_error(weights, torch.softmax(largest, dim=-1))
    if not error <= 1e-5:
        raise ValueError(f"weights are wrong by {error}")
    order, rows = plan(ids)
    slots = torch.arange(ids.numel())
    keys = ids.view(-1) * ids.numel() + slots
    if not bool((keys[order].diff() > 0).all()) or not torch.equal(order[rows], slots):
        raise ValueError("slots are not sorted")


def prepare(shape):
    torch.manual_seed(0)
    logits = torch.randn(shape["tokens"], shape["experts"])
    check(logits, shape["topk"])
    ids = gate(logits, shape["topk"])[1]
    return {"gate": lambda: gate(logits, shape["topk"]), "plan": lambda: plan(ids)}


if __name__ == "__main__":
    worker.serve(prepare)
