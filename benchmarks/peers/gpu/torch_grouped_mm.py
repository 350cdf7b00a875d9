#!/usr/bin/env python3
"""PyTorch's grouped product, y = x W^T for rows grouped by expert: torch._grouped_mm and a loop of
torch.matmul; between them the limit, one large product by cuBLAS."""

import sys

import torch

import peer


def offsets_of(rows, experts, device):
    """Ends of the experts' rows, which are as even as can be."""
    ends = [rows * (expert + 1) // experts for expert in range(experts)]
    return torch.tensor(ends, dtype=torch.int32, device=device)


def loop(x, weight, ends):
    """One torch.matmul per expert; `ends` are on the host."""
    y = x.new_empty(x.shape[0], weight.shape[1])
    begin = 0
    for expert, end in enumerate(ends):
        torch.matmul(x[begin:end], weight[expert].t(), out=y[begin:end])
        begin = end
    return y


def error_of(y, x, weight, ends):
    """Of sampled rows, against products in float32 of the same bfloat16 values."""
    rows = torch.randint(0, x.shape[0], (64,), device=x.device)
    experts = torch.searchsorted(ends, rows.to(torch.int32), right=True)
    expected = torch.stack([weight[e].float() @ x[r].float() for r, e in zip(rows, experts)])
    return peer.relative_error(y[rows], expected)


def main():
    args = peer.arguments(
        __doc__, {"rows": 262144, "experts": 128, "hidden": 4096, "ffn": 1024, "square": 8192},
        {"rows": 96, "experts": 5, "hidden": 32, "ffn": 48, "square": 64})
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    x = peer.random(args, args.rows, args.hidden)
    weight = peer.random(args, args.experts, args.ffn, args.hidden, scale=args.hidden ** -0.5)
    a, b = (peer.random(args, args.square, args.square) for _ in range(2))
    ends = offsets_of(args.rows, args.experts, args.device)
    host_ends = ends.tolist()

    report, results = peer.Report("gemm", args), {}
    ways = peer.runnable(report, {
        "torch._grouped_mm": lambda _: torch._grouped_mm(x, weight.transpose(1, 2), offs=ends),
        "torch.matmul loop": lambda _: loop(x, weight, host_ends),
    }, results)
    limit = f"cuBLAS {args.square}^3"
    times = peer.time_ways(args, ways | {limit: lambda _: torch.matmul(a, b)})
    for name in ways:
        report.add(name, times[name], 2 * args.rows * args.hidden * args.ffn,
                   error=error_of(results[name], x, weight, ends), bound=1e-2)
    column = a.float() @ b[:, 0].float()
    report.add(limit, times[limit], 2 * args.square ** 3,
               error=peer.relative_error(torch.matmul(a, b)[:, 0], column), bound=1e-2)
    return report.close()


if __name__ == "__main__":
    sys.exit(main())
