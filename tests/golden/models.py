"""The public models: what their configurations call things, where a layer keeps its router, and the cases."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from transformers import PretrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

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


@dataclass(frozen=True)
class Model:
    """Names of configuration keys, as transformers saves them; "" = the model has none."""

    model_type: str
    experts: str = "num_experts"
    width: str = "moe_intermediate_size"
    topk: str = "num_experts_per_tok"
    layers: str = "num_hidden_layers"
    block: str = "mlp"  # of model.layers.N, as a module
    router: str = "gate"  # of the block
    norm: str = ""
    groups: tuple[str, str] | None = None
    scaling: str = ""
    shared: str = ""  # a number of experts' widths
    shared_width: str = ""
    dense_width: str = ""
    fixed: dict[str, Any] = field(default_factory=dict)  # options that every case has
    only_topk: int = 0  # the number of choices of a model that has no other; 0 = any
    chooses_several: bool = False  # two at least: most always divide by the sum of the weights, see draw_options
    transposed: bool = False  # stacked experts are [expert, in, out], not [expert, out, in]
    # By the end of a name: standard deviation of a weight matrix times the square root of its fan-in; for a bias of the
    # selection, a factor.
    gains: dict[str, float] = field(default_factory=dict)

    def make_config(self, case: Case) -> PretrainedConfig:
        return CONFIG_MAPPING[self.model_type](**{
            self.layers: NUM_LAYERS,
            "hidden_size": case.sizes.hidden,
            self.topk: case.sizes.topk,
            "num_attention_heads": 1,  # divides any hidden size; attention is not built
            "num_key_value_heads": 1,
            self.experts: case.sizes.experts,
            self.width: case.sizes.width,
            **case.options,
        })

    def trimmed(self, config: PretrainedConfig, *more: str) -> dict[str, Any]:
        """What of a configuration bears on the MoE block, as config.json has it."""
        kept = {"model_type", "transformers_version", "hidden_size", self.layers, self.topk, self.experts, self.width,
                self.norm, *(self.groups or ()), self.scaling, self.shared, self.shared_width, *KEPT, *more}
        return {key: value for key, value in config.to_dict().items() if key in kept and value is not None}

    def draw_options(self, rng: np.random.Generator, sizes: Sizes) -> dict[str, Any]:
        options: dict[str, Any] = dict(self.fixed)
        if self.groups:
            options |= zip(self.groups, _draw_groups(rng, sizes))
        if self.norm:  # One choice divided by itself weighs 1, and its router's gradient is nothing but rounding.
            options[self.norm] = sizes.topk > 1 and bool(rng.integers(2))
        if self.scaling:
            options[self.scaling] = float(rng.choice([1.0, 2.5]))
        if self.shared:
            options[self.shared] = int(rng.integers(1, 3))
        for key in (self.shared_width, self.dense_width):
            if key:  # Never the experts' own width, so that a reader that takes the wrong key fails.
                options[key] = sizes.width + int(rng.integers(1, 8))
        if self.model_type == "deepseek_v2" and rng.integers(2):
            options |= {"topk_method": "greedy", "n_group": 1, "topk_group": 1}
        return options


# Keys that are kept of every configuration that has them, though no case sets them.
KEPT = ("hidden_act", "router_jitter_noise", "decoder_sparse_step", "mlp_only_layers", "mlp_layer_types",
        "first_k_dense_replace", "num_dense_layers", "interleave_moe_layer_step", "moe_layers", "expert_layer_period",
        "expert_layer_offset", "moe_layer_start_index", "moe_layer_end_index", "moe_layer_interval", "moe_norm_min",
        "use_expert_bias", "swiglu_alpha", "swiglu_limit", "zero_expert_num")


def _draw_groups(rng: np.random.Generator, sizes: Sizes) -> tuple[int, int]:
    """Groups of at least two experts (DeepSeek-V3 adds the best two), enough of them kept for topk choices."""
    divisors = [n for n in range(1, sizes.experts // 2 + 1) if sizes.experts % n == 0]
    n_group = int(rng.choice(divisors[1:] or divisors))
    fewest = -(-sizes.topk * n_group // sizes.experts)
    return n_group, int(rng.integers(fewest, max(n_group, fewest + 1)))


def _deepseek(model_type: str, **more: Any) -> Model:
    """Keys and modules of DeepSeek-V3, of which most models with sigmoid scores have all but a few."""
    return Model(model_type, **{
        "experts": "n_routed_experts", "norm": "norm_topk_prob", "groups": ("n_group", "topk_group"),
        "scaling": "routed_scaling_factor", "shared": "n_shared_experts", "dense_width": "intermediate_size", **more})


_LOCAL = {"experts": "num_local_experts", "width": "intermediate_size"}
_KIMI = {"experts": "num_experts", "topk": "num_experts_per_token", "norm": "moe_renormalize",
         "groups": ("num_expert_group", "topk_group"), "shared": "num_shared_experts"}
_SHARED_EXPERT = {"shared_width": "shared_expert_intermediate_size"}

MODELS: dict[str, Model] = {model.model_type.removesuffix("_text"): model for model in (
    Model("mixtral", **_LOCAL, chooses_several=True),
    Model("minimax", **_LOCAL, chooses_several=True),
    Model("granitemoe", **_LOCAL, block="block_sparse_moe", router="router", chooses_several=True),
    # Phi-3.5-MoE has 0.01; of random logits few are that near to the largest.
    Model("phimoe", **_LOCAL, router="router", only_topk=2, fixed={"router_jitter_noise": 0.2}),
    Model("qwen2_moe", norm="norm_topk_prob", dense_width="intermediate_size", **_SHARED_EXPERT),
    Model("qwen3_moe", experts="num_local_experts", norm="norm_topk_prob", dense_width="intermediate_size"),
    Model("qwen3_next", norm="norm_topk_prob", dense_width="intermediate_size", **_SHARED_EXPERT),
    Model("qwen3_5_moe_text", chooses_several=True, **_SHARED_EXPERT),
    Model("olmoe", width="intermediate_size", norm="norm_topk_prob"),
    Model("flex_olmo", width="intermediate_size", norm="norm_topk_prob"),
    Model("jamba", width="intermediate_size", block="feed_forward", router="router"),
    Model("hunyuan_v1_moe", width="intermediate_size", topk="moe_topk", fixed={"head_dim": 8}, chooses_several=True),
    Model("ernie4_5_moe", experts="moe_num_experts", topk="moe_k", shared="moe_num_shared_experts",
          dense_width="intermediate_size", chooses_several=True),
    Model("longcat_flash", experts="n_routed_experts", width="expert_ffn_hidden_size", topk="moe_topk",
          layers="num_layers", router="router", scaling="routed_scaling_factor", dense_width="ffn_hidden_size",
          fixed={"zero_expert_num": 2}, chooses_several=True),  # transformers' code fails with one choice
    _deepseek("deepseek_v2", fixed={"topk_method": "group_limited_greedy"}),
    _deepseek("deepseek_v3"),
    _deepseek("deepseek_v32"),
    _deepseek("glm4_moe"),
    _deepseek("glm4_moe_lite"),
    _deepseek("glm_moe_dsa"),
    _deepseek("dots1"),
    _deepseek("solar_open", dense_width=""),
    _deepseek("exaone_moe", experts="num_experts", shared="num_shared_experts"),
    _deepseek("kimi_linear", **_KIMI),
    _deepseek("bailing_hybrid", **_KIMI),
    _deepseek("afmoe", experts="num_experts", router="router", norm="", groups=None, scaling="route_scale",
              shared="num_shared_experts", chooses_several=True),
    Model("minimax_m2", **_LOCAL, chooses_several=True),
    # Logits of deviation 5 and large biases, which select small scores: there the 1e-6 in the divisor shows.
    Model("lfm2_moe", block="feed_forward", norm="norm_topk_prob", scaling="routed_scaling_factor",
          dense_width="intermediate_size", fixed={"layer_types": ["conv"] * NUM_LAYERS},
          gains={"gate.weight": 5.0, "expert_bias": 4.0}),
    # Gate and up projections have deviation 4, so that several of a hundred pass the clamp.
    Model("gpt_oss", **_LOCAL, router="router", fixed={"swiglu_limit": 5.0, "swiglu_alpha": 1.3}, chooses_several=True,
          transposed=True, gains={"gate_up_proj": 4.0, "down_proj": 0.1}),
    Model("llama4_text", **_LOCAL, block="feed_forward", router="router", dense_width="intermediate_size_mlp",
          transposed=True),
)}


def _options(n_group: int, topk_group: int, scaling: float, shared: int, norm: bool, **more: Any) -> dict[str, Any]:
    return {"n_group": n_group, "topk_group": topk_group, "routed_scaling_factor": scaling,
            "n_shared_experts": shared, "norm_topk_prob": norm, "intermediate_size": 21,
            "first_k_dense_replace": 1, **more}


_GREEDY = {"topk_method": "greedy", "scoring_func": "softmax"}
_GROUP_LIMITED = {"topk_method": "group_limited_greedy", "scoring_func": "softmax"}
_NO_AUX = {"topk_method": "noaux_tc", "scoring_func": "sigmoid"}

# Sizes(tokens, hidden, width, experts, topk)
_CHOSEN: tuple[Case, ...] = (
    Case("mixtral-1", "mixtral", 1, Sizes(11, 13, 7, 5, 2), layer=0),
    Case("mixtral-2", "mixtral", 2, Sizes(17, 20, 10, 8, 3)),
    Case("mixtral-3", "mixtral", 33, Sizes(11, 9, 6, 5, 2), {"hidden_act": "gelu_pytorch_tanh"}, layer=0),
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
    Case("deepseek_v2-1", "deepseek_v2", 9, Sizes(11, 13, 6, 7, 3), _options(1, 1, 1.0, 2, False, **_GREEDY), layer=1),
    Case("deepseek_v2-2", "deepseek_v2", 10, Sizes(17, 20, 7, 9, 4), _options(3, 2, 4.0, 1, False, **_GROUP_LIMITED)),
    Case("deepseek_v2-3", "deepseek_v2", 11, Sizes(11, 15, 5, 8, 3), _options(4, 2, 4.0, 2, True, **_GROUP_LIMITED)),
    Case("deepseek_v3-1", "deepseek_v3", 12, Sizes(11, 13, 6, 8, 3), _options(4, 2, 2.5, 1, True, **_NO_AUX), layer=1),
    Case("deepseek_v3-2", "deepseek_v3", 13, Sizes(17, 20, 7, 9, 4), _options(3, 2, 2.5, 2, False, **_NO_AUX)),
    Case("gpt_oss-1", "gpt_oss", 14, Sizes(11, 13, 7, 5, 2)),
    Case("gpt_oss-2", "gpt_oss", 15, Sizes(17, 20, 9, 8, 4), {"swiglu_limit": 5.0, "swiglu_alpha": 1.3}, layer=0),
    Case("llama4-1", "llama4", 16, Sizes(11, 13, 6, 9, 1), {"intermediate_size_mlp": 14}, layer=2),
    Case("llama4-2", "llama4", 17, Sizes(17, 20, 7, 5, 1),
         {"intermediate_size_mlp": 19, "interleave_moe_layer_step": 2}),
    Case("llama4-3", "llama4", 18, Sizes(11, 15, 5, 6, 2), {"intermediate_size_mlp": 16}),
    Case("lfm2_moe-1", "lfm2_moe", 32, Sizes(17, 9, 5, 6, 2),
         {"norm_topk_prob": True, "routed_scaling_factor": 1.5, "layer_types": ["conv"] * NUM_LAYERS,
          "intermediate_size": 13, "num_dense_layers": 1}, layer=1),
)


def random_case(model: str, number: int, seed: int, fixed: dict[str, int]) -> Case:
    """A case drawn from (seed, model, number); sizes named in `fixed` are kept as they are."""
    rng = np.random.default_rng([seed, number, *model.encode()])
    if MODELS[model].only_topk:
        fixed = fixed | {"topk": MODELS[model].only_topk}
    least_experts = max(4, fixed.get("topk", 1))
    ranges = {"tokens": (1, 33), "hidden": (5, 33), "width": (3, 17), "experts": (least_experts, least_experts + 9)}
    drawn = {key: int(rng.integers(*bounds)) for key, bounds in ranges.items()} | fixed
    fewest = 2 if MODELS[model].chooses_several else 1
    most = min(4, drawn["experts"])
    sizes = Sizes(**({"topk": int(rng.integers(fewest, most + 1))} | drawn))
    options = MODELS[model].draw_options(rng, sizes)
    return Case(f"{model}-{number}", model, seed, sizes, options, shards=int(rng.integers(1, 3)))


def _small_case(name: str) -> Case:
    """Its options differ from the defaults, so that a reader that takes the wrong key fails."""
    model = MODELS[name]
    case = random_case(name, 1, seed=22, fixed={"tokens": 7, "hidden": 8, "width": 5, "experts": 6, "topk": 2})
    defaults = CONFIG_MAPPING[model.model_type]().to_dict()
    options = dict(case.options)
    if model.norm:
        options[model.norm] = not defaults[model.norm]
    if model.scaling:
        options[model.scaling] = 1.5
    if model.shared:
        options[model.shared] = 3 - (defaults[model.shared] or 0)
    return Case(case.name, name, case.seed, case.sizes, options)


# The chosen ones, and one of every other model.
COMMITTED: tuple[Case, ...] = _CHOSEN + tuple(
    _small_case(name) for name in MODELS if name not in {case.model for case in _CHOSEN})
