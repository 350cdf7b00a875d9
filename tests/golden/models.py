"""The public models: their configuration in Hugging Face's keys, where a layer keeps its MoE block, and the cases."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import numpy as np
from transformers import (
    DeepseekV2Config,
    DeepseekV3Config,
    GptOssConfig,
    Llama4TextConfig,
    MixtralConfig,
    OlmoeConfig,
    PretrainedConfig,
    Qwen2MoeConfig,
    Qwen3MoeConfig,
)

NUM_LAYERS = 4


@dataclass(frozen=True)
class Sizes:
    tokens: int
    hidden: int
    width: int
    experts: int
    topk: int


@dataclass(frozen=True)
class Case:
    name: str
    model: str
    seed: int
    sizes: Sizes
    options: dict[str, Any] = field(default_factory=dict)  # configuration fields beyond the sizes
    layer: int = NUM_LAYERS - 1
    shards: int = 1


class Weights(Enum):
    """Where a block holds the combine weights of its choices."""

    CAST = "the first tensor cast to the input's type"
    ROUTER_PAIR = "the router returns (ids, weights)"
    ROUTER_TABLE = "the router returns a [tokens, experts] table first"


@dataclass(frozen=True)
class Model:
    config: type[PretrainedConfig]
    architecture: str
    block: str  # of model.layers.N
    router: str  # of the block
    experts_key: str
    width_key: str
    weights: Weights
    kept_keys: tuple[str, ...]  # of config.json, beyond those every model has
    draw_options: Callable[[np.random.Generator, Sizes], dict[str, Any]]
    # Standard deviation of a weight matrix times the square root of its fan-in, by the end of its name.
    gains: dict[str, float] = field(default_factory=dict)

    def make_config(self, case: Case) -> PretrainedConfig:
        return self.config(
            architectures=[self.architecture],
            num_hidden_layers=NUM_LAYERS,
            hidden_size=case.sizes.hidden,
            num_experts_per_tok=case.sizes.topk,
            num_attention_heads=1,  # divides any hidden size; attention is not built
            num_key_value_heads=1,
            **{self.experts_key: case.sizes.experts, self.width_key: case.sizes.width},
            **case.options,
        )

    def trimmed_config(self, config: PretrainedConfig) -> dict[str, Any]:
        common = ("architectures", "model_type", "num_hidden_layers", "hidden_size", "hidden_act",
                  "num_experts_per_tok", "transformers_version")
        values = config.to_dict()
        return {key: values[key] for key in (*common, self.experts_key, self.width_key, *self.kept_keys)}


def _dense_width(rng: np.random.Generator, sizes: Sizes) -> int:
    """Width of dense layers: never the experts' own, so that a reader that takes the wrong key fails."""
    return sizes.width + int(rng.integers(1, 8))


def _no_options(_rng: np.random.Generator, _sizes: Sizes) -> dict[str, Any]:
    return {}


def _norm_option(rng: np.random.Generator, sizes: Sizes) -> dict[str, Any]:
    # One choice divided by itself weighs 1, and its router's gradient is nothing but rounding.
    return {"norm_topk_prob": sizes.topk > 1 and bool(rng.integers(2))}


def _qwen2_options(rng: np.random.Generator, sizes: Sizes) -> dict[str, Any]:
    return _qwen3_options(rng, sizes) | {"shared_expert_intermediate_size": _dense_width(rng, sizes)}


def _qwen3_options(rng: np.random.Generator, sizes: Sizes) -> dict[str, Any]:
    return _norm_option(rng, sizes) | {"intermediate_size": _dense_width(rng, sizes)}


def _llama4_options(rng: np.random.Generator, sizes: Sizes) -> dict[str, Any]:
    return {"intermediate_size_mlp": _dense_width(rng, sizes)}


def _group_options(rng: np.random.Generator, sizes: Sizes) -> dict[str, Any]:
    """Groups of at least two experts (DeepSeek-V3 adds the best two), enough of them kept for topk choices."""
    divisors = [n for n in range(1, sizes.experts // 2 + 1) if sizes.experts % n == 0]
    n_group = int(rng.choice(divisors[1:] or divisors))
    fewest = -(-sizes.topk * n_group // sizes.experts)
    topk_group = int(rng.integers(fewest, max(n_group, fewest + 1)))
    return {"n_group": n_group, "topk_group": topk_group}


def _deepseek_v2_options(rng: np.random.Generator, sizes: Sizes) -> dict[str, Any]:
    groups = _group_options(rng, sizes)
    greedy = bool(rng.integers(2))
    method = {"topk_method": "greedy", "n_group": 1, "topk_group": 1} if greedy else {
        "topk_method": "group_limited_greedy", **groups}
    return method | _norm_option(rng, sizes) | {
        "scoring_func": "softmax",
        "routed_scaling_factor": float(rng.choice([1.0, 4.0])),
        "n_shared_experts": int(rng.integers(1, 3)),
        "intermediate_size": _dense_width(rng, sizes),
        "first_k_dense_replace": 1,
    }


def _deepseek_v3_options(rng: np.random.Generator, sizes: Sizes) -> dict[str, Any]:
    return _group_options(rng, sizes) | _norm_option(rng, sizes) | {
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
        "routed_scaling_factor": 2.5,
        "n_shared_experts": int(rng.integers(1, 3)),
        "intermediate_size": _dense_width(rng, sizes),
        "first_k_dense_replace": 1,
    }


_DEEPSEEK_KEYS = ("intermediate_size", "n_shared_experts", "n_group", "topk_group", "topk_method", "scoring_func",
                  "norm_topk_prob", "routed_scaling_factor", "first_k_dense_replace")
_QWEN_KEYS = ("intermediate_size", "norm_topk_prob", "decoder_sparse_step", "mlp_only_layers")

MODELS: dict[str, Model] = {
    "mixtral": Model(
        MixtralConfig, "MixtralForCausalLM", "block_sparse_moe", "gate", "num_local_experts", "intermediate_size",
        Weights.CAST, ("router_jitter_noise",), _no_options),
    "qwen2_moe": Model(
        Qwen2MoeConfig, "Qwen2MoeForCausalLM", "mlp", "gate", "num_experts", "moe_intermediate_size",
        Weights.CAST, (*_QWEN_KEYS, "shared_expert_intermediate_size"), _qwen2_options),
    "qwen3_moe": Model(
        Qwen3MoeConfig, "Qwen3MoeForCausalLM", "mlp", "gate", "num_experts", "moe_intermediate_size",
        Weights.CAST, _QWEN_KEYS, _qwen3_options),
    "olmoe": Model(
        OlmoeConfig, "OlmoeForCausalLM", "mlp", "gate", "num_experts", "intermediate_size",
        Weights.CAST, ("norm_topk_prob",), _norm_option),
    "deepseek_v2": Model(
        DeepseekV2Config, "DeepseekV2ForCausalLM", "mlp", "gate", "n_routed_experts", "moe_intermediate_size",
        Weights.ROUTER_PAIR, _DEEPSEEK_KEYS, _deepseek_v2_options),
    "deepseek_v3": Model(
        DeepseekV3Config, "DeepseekV3ForCausalLM", "mlp", "gate", "n_routed_experts", "moe_intermediate_size",
        Weights.ROUTER_PAIR, _DEEPSEEK_KEYS, _deepseek_v3_options),
    # Gate and up projections have deviation 4, so that several of a hundred pass the clamp at 7.
    "gpt_oss": Model(
        GptOssConfig, "GptOssForCausalLM", "mlp", "router", "num_local_experts", "intermediate_size",
        Weights.ROUTER_TABLE, ("swiglu_limit",), lambda _rng, _sizes: {"swiglu_limit": 7.0},
        {"gate_up_proj": 4.0, "down_proj": 0.1}),
    "llama4": Model(
        Llama4TextConfig, "Llama4ForCausalLM", "feed_forward", "router", "num_local_experts", "intermediate_size",
        Weights.ROUTER_TABLE, ("intermediate_size_mlp", "interleave_moe_layer_step", "moe_layers"),
        _llama4_options),
}


def _deepseek(n_group: int, topk_group: int, scaling: float, shared: int, norm: bool, **more: Any) -> dict[str, Any]:
    return {"n_group": n_group, "topk_group": topk_group, "routed_scaling_factor": scaling,
            "n_shared_experts": shared, "norm_topk_prob": norm, "intermediate_size": 21,
            "first_k_dense_replace": 1, **more}


_GREEDY = {"topk_method": "greedy", "scoring_func": "softmax"}
_GROUP_LIMITED = {"topk_method": "group_limited_greedy", "scoring_func": "softmax"}
_NO_AUX = {"topk_method": "noaux_tc", "scoring_func": "sigmoid"}

# Sizes(tokens, hidden, width, experts, topk)
COMMITTED: tuple[Case, ...] = (
    Case("mixtral-1", "mixtral", 1, Sizes(11, 13, 7, 5, 2), layer=0),
    Case("mixtral-2", "mixtral", 2, Sizes(17, 20, 10, 8, 3)),
    Case("qwen2_moe-1", "qwen2_moe", 3, Sizes(11, 13, 6, 7, 3),
         {"norm_topk_prob": False, "shared_expert_intermediate_size": 9, "intermediate_size": 15}, layer=2),
    Case("qwen2_moe-2", "qwen2_moe", 4, Sizes(17, 24, 5, 6, 2),
         {"norm_topk_prob": True, "shared_expert_intermediate_size": 11, "intermediate_size": 16,
          "decoder_sparse_step": 2, "mlp_only_layers": [1]}),
    Case("qwen3_moe-1", "qwen3_moe", 5, Sizes(11, 15, 6, 9, 4),
         {"norm_topk_prob": True, "intermediate_size": 17}, layer=1, shards=2),
    Case("qwen3_moe-2", "qwen3_moe", 6, Sizes(17, 20, 9, 5, 1), {"norm_topk_prob": False, "intermediate_size": 18}),
    Case("olmoe-1", "olmoe", 7, Sizes(11, 13, 5, 9, 4), {"norm_topk_prob": False}),
    Case("olmoe-2", "olmoe", 8, Sizes(17, 20, 11, 6, 2), {"norm_topk_prob": True}, layer=0),
    Case("deepseek_v2-1", "deepseek_v2", 9, Sizes(11, 13, 6, 7, 3), _deepseek(1, 1, 1.0, 2, False, **_GREEDY), layer=1),
    Case("deepseek_v2-2", "deepseek_v2", 10, Sizes(17, 20, 7, 9, 4), _deepseek(3, 2, 4.0, 1, False, **_GROUP_LIMITED)),
    Case("deepseek_v2-3", "deepseek_v2", 11, Sizes(11, 15, 5, 8, 3), _deepseek(4, 2, 4.0, 2, True, **_GROUP_LIMITED)),
    Case("deepseek_v3-1", "deepseek_v3", 12, Sizes(11, 13, 6, 8, 3), _deepseek(4, 2, 2.5, 1, True, **_NO_AUX), layer=1),
    Case("deepseek_v3-2", "deepseek_v3", 13, Sizes(17, 20, 7, 9, 4), _deepseek(3, 2, 2.5, 2, False, **_NO_AUX)),
    Case("gpt_oss-1", "gpt_oss", 14, Sizes(11, 13, 7, 5, 2), {"swiglu_limit": 7.0}),
    Case("gpt_oss-2", "gpt_oss", 15, Sizes(17, 20, 9, 8, 4), {"swiglu_limit": 7.0}, layer=0),
    Case("llama4-1", "llama4", 16, Sizes(11, 13, 6, 9, 1), {"intermediate_size_mlp": 14}, layer=2),
    Case("llama4-2", "llama4", 17, Sizes(17, 20, 7, 5, 1),
         {"intermediate_size_mlp": 19, "interleave_moe_layer_step": 2}),
    Case("llama4-3", "llama4", 18, Sizes(11, 15, 5, 6, 2), {"intermediate_size_mlp": 16}),
)


def random_case(model: str, number: int, seed: int, fixed: dict[str, int]) -> Case:
    """A case drawn from (seed, model, number); sizes named in `fixed` are kept as they are."""
    rng = np.random.default_rng([seed, number, *model.encode()])
    least_experts = max(4, fixed.get("topk", 1))
    ranges = {"tokens": (1, 33), "hidden": (5, 33), "width": (3, 17), "experts": (least_experts, least_experts + 9)}
    drawn = {key: int(rng.integers(*bounds)) for key, bounds in ranges.items()} | fixed
    # Models that always divide by the sum of the weights need two choices (see _norm_option).
    fewest = 2 if model in ("mixtral", "gpt_oss") else 1
    most = min(4, drawn["experts"])
    sizes = Sizes(**({"topk": int(rng.integers(fewest, most + 1))} | drawn))
    options = MODELS[model].draw_options(rng, sizes)
    return Case(f"{model}-{number}", model, seed, sizes, options, shards=int(rng.integers(1, 3)))
