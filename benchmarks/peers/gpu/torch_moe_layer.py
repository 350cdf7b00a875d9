#!/usr/bin/env python3
"""A mixture-of-experts layer of PyTorch's own operations, forward and forward + backward: tokens
gathered by expert, products by torch._grouped_mm or a torch.matmul per expert, index_add home."""

import sys

import torch
import torch.nn.functional as F

import peer
import plain_moe


def grouped_products(rows, weights, counts):
    """The experts on rows [N, H] grouped by expert; the counts stay on the device."""
    ends = counts.cumsum(0).to(torch.int32)
    hidden = torch._grouped_mm(rows, weights.gate_up.transpose(1, 2), offs=ends)
    gate, up = hidden.chunk(2, dim=-1)
    return torch._grouped_mm(F.silu(gate) * up, weights.down.transpose(1, 2), offs=ends)


def loop_products(rows, weights, counts):
    """The same, one expert after the other; the host waits for the counts."""
    results = []
    # unbind, because the gradient of an index would be as large as the weights, for each expert
    for part, gate_up, down in zip(rows.split(counts.tolist()), weights.gate_up.unbind(),
                                   weights.down.unbind()):
        gate, up = (part @ gate_up.t()).chunk(2, dim=-1)
        results.append((F.silu(gate) * up) @ down.t())
    return torch.cat(results)


def layer(x, weights, topk, products):
    """y [T, H] and the experts [T, K] of every token."""
    w, ids = plain_moe.route(x, weights.router, topk)
    order = ids.view(-1).argsort(stable=True)
    tokens = order // topk
    counts = peer.count(ids, weights.router.shape[0])
    rows = products(x.index_select(0, tokens), weights, counts)
    scaled = rows * w.view(-1, 1).index_select(0, order).to(rows.dtype)
    return torch.zeros_like(x).index_add(0, tokens, scaled), ids


def main():
    args = peer.arguments(__doc__, plain_moe.SHAPE, plain_moe.CPU_SHAPE)
    weights, x, dy = plain_moe.make(args)
    inputs = [x] + weights.all()
    report = peer.Report("layer", args)

    def forward(products):
        with torch.no_grad():
            return layer(x, weights, args.topk, products)

    def both(products):
        y, ids = layer(x, weights, args.topk, products)
        return y.detach(), ids, torch.autograd.grad(y, inputs, dy)

    for name, products in (("torch._grouped_mm", grouped_products),
                           ("torch.matmul loop", loop_products)):
        ways = {f"{name} forward": lambda _, p=products: forward(p),
                f"{name} forward + backward": lambda _, p=products: both(p)}
        results = {}
        ways = peer.runnable(report, ways, results)
        checks = {}
        for way, (y, ids, *gradients) in results.items():
            dx = gradients[0][0] if gradients else None
            checks[way] = [e for e in plain_moe.errors(y, dx, x, dy, weights, ids) if e is not None]
            if gradients:
                checks[way].append(
                    plain_moe.down_error(gradients[0][3], x, dy, weights, ids))
        results.clear()  # frees their memory
        times = peer.time_ways(args, ways)
        for way in ways:
            backward = len(checks[way]) > 1
            report.add(way, times[way], plain_moe.operations(args, backward),
                       error=max(checks[way]),
                       bound=plain_moe.BACKWARD_BOUND if backward else plain_moe.FORWARD_BOUND)
    return report.close()


if __name__ == "__main__":
    sys.exit(main())
