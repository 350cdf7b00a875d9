"""A mixture-of-experts layer and its plain definition, against which the peers' layers are checked.

y_t = sum over the K chosen experts of w_k down_e(silu(gate_e x_t) * up_e x_t), the K largest of the
softmax over the experts' logits, w renormalised to the sum 1. H hidden, F width of an expert.
"""

import dataclasses

import torch
import torch.nn.functional as F

import peer

SHAPE = {"tokens": 32768, "hidden": 4096, "ffn": 1024, "experts": 128, "topk": 8}
CPU_SHAPE = {"tokens": 48, "hidden": 64, "ffn": 32, "experts": 4, "topk": 2}
# A dozen bfloat16 roundings (2^-9 each) in a layer's forward pass, twice that in backward.
FORWARD_BOUND, BACKWARD_BOUND = 2e-2, 4e-2


@dataclasses.dataclass
class Weights:
    """In bfloat16: router [E, H], gate_up [E, 2F, H] with the gate's rows first, down [E, H, F]."""

    router: torch.Tensor
    gate_up: torch.Tensor
    down: torch.Tensor

    def all(self):
        return [self.router, self.gate_up, self.down]


def make(args):
    """Random weights, tokens x [T, H] and the gradient dy of the layer's result."""
    h, f, e = args.hidden, args.ffn, args.experts
    weights = Weights(peer.random(args, e, h, scale=h ** -0.5),
                      peer.random(args, e, 2 * f, h, scale=h ** -0.5),
                      peer.random(args, e, h, f, scale=f ** -0.5))
    x = peer.random(args, args.tokens, h)
    for tensor in weights.all() + [x]:
        tensor.requires_grad_()
    return weights, x, peer.random(args, args.tokens, h)


def route(x, router, topk):
    """Weights [T, K] in float32 and experts [T, K]."""
    probabilities = torch.softmax(x @ router.t(), dim=-1, dtype=torch.float32)
    weights, ids = probabilities.topk(topk, dim=-1)
    return weights / weights.sum(dim=-1, keepdim=True), ids


def operations(args, backward):
    """Multiplications and additions of the experts."""
    forward = 6 * args.tokens * args.topk * args.hidden * args.ffn
    return 3 * forward if backward else forward


def plain(x, weights, ids):
    """The definition, a token and an expert at a time, in float32, for given experts [T, K]."""
    logits = x @ weights.router.float().t()
    chosen = torch.softmax(logits.gather(1, ids), dim=-1)
    tokens = []
    for t, experts in enumerate(ids.tolist()):
        total = 0
        for k, e in enumerate(experts):
            gate, up = (weights.gate_up[e].float() @ x[t]).chunk(2)
            total = total + chosen[t, k] * (weights.down[e].float() @ (F.silu(gate) * up))
        tokens.append(total)
    return torch.stack(tokens)


def errors(y, dx, x, dy, weights, ids):
    """Of y and, if given, dx, on sampled tokens. Infinite if `ids` are not the largest logits."""
    sample = torch.randperm(x.shape[0], device=x.device)[:16]
    logits = x[sample].detach().float() @ weights.router.detach().float().t()
    kth = logits.sort(dim=-1, descending=True).values[:, ids.shape[1] - 1]
    # the K largest are below 8, so bfloat16 ones are within 2^-6 of these
    if not bool((logits.gather(1, ids[sample]).min(dim=-1).values > kth - 0.05).all()):
        return float("inf"), float("inf")
    exact = x[sample].detach().float().requires_grad_()
    expected = plain(exact, weights, ids[sample])
    forward = peer.relative_error(y[sample], expected)
    if dx is None:
        return forward, None
    expected_dx, = torch.autograd.grad(expected, exact, dy[sample].float())
    return forward, peer.relative_error(dx[sample], expected_dx)


def down_error(d_down, x, dy, weights, ids, expert=0):
    """Of one expert's gradient of `down`, over all tokens that chose it."""
    tokens, choice = (ids == expert).nonzero(as_tuple=True)
    rows = x[tokens].detach().float()
    logits = (rows @ weights.router.detach().float().t()).gather(1, ids[tokens])
    w = torch.softmax(logits, dim=-1).gather(1, choice[:, None])
    gate, up = (rows @ weights.gate_up[expert].detach().float().t()).chunk(2, dim=-1)
    expected = (w * dy[tokens].float()).t() @ (F.silu(gate) * up)
    return peer.relative_error(d_down[expert], expected)
