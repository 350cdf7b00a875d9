#!/usr/bin/env python3
"""Copy bandwidth of the device: the limit of kernels that only move rows."""

import sys

import torch

import peer


def main():
    args = peer.arguments(__doc__, {"mib": 2048}, {"mib": 1})
    source = torch.randint(0, 256, (args.mib << 20,), dtype=torch.uint8, device=args.device)
    target = torch.zeros_like(source)
    times = peer.time_ways(args, {"copy": lambda _: target.copy_(source)})["copy"]
    report = peer.Report("copy", args)
    report.add("copy", times, bytes_moved=2 * source.numel(),
               error=float((source != target).sum().item()), bound=0)
    return report.close()


if __name__ == "__main__":
    sys.exit(main())
