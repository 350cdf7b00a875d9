#!/usr/bin/env python3
"""Writes golden files of whole models: a tiny random one of each family that `moe train --init-from` reads, and of each
dense one that --upcycle does, as transformers saves it, with the logits that transformers computes. README.md describes the files."""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.torch
import torch
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

DATA = Path(__file__).resolve().parent / "models"
TOKENS = 24
SHAPE: dict[str, Any] = {"vocab_size": 40, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4,
                         "num_key_value_heads": 2, "num_experts_per_tok": 2, "max_position_embeddings": 64,
                         "bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
MODELS: dict[str, dict[str, Any]] = {
    "mixtral": {"intermediate_size": 12, "num_local_experts": 4, "head_dim": 6},
    "olmoe": {"intermediate_size": 12, "num_experts": 4, "norm_topk_prob": False},
    "qwen2_moe": {"intermediate_size": 20, "moe_intermediate_size": 12, "num_experts": 4, "norm_topk_prob": False,
                  "shared_expert_intermediate_size": 10, "decoder_sparse_step": 2},
    "qwen3_moe": {"intermediate_size": 20, "moe_intermediate_size": 12, "num_experts": 4, "norm_topk_prob": True,
                  "head_dim": 6, "tie_word_embeddings": True},
}

# Without experts; the logits in float64, so that losses can be compared closely.
DENSE: dict[str, dict[str, Any]] = {
    "llama": {"intermediate_size": 20},
    "mistral": {"intermediate_size": 20, "head_dim": 6, "sliding_window": None},
    "qwen2": {"intermediate_size": 20},
    "qwen3": {"intermediate_size": 20, "head_dim": 6, "tie_word_embeddings": True},
}

# Also saved as transformers has them in memory, experts in fused tensors: the whole model, or, where the embedding is the
# output layer, the bare one.
FUSED = {"mixtral": "whole", "qwen3_moe": "bare"}


def make(name: str, seed: int, folder: Path) -> None:
    """Weights of deviation 0.3 and norms around 1: attention and routing far from uniform, no term hidden."""
    dense = name in DENSE
    shape = {key: value for key, value in SHAPE.items() if not (dense and key == "num_experts_per_tok")}
    config = CONFIG_MAPPING[name](**shape, **(DENSE if dense else MODELS)[name])
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").float().eval()
    rng = np.random.Generator(np.random.PCG64(seed))
    with torch.no_grad():
        for key, value in model.named_parameters():
            drawn = torch.from_numpy(rng.standard_normal(tuple(value.shape), dtype=np.float32))
            value.copy_(drawn * 0.1 + 1 if "norm" in key else drawn * 0.3)
    model.save_pretrained(folder, max_shard_size="20KB" if name == "olmoe" else "5GB")
    if name in FUSED:
        module = model if FUSED[name] == "whole" else model.model  # the names of the latter lack "model."
        with tempfile.TemporaryDirectory() as other:
            module.save_pretrained(other, save_original_format=False)
            shutil.copy(Path(other) / "model.safetensors", folder / "fused.safetensors")
    tokens = torch.from_numpy(rng.integers(0, SHAPE["vocab_size"], (1, TOKENS)))
    with torch.no_grad():
        logits = (model.double() if dense else model)(tokens).logits[0].float()
    safetensors.torch.save_file({"tokens": tokens[0].to(torch.int64), "logits": logits.contiguous()},
                                folder / "io.safetensors")
    (folder / "generation_config.json").unlink(missing_ok=True)
    saved = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(saved, indent=2, sort_keys=True) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=DATA)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("names", nargs="*", help="default: all")
    args = parser.parse_args()
    for index, name in enumerate([*MODELS, *DENSE]):
        if args.names and name not in args.names:
            continue
        shutil.rmtree(args.out / name, ignore_errors=True)
        make(name, args.seed + index, args.out / name)


if __name__ == "__main__":
    main()
