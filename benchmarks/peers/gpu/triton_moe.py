#!/usr/bin/env python3
"""A fused mixture-of-experts forward in Triton, and its grouped product alone.

Slots (token, choice) are sorted by expert, and each expert's are padded to whole blocks of BLOCK_M;
block b then belongs to one expert, which the device looks up: no host waits for the counts, and the
grid is what the shapes allow at most. The first kernel gathers tokens, multiplies by both halves of
gate_up and writes silu(gate) * up; the second multiplies by down, scales by the routing weight and
writes to the slot's place, so that a token's K results lie side by side to be added.

On a CPU (--device cpu) the kernels run in Triton's interpreter, in float32.
"""

import os
import sys

if "cpu" in sys.argv or "--device=cpu" in sys.argv:
    os.environ["TRITON_INTERPRET"] = "1"  # before triton is imported

import torch
import triton
import triton.language as tl

import peer
import plain_moe
from torch_grouped_mm import error_of, offsets_of

TILES = {"BLOCK_M": 128, "BLOCK_N": 256, "BLOCK_K": 64, "GROUP": 16}
FUSED_TILES = TILES | {"BLOCK_N": 128}  # two accumulators
LAUNCH = {"num_warps": 8, "num_stages": 3}


@triton.jit
def tile_of(experts, blocks, columns, GROUP: tl.constexpr):
    """Row block and column block of this program, and its expert, -1 where the grid has room for more
    blocks than there are. GROUP row blocks share weights in the cache."""
    pid = tl.program_id(0)
    band = pid // (GROUP * columns)
    height = tl.minimum(blocks - band * GROUP, GROUP)
    inside = pid % (GROUP * columns)
    block = band * GROUP + inside % height
    return block, inside // height, tl.load(experts + block)


@triton.jit
def operands_of(x, slots, slot_count, block, column, K: tl.constexpr, CHOICES: tl.constexpr,
                BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr):
    """A tile's slots and which of them exist, its columns, and where the first BLOCK_K terms of
    products lie, in a row of weights and in the slots' rows of x."""
    slot = tl.load(slots + block * BLOCK_M + tl.arange(0, BLOCK_M))
    live = slot < slot_count
    row = tl.where(live, slot // CHOICES, 0).to(tl.int64)
    n = column * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    return slot, live, n, k, x + row[:, None] * K + k[None, :]


@triton.jit
def product_kernel(x, w, out, scale, slots, experts, slot_count, blocks,
                   N: tl.constexpr, K: tl.constexpr, CHOICES: tl.constexpr, SCALED: tl.constexpr,
                   BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
                   GROUP: tl.constexpr):
    """out[slot] = w[expert] x[slot // CHOICES], times scale[slot] if SCALED; w [E, N, K]."""
    block, column, expert = tile_of(experts, blocks, tl.cdiv(N, BLOCK_N), GROUP)
    if expert < 0:
        return
    slot, live, n, k, x_at = operands_of(x, slots, slot_count, block, column, K, CHOICES,
                                         BLOCK_M, BLOCK_N, BLOCK_K)
    w_at = w + expert.to(tl.int64) * N * K + n[None, :].to(tl.int64) * K + k[:, None]
    total = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for start in range(0, K, BLOCK_K):
        inside = k < K - start
        a = tl.load(x_at + start, mask=live[:, None] & inside[None, :], other=0.0)
        b = tl.load(w_at + start, mask=inside[:, None] & (n[None, :] < N), other=0.0)
        total = tl.dot(a, b, total)
    if SCALED:
        total *= tl.load(scale + slot, mask=live, other=0.0)[:, None]
    at = out + slot[:, None].to(tl.int64) * N + n[None, :]
    tl.store(at, total.to(out.dtype.element_ty), mask=live[:, None] & (n[None, :] < N))


@triton.jit
def gate_up_kernel(x, w, out, slots, experts, slot_count, blocks, N: tl.constexpr,
                   K: tl.constexpr, CHOICES: tl.constexpr, BLOCK_M: tl.constexpr,
                   BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr):
    """out[slot] = silu(gate) * up of x[slot // CHOICES]; w [E, 2 N, K], the gate's rows first."""
    block, column, expert = tile_of(experts, blocks, tl.cdiv(N, BLOCK_N), GROUP)
    if expert < 0:
        return
    slot, live, n, k, x_at = operands_of(x, slots, slot_count, block, column, K, CHOICES,
                                         BLOCK_M, BLOCK_N, BLOCK_K)
    w_at = w + expert.to(tl.int64) * 2 * N * K + n[None, :].to(tl.int64) * K + k[:, None]
    up_at = w_at + N * K
    gate = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    up = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for start in range(0, K, BLOCK_K):
        inside = k < K - start
        a = tl.load(x_at + start, mask=live[:, None] & inside[None, :], other=0.0)
        mask = inside[:, None] & (n[None, :] < N)
        gate = tl.dot(a, tl.load(w_at + start, mask=mask, other=0.0), gate)
        up = tl.dot(a, tl.load(up_at + start, mask=mask, other=0.0), up)
    result = gate / (1 + tl.exp(-gate)) * up
    at = out + slot[:, None].to(tl.int64) * N + n[None, :]
    tl.store(at, result.to(out.dtype.element_ty), mask=live[:, None] & (n[None, :] < N))


def blocks_of(ids, experts, block_rows):
    """Slots in blocks of one expert each: slots [B * block_rows], S where there is none, and the
    expert of each block [B], -1 where there is none. ids [S]; nothing waits for the device."""
    slot_count = ids.numel()
    order = ids.argsort(stable=True)
    counts = peer.count(ids, experts)
    padded = (counts + block_rows - 1) // block_rows * block_rows
    ends = padded.cumsum(0)
    rank = torch.arange(slot_count, device=ids.device) - (counts.cumsum(0) - counts)[ids[order]]
    blocks = triton.cdiv(slot_count, block_rows) + experts
    slots = torch.full((blocks * block_rows,), slot_count, dtype=torch.int32, device=ids.device)
    slots[(ends - padded)[ids[order]] + rank] = order.to(torch.int32)
    begins = torch.arange(blocks, device=ids.device) * block_rows
    expert = torch.searchsorted(ends, begins, right=True)
    return slots, torch.where(expert < experts, expert, -1).to(torch.int32)


def product(x, w, slots, experts, slot_count, choices, scale, tiles):
    """[slot_count, N]: w[expert] x[slot // choices] of every slot, times `scale` unless None."""
    n, k = w.shape[1:]
    out = x.new_empty(slot_count, n)
    blocks = experts.numel()
    product_kernel[(blocks * triton.cdiv(n, tiles["BLOCK_N"]),)](
        x, w, out, out if scale is None else scale, slots, experts, slot_count, blocks,
        N=n, K=k, CHOICES=choices, SCALED=scale is not None, **tiles, **LAUNCH)
    return out


def layer(x, weights, topk, tiles, fused_tiles):
    """y [T, H] and the experts [T, K] of every token."""
    w, ids = plain_moe.route(x, weights.router, topk)
    slots, experts = blocks_of(ids.view(-1), weights.router.shape[0], tiles["BLOCK_M"])
    blocks, width = experts.numel(), weights.down.shape[2]
    hidden = x.new_empty(ids.numel(), width)
    gate_up_kernel[(blocks * triton.cdiv(width, fused_tiles["BLOCK_N"]),)](
        x, weights.gate_up, hidden, slots, experts, ids.numel(), blocks,
        N=width, K=x.shape[1], CHOICES=topk, **fused_tiles, **LAUNCH)
    rows = product(hidden, weights.down, slots, experts, ids.numel(), 1, w.view(-1), tiles)
    return rows.view(*ids.shape, -1).sum(dim=1), ids


def measure_layer(args, tiles, fused_tiles):
    weights, x, dy = plain_moe.make(args)
    if args.device == "cpu":  # the interpreter has no bfloat16 products
        weights = plain_moe.Weights(*(w.detach().float() for w in weights.all()))
        x = x.detach().float()
    report, results = peer.Report("layer", args), {}
    with torch.no_grad():
        ways = peer.runnable(report, {"triton forward": lambda _: layer(
            x, weights, args.topk, tiles, fused_tiles)}, results)
        times = peer.time_ways(args, ways)
    for way, (y, ids) in results.items():
        error, _ = plain_moe.errors(y, None, x, dy, weights, ids)
        report.add(way, times[way], plain_moe.operations(args, backward=False), error=error,
                   bound=plain_moe.FORWARD_BOUND)
    return report.close()


def measure_product(args, tiles):
    rows = args.tokens * args.topk
    x = peer.random(args, rows, args.hidden)
    w = peer.random(args, args.experts, args.ffn, args.hidden, scale=args.hidden ** -0.5)
    if args.device == "cpu":
        x, w = x.float(), w.float()
    ends = offsets_of(rows, args.experts, args.device)
    ids = torch.searchsorted(ends, torch.arange(rows, device=args.device, dtype=torch.int32),
                             right=True)
    slots, experts = blocks_of(ids, args.experts, tiles["BLOCK_M"])
    report, results = peer.Report("gemm", args), {}
    ways = peer.runnable(report, {"triton": lambda _: product(
        x, w, slots, experts, rows, 1, None, tiles)}, results)
    times = peer.time_ways(args, ways)
    for way, y in results.items():
        report.add(way, times[way], 2 * rows * args.hidden * args.ffn,
                   error=error_of(y, x, w, ends), bound=1e-2)
    return report.close()


def main():
    args = peer.arguments(__doc__, plain_moe.SHAPE, plain_moe.CPU_SHAPE)
    tiles, fused_tiles = TILES, FUSED_TILES
    if args.device == "cpu":
        tiles = fused_tiles = {"BLOCK_M": 16, "BLOCK_N": 32, "BLOCK_K": 16, "GROUP": 3}
    code = measure_product(args, tiles)
    return measure_layer(args, tiles, fused_tiles) or code


if __name__ == "__main__":
    sys.exit(main())
