#include "moe/plan/memory.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>

#include "kernels/activation/activation_kind.h"
#include "moe/plan/model_cost.h"

namespace moe::plan {

namespace {

// Sizes as doubles: products of what a user asks for may not fit 64 bits.
struct Sizes {
  explicit Sizes(const MemoryShape& shape)
      : tokens(static_cast<double>(shape.tokens)),
        hidden(static_cast<double>(shape.model.hidden_size)),
        etp(shape.trainer.session.mesh.expert_tensor),
        ffn(static_cast<double>(shape.model.moe.ffn_hidden_size)),
        experts(shape.model.moe.router.num_experts),
        top_k(shape.model.moe.router.top_k),
        ep(shape.trainer.session.mesh.expert),
        tp(shape.trainer.session.mesh.tensor),
        element(static_cast<double>(SizeOf(shape.trainer.dtype))),
        gated(IsGated(shape.model.moe.activation) ? 2 : 1),
        skew(shape.row_skew) {}

  double local_experts() const { return std::ceil(experts / ep); }
  // Rows of the rank with the most.
  double expert_rows() const {
    const double most = own_tokens() * ep * std::min(top_k, local_experts());
    return std::min(most, own_tokens() * top_k * std::max(skew, ep * local_experts() / experts));
  }
  // Tokens that are a rank's own: ranks of a tensor group divide them.
  double own_tokens() const { return tokens / tp; }
  // Rows that a rank sends: a token goes once to each rank that holds some of its K experts.
  double sent_rows() const { return own_tokens() * RanksOfToken(experts, ep, top_k); }

  const double tokens, hidden, etp, ffn, experts, top_k, ep, tp, element, gated, skew;
};

// The part of a pipeline that its rank with the most holds: all of it with one stage.
struct StageShare {
  explicit StageShare(const MemoryShape& shape) {
    const PipelineShape pipeline = PipelineOf(shape.trainer);
    stages = pipeline.stages;
    chunks = pipeline.chunks;
    for (int part = 0, parts = pipeline.parts(); part < parts; ++part) {
      const int end = shape.model.first_layer(part + 1, parts);
      layers = std::max(layers, end - shape.model.first_layer(part, parts));
    }
    const int ranks = std::max(1, shape.ranks / stages / shape.trainer.session.mesh.tensor);
    in_flight = MostInFlight(pipeline, 0,
                             PaddedRounds(pipeline, RoundsOf(ranks, shape.trainer.micro_batches)));
  }
  int stages = 1, chunks = 1;
  int layers = 0;         // of the chunk with the most
  int64_t in_flight = 1;  // micro-batches, each in a chunk
};

// Elements of the matrices that ranks of a tensor group share, of the whole model.
double CutParameters(const MemoryShape& shape, const Sizes& s) {
  const lm::TransformerConfig& model = shape.model;
  const double q = static_cast<double>(model.q_cols()), kv = static_cast<double>(model.kv_cols());
  const int mixtures = model.num_layers / model.moe_layer_freq;
  const double widths = mixtures * static_cast<double>(model.moe.shared_expert_ffn_hidden_size) +
                        (model.num_layers - mixtures) * static_cast<double>(model.dense_width());
  const double output = model.tied_embeddings ? 0 : static_cast<double>(model.vocab_size);
  return s.hidden * (model.num_layers * 2 * (q + kv) + (s.gated + 1) * widths + output);
}

// Buffers in which partials of a round add up where sums are in parts, as RoundBuffersOf says; a
// bucket closes, in the mean, half a matrix after its size. ranks: of a stage.
double RoundBytes(const MemoryShape& shape, const Sizes& s, double shared, double experts,
                  int ranks) {
  const TrainerOptions& trainer = shape.trainer;
  if (PlacementOf(trainer.zero).sums == Holding::kWhole) return 0;
  const auto sum_bytes = static_cast<double>(SumBytesOfElement(trainer.session.numerics));
  const double bucket = static_cast<double>(trainer.bucket_bytes) / sum_bytes;
  double buffers = 0, elements = 0;
  const auto add = [&](double group, int holders) {
    if (holders < 2 || group == 0) return;
    buffers += group > bucket ? 2 : 1;
    elements = std::max(elements, std::min(group, bucket + s.gated * s.hidden * s.ffn / 2));
  };
  add(shared, ranks);
  add(experts, ranks / trainer.session.mesh.expert / trainer.session.mesh.expert_tensor);
  return buffers * elements * sum_bytes;
}

// Two pages of optimiser state in a file: what a rank keeps of a bucket, but at most page_bytes.
double PageBytes(const MemoryShape& shape, const Sizes& s, double shared, double experts,
                 int of_stage) {
  const TrainerOptions& trainer = shape.trainer;
  const StatePlacement placement = PlacementOf(trainer.zero, trainer.offload.optimizer);
  if (placement.tier != StateTier::kFile) return 0;
  const auto sum_bytes = static_cast<double>(SumBytesOfElement(trainer.session.numerics));
  const double bucket =
      static_cast<double>(trainer.bucket_bytes) / sum_bytes + s.gated * s.hidden * s.ffn / 2;
  const auto kept = [&](double group, int ranks) {
    return std::min(group, bucket) / (placement.optimizer == Holding::kPart ? ranks : 1);
  };
  const double elements = std::max(
      kept(shared, of_stage),
      kept(experts, of_stage / trainer.session.mesh.expert / trainer.session.mesh.expert_tensor));
  const auto element_bytes = static_cast<double>(OptimizerBytesOfElement(trainer.dtype));
  return 2 *
         std::min(static_cast<double>(trainer.offload.file.page_bytes), element_bytes * elements);
}

void AddState(const MemoryShape& shape, const Sizes& s, MemoryEstimate& estimate) {
  const MoeLayerConfig& moe = shape.model.moe;
  const double biases = moe.projection_biases ? s.gated * s.ffn + s.hidden : 0;
  const double expert = (s.gated + 1) * s.hidden * s.ffn + biases;
  const StageShare stage(shape);
  const double all = shape.model.num_layers / shape.model.moe_layer_freq;
  const double layers = std::min<double>(
      all, std::ceil(1.0 * stage.layers / shape.model.moe_layer_freq) * stage.chunks);
  double shared = static_cast<double>(shape.parameters_total) - all * s.experts * expert;
  double of_ends = 0;  // that both ends of a pipeline hold
  if (stage.stages > 1) {
    // Embedding and output layer are at the two ends.
    const double end = static_cast<double>(shape.model.vocab_size * shape.model.hidden_size);
    const double layers_alone = shared - (shape.model.tied_embeddings ? 1 : 2) * end;
    shared = layers_alone * stage.layers * stage.chunks / shape.model.num_layers;
    (shape.model.tied_embeddings ? of_ends : shared) += end;
  }
  const double experts = layers * std::min(s.experts, s.local_experts()) * expert / s.etp;
  const TrainerOptions& trainer = shape.trainer;
  const StatePlacement placement = PlacementOf(trainer.zero, trainer.offload.optimizer);
  const bool in_file = placement.tier == StateTier::kFile;
  const auto add = [&](double elements, int holders, const StatePlacement& of) {
    const auto kept = [&](double bytes, Holding holding) {
      return elements * (holding == Holding::kPart ? bytes / holders : bytes);
    };
    const double weights = kept(s.element, of.weights);
    const double sums =
        kept(static_cast<double>(SumBytesOfElement(trainer.session.numerics)), of.sums);
    const double moments = shape.trained ? 0 : elements * 8;
    estimate.weight_bytes += weights;
    estimate.gradient_bytes += sums;
    estimate.optimizer_bytes +=
        elements * BytesOfElement(of, trainer.dtype, trainer.session.numerics, holders) - weights -
        sums - moments;
    // Of masters and moments.
    if (shape.saves && !in_file) estimate.buffer_bytes += elements * 12.0 / holders;
  };
  const int ranks = shape.ranks / stage.stages;
  const int replicas = ranks / trainer.session.mesh.expert / trainer.session.mesh.expert_tensor;
  const int tp = trainer.session.mesh.tensor;
  const double of_stage = static_cast<double>(stage.layers * stage.chunks) / shape.model.num_layers;
  const double cut = tp > 1 ? CutParameters(shape, s) * of_stage : 0;
  const double held = shared - cut + cut / tp;
  add(shared - cut, ranks, placement);
  add(cut / tp, ranks / tp, placement);
  add(experts, replicas, placement);
  add(of_ends, 2 * ranks, OfEnds(placement));
  estimate.buffer_bytes +=
      RoundBytes(shape, s, held, experts, ranks) + PageBytes(shape, s, held, experts, ranks);
  if (placement.weights == Holding::kPart && ranks > 1) {
    // Two blocks of the largest module: the embedding or output layer, or a layer.
    const double table = static_cast<double>(shape.model.vocab_size) * s.hidden;
    const double in_parts = stage.stages > 1 ? (shape.model.tied_embeddings ? 0 : 1)
                                             : (shape.model.tied_embeddings ? 1 : 2);
    const double tables = in_parts * table;
    const double layer = (shared - tables) / (stage.layers * stage.chunks) / tp +
                         (replicas > 1 ? experts / std::max(1.0, layers) : 0);
    estimate.buffer_bytes += 2 * s.element * std::max(std::min(tables, table), layer);
  }
}

// Bytes of the workspace that the forward pass of an MoE layer takes, all kept for backward.
double MoeForward(const MemoryShape& shape, const Sizes& s) {
  const double rows = s.expert_rows();
  const double slots = s.own_tokens() * s.top_k;
  const double logits = s.tokens * shape.model.moe.router.num_outputs();
  // logits, scores and the gradient of the losses; ids, weights and offsets; the plan's indices.
  const double routing = 4 * 3 * logits + 16 * s.tokens * s.top_k + 24 * s.tokens;
  const double plan = 16 * (rows + slots);
  // Elements into the experts, of all ranks that share them, and those that came home.
  const double exchanged = (s.etp * rows + slots) * s.hidden;
  const double experts = rows * (s.gated + 1) * s.ffn;
  const double width = static_cast<double>(shape.model.moe.shared_expert_ffn_hidden_size) / s.tp;
  const double shared =
      width > 0 ? s.tokens * (s.gated + 1) * width + s.own_tokens() * s.hidden : 0;
  return routing + plan + s.element * (exchanged + experts + shared);
}

// Gradients of rows out of the experts and into them, of all ranks that share them; between ranks
// also those at home and what is sent and received, each way. Rows are sent home after the
// gradients of activations. scratch: bytes of products.
double MoeBackward(const Sizes& s, double scratch) {
  const double rows = s.expert_rows();
  double elements = (s.etp > 1 ? 2 + s.etp : 2) * rows * s.hidden;
  if (s.ep > 1) elements += (2 * s.sent_rows() + s.own_tokens() * s.top_k) * s.hidden;
  const double returned = s.ep > 1 ? rows * s.hidden : 0;
  return s.element * (elements + std::max(rows * s.ffn, returned)) + scratch;
}

// Packing buffers of all threads, of products of few rows, whose panels are the widest: half a MiB
// for each, and one for its sums at each level of a tree that a panel of 128 terms does not end.
double ProductScratch(const MemoryShape& shape) {
  const SessionOptions& session = shape.trainer.session;
  const int64_t panels =
      std::clamp<int64_t>(shape.model.hidden_size / 128, 1, session.tensor_leaves);
  const auto levels = static_cast<int>(std::bit_width(static_cast<uint64_t>(panels)));
  return session.threads * (0.5 + levels) * 0x1p20;
}

// Elements of q, k and v of a token; with a norm of q and k also what it makes of these.
double ProjectedColumns(const lm::TransformerConfig& model) {
  const bool normed = model.qk_norm != lm::QkNorm::kNone;
  const double heads = model.num_attention_heads, kv_heads = model.key_value_heads();
  const double columns = heads + 2 * kv_heads + (normed ? heads + kv_heads : 0);
  return columns * static_cast<double>(model.head_dim());
}

double QueryColumns(const lm::TransformerConfig& model) {
  return model.num_attention_heads * static_cast<double>(model.head_dim());
}

// Attention keeps norm, q, k, v and output; the feed-forward network its norm; the residual stream
// is kept twice a layer.
double BlockForward(const lm::TransformerConfig& model, const Sizes& s) {
  const double heads = (ProjectedColumns(model) + QueryColumns(model)) / s.tp;
  return s.element * (s.own_tokens() * 4 * s.hidden + s.tokens * heads) +
         4 * (s.tokens * model.num_attention_heads / s.tp + 2 * s.own_tokens());
}

double DenseForward(const MemoryShape& shape, const Sizes& s) {
  const auto width = static_cast<double>(shape.model.dense_width());
  return s.element * s.tokens * (s.gated + 1) * width / s.tp;
}

// Elements of a layer that Recompute::kActivations makes again: outputs of norms, and of activation
// functions.
double ActivationsOf(const MemoryShape& shape, const Sizes& s, bool mixture) {
  const lm::TransformerConfig& model = shape.model;
  const bool normed = model.qk_norm != lm::QkNorm::kNone;
  const double heads = normed ? static_cast<double>(model.qk_cols()) / s.tp : 0;
  const auto width =
      static_cast<double>(mixture ? model.moe.shared_expert_ffn_hidden_size : model.dense_width());
  return s.own_tokens() * 2 * s.hidden + s.tokens * (heads + width / s.tp) +
         (mixture ? s.expert_rows() * s.ffn : 0);
}

double Workspace(const MemoryShape& shape, const Sizes& s) {
  const double scratch = ProductScratch(shape);
  if (!shape.trained) return MoeForward(shape, s) + MoeBackward(s, scratch);
  const lm::TransformerConfig& model = shape.model;
  const StageShare stage(shape);
  const int layers = stage.layers;
  const int over = stage.stages > 1 ? model.moe_layer_freq - 1 : 0;  // a part may begin with one
  const int moe_layers = (layers + over) / model.moe_layer_freq;
  const double row = s.element * s.own_tokens() * s.hidden;
  const double all_rows = s.tp > 1 ? s.element * s.tokens * s.hidden : 0;  // gathered, scratch
  const auto in_flight = static_cast<double>(stage.in_flight);
  const ScheduleKind schedule = PipelineOf(shape.trainer).schedule;
  const bool zero_bubble = schedule == ScheduleKind::kZeroBubbleH1;
  const bool overlaps = schedule == ScheduleKind::k1F1BOverlap;
  double kept = in_flight * (layers * BlockForward(model, s) + moe_layers * MoeForward(shape, s) +
                             (layers - moe_layers) * DenseForward(shape, s));
  if (zero_bubble) {
    // What weight gradients read of a backward's scratch.
    kept += in_flight * s.element *
            (layers * s.tokens * (s.hidden + ProjectedColumns(model) / s.tp) +
             moe_layers * s.expert_rows() * s.hidden);
    kept += in_flight * layers * all_rows;
  }
  double again = 0;
  if (model.recompute == Recompute::kActivations) {
    const double mixture = ActivationsOf(shape, s, true), dense = ActivationsOf(shape, s, false);
    again = s.element * std::max(moe_layers > 0 ? mixture : 0, moe_layers < layers ? dense : 0);
    // Weight gradients that wait have copies.
    if (!zero_bubble) {
      kept -= in_flight * s.element * (moe_layers * mixture + (layers - moe_layers) * dense);
    }
  }
  if (model.recompute == Recompute::kLayer) {
    // Inputs of all layers, and all of the layer that keeps most, in each pass that runs.
    const double most = std::max(moe_layers > 0 ? MoeForward(shape, s) : 0,
                                 moe_layers < layers ? DenseForward(shape, s) : 0);
    const double layer = BlockForward(model, s) + most + row;
    kept = std::min(kept, in_flight * layers * row + (overlaps ? 2 : 1) * layer);
  }
  // Gradients of a layer's rows; between stages also messages on their way.
  const double residual = (stage.stages > 1 ? 3 : 2) * row;
  const double attention =
      s.element * (s.tokens * ProjectedColumns(model) / s.tp +
                   std::max(s.own_tokens() * s.hidden, s.tokens * QueryColumns(model) / s.tp)) +
      all_rows;
  // Of all logits of its rows a rank of several has a copy, and what it received.
  const double outputs = static_cast<double>(model.vocab_size) / s.tp;
  const bool shares_outputs = s.tp > 1 && !model.tied_embeddings;
  const double logits = 4 * s.tokens * outputs * (shares_outputs ? 3 : 1) + all_rows;
  // Sums of shared products before they are sent, and those that come.
  const double sums = (s.tp > 1 ? 4 * s.tokens * s.hidden * 2 : 0) +
                      (s.etp > 1 ? 4 * s.expert_rows() * s.hidden * (2 * s.etp + 1) : 0);
  // A forward and a backward that run together have scratch of their own.
  const double beside = overlaps ? attention + scratch : 0;
  return kept + again + residual + sums + beside +
         std::max({MoeBackward(s, scratch) + 2 * all_rows, attention + scratch, logits + scratch});
}

}  // namespace

MemoryShape ShapeOfTraining(const lm::TrainConfig& config, int ranks) {
  return {.model = config.model,
          .trainer = config.trainer,
          .parameters_total = SizeOf(config.model).total,
          .tokens = config.micro_batch_size * config.sequence_length,
          .ranks = ranks,
          .saves = !config.checkpoints.folder.empty()};
}

MemoryEstimate EstimateMemory(const MemoryShape& shape) {
  const Sizes s(shape);
  const double activations = Workspace(shape, s);
  double workspace = 1.5 * activations;
  // Tokens, their gradient, their outputs, and those of the first call: six times [T, H].
  if (!shape.trained) workspace += 6 * s.element * s.tokens * s.hidden;
  MemoryEstimate estimate = {.activation_bytes = activations, .workspace_bytes = workspace};
  AddState(shape, s, estimate);
  return estimate;
}

}  // namespace moe::plan
