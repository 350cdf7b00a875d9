#!/usr/bin/env python3
"""Rounding errors of a layer at published widths beside PyTorch's, as a Markdown table.

One Mixtral layer of two experts, both chosen, with random weights in float32: `moe layer` and
PyTorch compute its output and gradients from the same files, PyTorch also in float64. An error is
|x - x64| / |x64| over the whole tensor, in 2-norms; the ratio is ours by PyTorch's.
"""
import argparse
import json
import pathlib
import subprocess
import sys
import tempfile

import table_lines
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file

EXPERTS = 2
PREFIX = "model.layers.0.block_sparse_moe."
TENSORS = ("y", "dx", "gate.weight", "experts.0.w1.weight", "experts.0.w2.weight")


def random_case(hidden, ffn, tokens):
    """x, dy and the weights by their names."""
    torch.manual_seed(1)
    shapes = {"gate.weight": (EXPERTS, hidden)}
    for e in range(EXPERTS):
        shapes |= {f"experts.{e}.w1.weight": (ffn, hidden), f"experts.{e}.w3.weight": (ffn, hidden),
                   f"experts.{e}.w2.weight": (hidden, ffn)}
    weights = {name: torch.randn(shape) * shape[1] ** -0.5 for name, shape in shapes.items()}
    return torch.randn(tokens, hidden), torch.randn(tokens, hidden), weights


def by_torch(x, dy, weights, dtype):
    """y and the gradients, in `dtype`."""
    x = x.to(dtype).requires_grad_()
    w = {name: tensor.to(dtype).requires_grad_() for name, tensor in weights.items()}
    scores = torch.softmax(F.linear(x, w["gate.weight"]), dim=-1)
    y = 0
    for e in range(EXPERTS):
        names = [f"experts.{e}.w{i}.weight" for i in (1, 3, 2)]
        gate, up = (F.linear(x, w[name]) for name in names[:2])
        y = y + scores[:, e, None] * F.linear(F.silu(gate) * up, w[names[2]])
    y.backward(dy.to(dtype))
    return {"y": y.detach(), "dx": x.grad} | {name: tensor.grad for name, tensor in w.items()}


def by_moe(moe, folder, x, dy, weights):
    hidden, ffn = x.shape[1], weights["experts.0.w1.weight"].shape[0]
    (folder / "config.json").write_text(json.dumps({
        "model_type": "mixtral", "hidden_size": hidden, "intermediate_size": ffn,
        "num_local_experts": EXPERTS, "num_experts_per_tok": EXPERTS, "hidden_act": "silu",
        "num_hidden_layers": 1}), encoding="utf-8")
    files = {name: str(folder / f"{name}.safetensors") for name in ("w", "x", "dy", "y", "g")}
    save_file({PREFIX + name: tensor for name, tensor in weights.items()}, files["w"])
    save_file({"x": x}, files["x"])
    save_file({"dy": dy}, files["dy"])
    subprocess.run([moe, "layer", "--hf-config", str(folder / "config.json"), "--weights",
                    files["w"], "--input", files["x"], "--output", files["y"], "--grad-output",
                    files["dy"], "--grads", files["g"], "--ranks", "1", "--quiet"], check=True,
                   stdout=subprocess.DEVNULL, env=table_lines.clean_environment())
    results = load_file(files["y"]) | load_file(files["g"])
    return {name.removeprefix(PREFIX): tensor for name, tensor in results.items()}


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--moe", required=True, help="the program `moe`")
    parser.add_argument("--widths", default="4096x14336,3584x2560,2880x2880",
                        help="H x F: of Mixtral-8x7B, Qwen2-57B-A14B and gpt-oss")
    parser.add_argument("--tokens", type=int, default=32)
    args = parser.parse_args()
    print(f"{table_lines.machine()}, PyTorch {torch.__version__}\n")
    table_lines.head(["H", "F", "tensor", "error", "PyTorch's", "ratio"])
    for width in args.widths.split(","):
        hidden, ffn = map(int, width.split("x"))
        case = random_case(hidden, ffn, args.tokens)
        exact = by_torch(*case, torch.float64)
        with tempfile.TemporaryDirectory() as folder:
            results = [by_moe(args.moe, pathlib.Path(folder), *case),
                       by_torch(*case, torch.float32)]
        for name in TENSORS:
            ours, theirs = ((result[name].double() - exact[name]).norm().item() /
                            exact[name].norm().item() for result in results)
            table_lines.row([hidden, ffn, name, f"{ours:.1e}", f"{theirs:.1e}",
                             f"{ours / theirs:.2f}"])


if __name__ == "__main__":
    sys.exit(main())
