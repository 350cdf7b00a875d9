#!/usr/bin/env python3
"""Writes golden files: MoE blocks of transformers, forward and backward. README.md describes cases and files."""

from __future__ import annotations

import argparse
import copy
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.torch
import torch
import transformers
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers.core_model_loading import revert_weight_conversion
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from models import COMMITTED, MODELS, Case, Model, random_case

DATA = Path(__file__).resolve().parent / "data"
VERSIONS = {"torch": torch.__version__.split("+")[0], "transformers": transformers.__version__}
# float32 selects as float64 does when scores differ by more than this part of the token's largest score.
MIN_GAP = 1e-4
# Values this near a clamp's bound, in parts of it, may be clamped in float32 and not in float64 (they agree to 1e-6).
# A gradient jumps there, and the trace does not say whose value it is: all tokens are drawn again.
MIN_CLAMP_GAP = 1e-5
# A gradient row this far below the largest one is 0 in real arithmetic; what is left is rounding.
ZERO_ROW = 1e-12


class Trace(TorchFunctionMode):
    """Keeps what the code under it passes to, and gets from, the functions that route and clamp.

    `wide` turns the blocks' casts to float32 into casts to float64, so that a float64 run is one throughout.
    """

    SELECTS = (torch.topk, Tensor.topk)
    RECORDED = (*SELECTS, Tensor.clamp, Tensor.gt)

    def __init__(self, wide: bool) -> None:
        super().__init__()
        self.wide = wide
        self.calls: list[tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any], Any]] = []

    def __torch_function__(self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (),
                           kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        if self.wide:
            func = Tensor.double if func == Tensor.float else func
            args = tuple(torch.float64 if a is torch.float32 else a for a in args)
            kwargs = {k: torch.float64 if v is torch.float32 else v for k, v in kwargs.items()}
        result = func(*args, **kwargs)
        if func in self.RECORDED:
            self.calls.append((func, args, kwargs, result))
        return result

    def of(self, *functions: Callable[..., Any]) -> list[tuple[tuple[Any, ...], dict[str, Any], Any]]:
        return [call[1:] for call in self.calls if call[0] in functions]

    def clamps(self) -> list[tuple[tuple[Any, ...], dict[str, Any], Any]]:
        """By constants: SparseMixer clamps magnitudes by the row's largest logit, which changes no value."""
        return [call for call in self.of(Tensor.clamp) if not any(isinstance(b, Tensor) for b in call[1].values())]


@dataclass
class Run:
    """One forward and backward pass of a block. Choices are ordered best first."""

    trace: Trace
    y: Tensor
    dx: Tensor
    router_logits: Tensor
    expert_ids: Tensor
    expert_weights: Tensor
    grads: dict[str, Tensor] = field(default_factory=dict)


@dataclass
class Block:
    """The MoE block of one layer of a whole model that has no storage."""

    whole: transformers.PreTrainedModel
    name: str  # the block's, in the model
    module: nn.Module
    model: Model
    identity_experts: range  # weights that transformers has under their numbers are of no use

    def in_checkpoint(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """The block's tensors by the names and in the layouts in which transformers saves them."""
        saved = revert_weight_conversion(self.whole, {f"{self.name}.{n}": t for n, t in tensors.items()})
        return {n: t for n, t in saved.items() if not any(f".experts.{e}." in n for e in self.identity_experts)}

    def in_memory(self) -> dict[str, Tensor]:
        """The block's tensors as transformers has them, and saves them with save_original_format=False."""
        return {f"{self.name}.{n}": t for n, t in self.module.state_dict().items()}


def build_block(case: Case) -> Block:
    model = MODELS[case.model]
    config = model.make_config(case)
    with torch.device("meta"):
        whole = transformers.AutoModelForCausalLM.from_config(config, experts_implementation="eager")
    name = f"model.layers.{case.layer}.{model.block}"
    block = whole.get_submodule(name)
    block.get_submodule(model.router)  # a dense layer has none
    zero = getattr(config, "zero_expert_num", 0)
    return Block(whole, name, block.to_empty(device="cpu").float().eval(), model,
                 range(case.sizes.experts, case.sizes.experts + zero))


def fill(block: Block, rng: np.random.Generator) -> None:
    """Draws all weights, at scales that give outputs near 1 for inputs near 1."""
    model = block.model
    gains = {"down_proj.weight": 2.0, "down_proj": 2.0, f"{model.router}.weight": 1.5} | model.gains
    for name, tensor in block.module.state_dict().items():
        gain = next((gains[end] for end in gains if name.endswith(end)), 1.0)
        if name.endswith(("e_score_correction_bias", "expert_bias")):
            values = gain * rng.uniform(-0.02, 0.4, tensor.shape)
        elif name.endswith("bias"):
            values = 0.5 * rng.standard_normal(tensor.shape)
        else:
            fan_in = tensor.shape[1 if model.transposed else -1]  # of [out, in] it is 1 as well
            values = gain / np.sqrt(fan_in) * rng.standard_normal(tensor.shape)
        tensor.copy_(torch.from_numpy(values))


def routing(model: Model, output: Any, trace: Trace) -> tuple[Tensor, Tensor, Tensor]:
    """Logits, combine weights and ids from what a router returns."""
    if model.model_type != "llama4_text":
        return output
    scores, logits = output
    ids = trace.of(*Trace.SELECTS)[-1][2].indices
    return logits, scores.gather(1, ids), ids


def run_block(of: Block, x: Tensor, dy: Tensor, dtype: torch.dtype) -> Run:
    block = copy.deepcopy(of.module).to(dtype)
    router_outputs: list[Any] = []
    block.get_submodule(of.model.router).register_forward_hook(lambda _m, _in, out: router_outputs.append(out))
    x = x.to(dtype).requires_grad_()
    with Trace(wide=dtype is torch.float64) as trace:
        out = block(x[None])
    y = (out[0] if isinstance(out, tuple) else out).reshape(x.shape)
    y.backward(dy.to(dtype))

    logits, weights, ids = routing(of.model, router_outputs[0], trace)
    # Some blocks ask for unsorted choices. No two scores are alike (unsafe_tokens), so ids need not decide.
    selects = trace.of(*Trace.SELECTS)
    scores = selects[-1][0][0] if selects else logits  # SparseMixer takes the largest logits one by one
    best_first = scores.gather(1, ids).argsort(dim=1, descending=True)
    # A parameter that no token used has no gradient at all in some blocks, and zeros in others.
    grads = {n: torch.zeros_like(p) if p.grad is None else p.grad
             for n, p in block.named_parameters() if p.requires_grad}
    return Run(trace, y.detach(), x.grad, logits.detach(), ids.gather(1, best_first),
               weights.detach().gather(1, best_first), of.in_checkpoint(grads))


def unsafe_tokens(run: Run) -> Tensor:
    """Tokens whose result hangs on rounding, or on what stands for "not eligible" in a masked score."""
    unsafe = torch.zeros(run.y.shape[0], dtype=torch.bool)
    selects = [(args[0], kwargs.get("k", args[1] if len(args) > 1 else None))
               for args, kwargs, _ in run.trace.of(*Trace.SELECTS)]
    for scores, topk in selects or [(run.router_logits, run.expert_ids.shape[1])]:
        if scores.dim() != 2:  # the best two of a group, whose sum does not jump where they change places
            continue
        scores = scores.masked_fill(scores.isinf(), 0.0)  # not eligible
        unsafe |= (scores == 0).sum(dim=1) > scores.shape[1] - topk
        best = scores.sort(dim=1, descending=True).values[:, : topk + 1]
        unsafe |= (best.diff(dim=1).abs() < MIN_GAP * scores.abs().amax(dim=1, keepdim=True)).any(dim=1)
    for (distance, bound), _, _ in run.trace.of(Tensor.gt):  # SparseMixer's near logits
        unsafe |= ((distance - bound).abs() < MIN_GAP).any(dim=1)
    for args, kwargs, _ in run.trace.clamps():
        bounds = [bound for bound in kwargs.values() if bound is not None]
        unsafe |= any(((args[0] - bound).abs() < MIN_CLAMP_GAP * abs(bound)).any() for bound in bounds)
    return unsafe


def draw_inputs(case: Case, block: Block, rng: np.random.Generator) -> tuple[Tensor, Tensor, int]:
    """x and dy, with the number of tokens that had to be drawn again."""
    shape = (case.sizes.tokens, case.sizes.hidden)
    x, dy = (torch.from_numpy(rng.standard_normal(shape)).float() for _ in range(2))
    redrawn = 0
    for _ in range(1000):
        unsafe = unsafe_tokens(run_block(block, x, dy, torch.float64))
        count = int(unsafe.sum())
        if count == 0:
            return x, dy, redrawn
        x[unsafe] = torch.from_numpy(rng.standard_normal((count, shape[1]))).float()
        redrawn += count
    raise RuntimeError(f"{case.name}: no inputs without near-ties")


def clear_rounding(grads: dict[str, Tensor]) -> dict[str, Tensor]:
    norms = {name: grad.norm(dim=-1, keepdim=True) for name, grad in grads.items()}
    largest = max(float(norm.max()) for norm in norms.values())
    return {name: torch.where(norms[name] <= ZERO_ROW * largest, 0.0, grad) for name, grad in grads.items()}


def row_error(value: Tensor, exact: Tensor) -> tuple[float, float]:
    """Largest distance of a row as a part of that row's norm (rows of zeros left out), and of the longest row's.

    Of a tensor of zeros: (0, the distance itself).
    """
    value, exact = (t.double().reshape(-1, t.shape[-1]) for t in (value, exact))
    distance, norm = (value - exact).norm(dim=1), exact.norm(dim=1)
    rows = norm > 0
    if not rows.any():
        return 0.0, float(distance.max())
    return float((distance / norm)[rows].max()), float(distance.max() / norm.max())


def float32_errors(narrow: Run, exact: Run) -> dict[str, Any]:
    def digits(value: float) -> float:
        return float(f"{value:.1e}")

    errors: dict[str, Any] = {key: digits(row_error(getattr(narrow, key), getattr(exact, key))[0])
                              for key in ("y", "dx", "expert_weights", "router_logits")}
    grads = {name: row_error(narrow.grads[name], exact.grads[name]) for name in exact.grads}
    worst = max(grads, key=lambda name: grads[name][0])
    errors["grads_of_row"] = digits(grads[worst][0])
    errors["grads_of_row_worst"] = worst
    errors["grads_of_longest_row"] = digits(max(error for _, error in grads.values()))
    return errors


def write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=2, sort_keys=True) + "\n")


def save(path: Path, tensors: dict[str, Tensor], metadata: dict[str, str] | None = None) -> None:
    narrow = {name: (t.float() if t.is_floating_point() else t).contiguous() for name, t in tensors.items()}
    data = safetensors.torch.save(narrow)
    # The library writes metadata in another order each time; files have the same bytes only with an order of ours.
    start = 8 + int.from_bytes(data[:8], "little")
    header = ({"__metadata__": metadata} if metadata else {}) | json.loads(data[8:start])
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(len(text).to_bytes(8, "little") + text + data[start:])


def write_weights(folder: Path, weights: dict[str, Tensor], shards: int) -> None:
    metadata = {"format": "pt"} | VERSIONS
    if shards == 1:
        save(folder / "model.safetensors", weights, metadata)
        return
    names = sorted(weights)
    weight_map: dict[str, str] = {}
    for shard in range(shards):
        file = f"model-{shard + 1:05d}-of-{shards:05d}.safetensors"
        part = names[shard * len(names) // shards : (shard + 1) * len(names) // shards]
        save(folder / file, {name: weights[name] for name in part}, metadata)
        weight_map |= dict.fromkeys(part, file)
    total = sum(t.numel() * t.element_size() for t in weights.values())
    write_json(folder / "model.safetensors.index.json", {"metadata": {"total_size": total}, "weight_map": weight_map})


def make_case(case: Case, out: Path) -> dict[str, Any]:
    """Writes one case and returns its entry of the manifest."""
    rng = np.random.default_rng([case.seed, *case.name.encode()])
    block = build_block(case)
    fill(block, rng)
    x, dy, redrawn = draw_inputs(case, block, rng)
    exact = run_block(block, x, dy, torch.float64)
    narrow = run_block(block, x, dy, torch.float32)
    if not torch.equal(narrow.expert_ids, exact.expert_ids):
        raise RuntimeError(f"{case.name}: float32 and float64 choose different experts")
    exact.grads = clear_rounding(exact.grads)

    folder = out / case.name
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "config.json", block.model.trimmed(block.whole.config, *case.options))
    saved = block.in_checkpoint(block.module.state_dict())
    write_weights(folder, saved, case.shards)
    if case.name.endswith("-1") and block.in_memory().keys() != saved.keys():
        save(folder / "fused.safetensors", block.in_memory(), {"format": "pt"} | VERSIONS)
    io = ("y", "dx", "router_logits", "expert_ids", "expert_weights")
    save(folder / "io.safetensors", {"x": x, "dy": dy} | {key: getattr(exact, key) for key in io})
    save(folder / "grads.safetensors", exact.grads)

    outputs = exact.router_logits.shape[1]
    plain = exact.router_logits.topk(case.sizes.topk).indices.sort().values
    clamps = exact.trace.clamps()
    return {
        "case": case.name, "model": case.model, "seed": case.seed, "sizes": asdict(case.sizes), "layer": case.layer,
        "options": case.options, "shards": case.shards, "redrawn_tokens": redrawn,
        "tokens_per_expert": torch.bincount(exact.expert_ids.flatten(), minlength=outputs).tolist(),
        "tokens_not_choosing_largest_logits": int((plain != exact.expert_ids.sort().values).any(dim=1).sum()),
        "clamped_values": sum(int((args[0] != result).sum()) for args, _, result in clamps),
        "float32_error": float32_errors(narrow, exact),
    }


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, help="folder to write (default, without other options: data/ beside this)")
    parser.add_argument("--model", nargs="+", choices=MODELS, metavar="NAME", help="only these models")
    parser.add_argument("--list", action="store_true", help="list the models and leave")
    parser.add_argument("--seed", type=int, help="draw sizes and configurations from this seed, not the committed cases")
    parser.add_argument("--cases", type=int, metavar="N", help="cases per model, with --seed (default 2)")
    sizes = parser.add_argument_group("sizes held fixed, with --seed")
    for name, letter in {"tokens": "T", "hidden": "H", "width": "F", "experts": "E", "topk": "K"}.items():
        sizes.add_argument(f"--{name}", type=int, metavar=letter)
    options = parser.parse_args(arguments)
    given = {k: getattr(options, k) for k in ("tokens", "hidden", "width", "experts", "topk")}
    options.fixed = {k: v for k, v in given.items() if v is not None}
    if options.seed is None and (options.fixed or options.cases):
        parser.error("--cases and sizes need --seed")
    if min(options.fixed.values(), default=1) < 1 or options.fixed.get("experts", 2) < 2:
        parser.error("sizes are 1 or more, and experts 2 or more")
    if options.fixed.get("topk", 1) > options.fixed.get("experts", sys.maxsize):
        parser.error("--topk is more than --experts")
    if options.out is None and (options.model or options.seed is not None):
        parser.error("--out is needed: data/ holds all committed cases and nothing else")
    return options


def main(arguments: Sequence[str]) -> None:
    options = parse(arguments)
    names = options.model or list(MODELS)
    if options.list:
        print("\n".join(MODELS))
        return
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    torch.manual_seed(0)
    if options.seed is None:
        cases = [case for case in COMMITTED if case.model in names]
    else:
        cases = [random_case(name, number, options.seed, options.fixed)
                 for name in names for number in range(1, (options.cases or 2) + 1)]
    out = options.out or DATA
    entries = []
    for case in cases:
        entries.append(make_case(case, out))
        print(json.dumps(entries[-1]), file=sys.stderr)
    command = " ".join(["python3 tests/golden/generate.py", *arguments])
    if options.seed is None:
        defaults = {model.model_type: model.trimmed(CONFIG_MAPPING[model.model_type]()) for model in MODELS.values()}
        write_json(out / "defaults.json", defaults)
    write_json(out / "manifest.json", {"command": command, "versions": VERSIONS, "cases": entries})


if __name__ == "__main__":
    main(sys.argv[1:])
