"""A mixture-of-experts layer of PyTorch's operations in the two usual ways, for
benchmarks/layer_table.py: a loop over the experts with index_add, and slots sorted by expert,
split, and a product per expert.

A request has tokens, experts, topk, hidden, ffn, dtype (f32, bf16), backward (false: forward
without a graph; true: forward and all gradients) and calls. Forward is y_t = sum over the K chosen
experts of w_k down_e(silu(gate_e x_t) * up_e x_t), w the renormalised K largest of the softmax of
router x_t.
"""
import torch
import torch.nn.functional as F

import worker

# A dozen roundings in the layer's forward pass, twice that in backward. In float32 the sums of up
# to 2816 terms round too: the square root of that each.
BOUND = {"f32": 12 * 53 * 2.0 ** -24, "bf16": 12 * 2.0 ** -9}


def route(x, router, topk):
    """Weights [T, K] in the type of x, and experts [T, K]."""
    scores = torch.softmax(F.linear(x, router), dim=-1, dtype=torch.float32)
    weights, ids = scores.topk(topk, dim=-1)
    return (weights / weights.sum(dim=-1, keepdim=True)).to(x.dtype), ids


def expert(rows, gate_up, down):
    gate, up = F.linear(rows, gate_up).chunk(2, dim=-1)
    return F.linear(F.silu(gate) * up, down)


def by_loop(x, router, experts, topk):
    """Each expert takes its tokens and adds to the result."""
    weights, ids = route(x, router, topk)
    y = torch.zeros_like(x)
    masks = F.one_hot(ids, num_classes=len(experts)).permute(2, 1, 0)  # [E, K, T]
    for mask, matrices in zip(masks, experts):
        choice, tokens = torch.where(mask)
        if tokens.numel() == 0:
            continue
        rows = expert(x[tokens], *matrices) * weights[tokens, choice, None]
        y = y.index_add(0, tokens, rows) if y.requires_grad else y.index_add_(0, tokens, rows)
    return y, ids


def by_sort(x, router, experts, topk):
    """Rows are sorted by expert, and put back in the order of the tokens to be added."""
    weights, ids = route(x, router, topk)
    order = ids.view(-1).argsort(stable=True)
    counts = torch.bincount(ids.view(-1), minlength=len(experts)).tolist()
    rows = x.index_select(0, torch.div(order, topk, rounding_mode="floor"))
    parts = [expert(part, *matrices)
             for part, matrices in zip(rows.split(counts), experts) if part.shape[0] > 0]
    place = torch.empty_like(order)
    place[order] = torch.arange(order.numel())
    back = torch.cat(parts).index_select(0, place).view(*ids.shape, -1)
    return (back * weights.unsqueeze(-1)).sum(dim=1), ids


def plain(x, router, experts, ids):
    """The definition in the type of x, a token and an expert at a time, for given [T, K]."""
    chosen = torch.softmax((x @ router.t()).gather(1, ids), dim=-1)
    return torch.stack([
        sum(chosen[t, k] * expert(x[t], *(matrix.to(x.dtype) for matrix in experts[e]))
            for k, e in enumerate(of_token)) for t, of_token in enumerate(ids.tolist())])


def check(name, result, x, dy, router, experts, bound):
    """y and, where it was made, dx of 16 tokens against float64."""
    y, ids, dx = result
    sample = torch.randperm(x.shape[0])[:16]
    exact, ids = x[sample].detach().double().requires_grad_(), ids[sample]
    logits = (exact @ router.double().t()).detach()
    kth = logits.sort(dim=-1, descending=True).values[:, ids.shape[1] - 1]
    # logits in bfloat16 are below 4, so within 2^-7 of these
    if not bool((logits.gather(1, ids).min(dim=-1).values > kth - 0.02).all()):
        raise ValueError(f"{name}: not the largest logits")
    expected = plain(exact, router.double(), experts, ids)
    errors = [worker.relative_error(y[sample], expected) / bound]
    if dx is not None:
        expected_dx, = torch.autograd.grad(expected, exact, dy[sample].double())
        errors.append(worker.relative_error(dx[sample], expected_dx) / (2 * bound))
    if not max(errors) <= 1:
        raise ValueError(f"{name}: wrong, by {errors} of what rounding allows")


def prepare(shape):
    """The ways by name, each called once and checked."""
    torch.manual_seed(0)
    dtype = {"f32": torch.float32, "bf16": torch.bfloat16}[shape["dtype"]]
    backward, h, f = shape["backward"], shape["hidden"], shape["ffn"]

    def make(*sizes, scale=1.0):
        return (torch.randn(*sizes) * scale).to(dtype).requires_grad_(backward)

    x, dy = make(shape["tokens"], h), make(shape["tokens"], h).detach()
    router = make(shape["experts"], h, scale=h ** -0.5)
    experts = [(make(2 * f, h, scale=h ** -0.5), make(h, f, scale=f ** -0.5))
               for _ in range(shape["experts"])]
    inputs = [x, router] + [matrix for pair in experts for matrix in pair]

    def call(way):
        if not backward:
            with torch.no_grad():
                return *way(x, router, experts, shape["topk"]), None
        y, ids = way(x, router, experts, shape["topk"])
        # an expert without a row has no gradient
        return y, ids, torch.autograd.grad(y, inputs, dy, allow_unused=True)[0]

    ways = {"loop": lambda: call(by_loop), "sort": lambda: call(by_sort)}
    for name, way in ways.items():
        check(name, way(), x, dy, router.detach(), experts, BOUND[shape["dtype"]])
    return ways


if __name__ == "__main__":
    worker.serve(prepare)
