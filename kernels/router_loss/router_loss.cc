#include "kernels/router_loss/router_loss.h"

#include <algorithm>
#include <cmath>

#include <absl/container/inlined_vector.h>
#include <absl/strings/str_cat.h>
#include <absl/strings/string_view.h>

#include "kernels/base/device_arrays.h"
#include "kernels/base/fixed_dot.h"
#include "kernels/base/run_op.h"
#include "kernels/base/status_macros.h"
#include "kernels/router_loss/router_loss_op.h"

namespace moe::router_loss {
namespace {

// f(block, its first token, its end).
template <typename Function>
void ForBlocks(const TokenBlocks& blocks, ThreadPool& threads, Function f) {
  threads.For(blocks.blocks, 1, [&](int64_t first, int64_t last) {
    for (int64_t b = first; b < last; ++b) f(b, blocks.begin[b], blocks.begin[b + 1]);
  });
}

void AddParts(const Fold& fold) {
  for (int64_t part = 0; part < fold.parts; ++part) {
    const int64_t begin = fold.offset[part];
    *fold.sum +=
        WideSum(fold.offset[part + 1] - begin, [&](int64_t i) { return fold.value[begin + i]; });
  }
}

// The factor of p = factor * score for a token.
double ProbabilityScale(const float* score, int64_t experts, ScoreFunction function) {
  if (function == ScoreFunction::kSoftmax) return 1;
  const double sum = WideSum(experts, [&](int64_t e) { return static_cast<double>(score[e]); });
  return sum == 0 ? 0 : 1 / sum;
}

void SumBlock(const Balance& b, int64_t block, int64_t begin, int64_t end) {
  const int64_t experts = b.score.cols();
  double* const sums = b.block_sums + block * experts;
  int32_t* const counts = b.block_counts + block * experts;
  std::fill_n(sums, experts, 0.0);
  std::fill_n(counts, experts, 0);
  for (int64_t t = begin; t < end; ++t) {
    const float* const row = b.score.row(t);
    const double scale = ProbabilityScale(row, experts, b.function);
    for (int64_t e = 0; e < experts; ++e) sums[e] += scale * static_cast<double>(row[e]);
    if (b.expert_share != nullptr) continue;
    const int64_t last = std::min(b.slot_offset[t] + b.choices, b.slot_offset[t + 1]);
    for (int64_t s = b.slot_offset[t]; s < last; ++s) ++counts[b.expert[s]];
  }
}

// Adds up the group in the sums of its first block, and multiplies them by the counts.
void FoldGroup(const Balance& b, int64_t group) {
  const int64_t experts = b.score.cols();
  const int64_t first = b.groups.first_block[group], last = b.groups.first_block[group + 1];
  const auto tokens = static_cast<double>(b.groups.begin[last] - b.groups.begin[first]);
  double* const product = b.block_sums + first * experts;
  for (int64_t e = 0; e < experts; ++e) {
    int64_t slots = 0;
    for (int64_t block = first; block < last; ++block) slots += b.block_counts[block * experts + e];
    double sum = product[e];
    for (int64_t block = first + 1; block < last; ++block) sum += b.block_sums[block * experts + e];
    const double count = b.expert_share == nullptr ? static_cast<double>(slots)
                                                   : b.expert_share[e] * b.choices * tokens;
    product[e] = sum * count;
    b.by_prob[group * experts + e] = b.scale[group] * count;
  }
  b.group_loss[group] = b.scale[group] * WideSum(experts, [&](int64_t e) { return product[e]; });
}

// d_logits[t, e] += p_te * (G_e - sum_j p_tj G_j), times 1 - score for a sigmoid.
void AddGradient(const Balance& b, const double* by_prob, int64_t begin, int64_t end) {
  const int64_t experts = b.score.cols();
  const bool sigmoid = b.function == ScoreFunction::kSigmoid;
  for (int64_t t = begin; t < end; ++t) {
    const float* const score = b.score.row(t);
    const double scale = ProbabilityScale(score, experts, b.function);
    const double mean = WideSum(
        experts, [&](int64_t e) { return scale * static_cast<double>(score[e]) * by_prob[e]; });
    float* const d = b.d_logits.row(t);
    for (int64_t e = 0; e < experts; ++e) {
      const auto s = static_cast<double>(score[e]);
      d[e] += static_cast<float>(scale * s * (by_prob[e] - mean) * (sigmoid ? 1 - s : 1));
    }
  }
}

// 0, or NaN if a logit without a score is not finite.
double BeyondScores(const Entropy& entropy, int64_t t) {
  const float* const l = entropy.logits.row(t) + entropy.score.cols();
  return WideSum(entropy.logits.cols() - entropy.score.cols(),
                 [&](int64_t i) { return 0 * static_cast<double>(l[i]); });
}

double SoftmaxEntropy(const Entropy& entropy, int64_t t) {
  const float* const p = entropy.score.row(t);
  const float* const l = entropy.logits.row(t);
  // 0 * logit makes a logit that is not finite NaN, also where p = 0.
  const int64_t experts = entropy.score.cols();
  const double mean = WideSum(
      experts, [&](int64_t e) { return static_cast<double>(p[e]) * static_cast<double>(l[e]); });
  return static_cast<double>(entropy.log_sum_exp[t]) - (mean + BeyondScores(entropy, t));
}

double SigmoidEntropy(const Entropy& entropy, int64_t t) {
  const float* const score = entropy.score.row(t);
  const float* const l = entropy.logits.row(t);
  const int64_t experts = entropy.score.cols();
  const double sum = WideSum(experts, [&](int64_t e) { return static_cast<double>(score[e]); });
  // The score is a float32, so a float32 logarithm is accurate enough, at a third of the time.
  const double weighted = WideSum(experts, [&](int64_t e) {
    const auto none = static_cast<double>(0 * l[e]);  // NaN for a logit that is not finite
    return score[e] != 0
               ? static_cast<double>(score[e]) * static_cast<double>(std::log(score[e])) + none
               : none;
  });
  return (sum == 0 ? weighted : std::log(sum) - weighted / sum) + BeyondScores(entropy, t);
}

void FindBadLogit(MatrixView<const float> logits, int64_t& bad_logit) {
  for (int64_t i = 0; i < logits.rows() * logits.cols(); ++i) {
    if (std::isfinite(logits(i / logits.cols(), i % logits.cols()))) continue;
    bad_logit = kFirstLogit - i;
    return;
  }
}

// d_logits[t, :] += by_lse * softmax of the logits.
void AddLogSumExpGradient(const ZLoss& z, int64_t t, double by_lse) {
  const Entropy& in = z.input;
  const float* const score = in.score.row(t);
  const float* const logits = in.function == ScoreFunction::kSigmoid ? in.logits.row(t) : nullptr;
  const auto lse = static_cast<double>(in.log_sum_exp[t]);
  float* const d = z.d_logits.row(t);
  for (int64_t e = 0; e < in.score.cols(); ++e) {
    const float p = logits == nullptr
                        ? score[e]
                        : static_cast<float>(std::exp(static_cast<double>(logits[e]) - lse));
    d[e] += static_cast<float>(by_lse * static_cast<double>(p));
  }
}

}  // namespace

void Run(const Balance& balance, ThreadPool& threads) {
  ForBlocks(balance.groups, threads, [&](int64_t block, int64_t begin, int64_t end) {
    SumBlock(balance, block, begin, end);
  });
  for (int64_t g = 0; g < balance.groups.units; ++g) FoldGroup(balance, g);
  AddParts(balance.fold);
  if (balance.d_logits.data() == nullptr) return;
  ForBlocks(balance.groups, threads, [&](int64_t block, int64_t begin, int64_t end) {
    AddGradient(balance, balance.by_prob + balance.groups.unit[block] * balance.score.cols(), begin,
                end);
  });
}

void Run(const ZLoss& z, ThreadPool& threads) {
  ForBlocks(z.input.blocks, threads, [&](int64_t block, int64_t begin, int64_t end) {
    const double scale = z.scale[z.input.blocks.unit[block]];
    z.input.block_value[block] = scale * WideSum(end - begin, [&](int64_t i) {
                                   const auto lse =
                                       static_cast<double>(z.input.log_sum_exp[begin + i]);
                                   return lse * lse;
                                 });
    if (z.d_logits.data() == nullptr) return;
    for (int64_t t = begin; t < end; ++t) {
      AddLogSumExpGradient(z, t, 2 * scale * static_cast<double>(z.input.log_sum_exp[t]));
    }
  });
  AddParts(z.input.fold);
}

void Run(const Entropy& entropy, ThreadPool& threads) {
  const auto of_token =
      entropy.function == ScoreFunction::kSoftmax ? SoftmaxEntropy : SigmoidEntropy;
  ForBlocks(entropy.blocks, threads, [&](int64_t block, int64_t begin, int64_t end) {
    entropy.block_value[block] =
        WideSum(end - begin, [&](int64_t i) { return of_token(entropy, begin + i); });
  });
  AddParts(entropy.fold);
  if (!std::isfinite(*entropy.fold.sum)) FindBadLogit(entropy.logits, *entropy.bad_logit);
}

}  // namespace moe::router_loss

namespace moe {
namespace {

using router_loss::TokenBlocks;

// Units, or blocks, whose numbers fit without a heap allocation.
constexpr size_t kMostInline = 64;
using InlineDoubles = absl::InlinedVector<double, kMostInline>;

// The blocks of units [offsets[u], offsets[u + 1]) of tokens, on the device.
absl::StatusOr<TokenBlocks> BlocksOnDevice(absl::Span<const int64_t> offsets, Workspace& workspace,
                                           Stream& stream) {
  absl::InlinedVector<int64_t, kMostInline> begin, unit, first_block = {0};
  for (size_t u = 0; u + 1 < offsets.size(); ++u) {
    for (int64_t t = offsets[u]; t < offsets[u + 1]; t += router_loss::kBlockTokens) {
      begin.push_back(t);
      unit.push_back(static_cast<int64_t>(u));
    }
    first_block.push_back(static_cast<int64_t>(unit.size()));
  }
  begin.push_back(offsets.back());
  TokenBlocks blocks = {.units = std::ssize(first_block) - 1, .blocks = std::ssize(unit)};
  const auto upload = [&](absl::Span<const int64_t> array, const int64_t*& to) -> absl::Status {
    MOE_ASSIGN_OR_RETURN(const auto copy, UploadArray(array, workspace, stream));
    to = copy.data();
    return absl::OkStatus();
  };
  MOE_RETURN_IF_ERROR(upload(begin, blocks.begin));
  MOE_RETURN_IF_ERROR(upload(unit, blocks.unit));
  MOE_RETURN_IF_ERROR(upload(first_block, blocks.first_block));
  return blocks;
}

absl::Status CheckGradient(absl::string_view function, const RouterScores& scores,
                           MatrixView<float> d_logits) {
  if (d_logits.data() == nullptr) return absl::OkStatus();
  return CheckShape(function, "d_logits", d_logits, scores.score.rows(),
                    std::max(d_logits.cols(), scores.score.cols()));
}

// Checks the inputs of entropy and z-loss beside the scores.
absl::Status CheckLogits(absl::string_view function, const RouterScores& scores) {
  MOE_RETURN_IF_ERROR(CheckShape(function, "logits", scores.logits, scores.score.rows(),
                                 std::max(scores.logits.cols(), scores.score.cols())));
  return CheckLength(function, "log_sum_exp", scores.log_sum_exp.size(), scores.score.rows());
}

absl::Status CheckBalance(absl::string_view function, const RouterScores& scores,
                          const LoadBalance& balance, const LossGroups& groups) {
  const int64_t tokens = scores.score.rows();
  MOE_RETURN_IF_ERROR(CheckLength(function, "slot_offset", balance.slot_offset.size(), tokens + 1));
  if (!balance.expert_share.empty()) {
    MOE_RETURN_IF_ERROR(
        CheckLength(function, "expert_share", balance.expert_share.size(), scores.score.cols()));
  }
  MOE_RETURN_IF_ERROR(CheckGroups(function, "token groups", groups.offsets,
                                  std::max<size_t>(groups.offsets.size(), 1) - 1, tokens));
  for (size_t g = 0; g + 1 < groups.offsets.size(); ++g) {
    if (groups.offsets[g] < groups.offsets[g + 1]) continue;
    return absl::InvalidArgumentError(
        absl::StrCat(function, ": token group ", g, " is empty, expected none to be"));
  }
  return CheckGroups(function, "micro-batches", groups.micro_batch,
                     std::max<size_t>(groups.micro_batch.size(), 1) - 1,
                     static_cast<int64_t>(groups.offsets.size()) - 1);
}

// [groups] coeff * E / (k * T_g^2) / number of groups of the micro-batch.
InlineDoubles GroupScales(int64_t experts, const LoadBalance& balance, const LossGroups& groups) {
  InlineDoubles scales;
  for (size_t b = 0; b + 1 < groups.micro_batch.size(); ++b) {
    const auto groups_here = static_cast<double>(groups.micro_batch[b + 1] - groups.micro_batch[b]);
    for (int64_t g = groups.micro_batch[b]; g < groups.micro_batch[b + 1]; ++g) {
      const auto at = static_cast<size_t>(g);
      const auto tokens = static_cast<double>(groups.offsets[at + 1] - groups.offsets[at]);
      scales.push_back(static_cast<double>(balance.coeff) * static_cast<double>(experts) /
                       (balance.choices * tokens * tokens) / groups_here);
    }
  }
  return scales;
}

// Entropy's arguments, with one value per block of `units` and their sum unit by unit.
absl::StatusOr<router_loss::Entropy> EntropyOf(const RouterScores& scores,
                                               absl::Span<const int64_t> units, double* sum,
                                               Workspace& workspace, Stream& stream) {
  router_loss::Entropy entropy = {.logits = scores.logits,
                                  .score = scores.score,
                                  .function = scores.function,
                                  .log_sum_exp = scores.log_sum_exp.data()};
  MOE_ASSIGN_OR_RETURN(entropy.blocks, BlocksOnDevice(units, workspace, stream));
  MOE_ASSIGN_OR_RETURN(const absl::Span<double> value,
                       workspace.Array<double>(entropy.blocks.blocks));
  entropy.block_value = value.data();
  entropy.fold = {.value = value.data(),
                  .offset = entropy.blocks.first_block,
                  .parts = entropy.blocks.units,
                  .sum = sum};
  return entropy;
}

}  // namespace

absl::Status AddLoadBalanceLoss(const RouterScores& scores, const LoadBalance& balance,
                                const LossGroups& groups, double* loss, MatrixView<float> d_logits,
                                Workspace& workspace, Stream& stream) {
  constexpr char kName[] = "AddLoadBalanceLoss";
  const int64_t experts = scores.score.cols();
  MOE_RETURN_IF_ERROR(CheckBalance(kName, scores, balance, groups));
  MOE_RETURN_IF_ERROR(CheckGradient(kName, scores, d_logits));
  if (IsCuda(stream)) {
    MOE_RETURN_IF_ERROR(CheckCudaLimit(kName, "E (experts)", experts, router_loss::kMaxExperts));
  }
  router_loss::Balance terms = {.score = scores.score,
                                .function = scores.function,
                                .slot_offset = balance.slot_offset.data(),
                                .expert = balance.expert.data(),
                                .choices = balance.choices,
                                .expert_share = nullptr,
                                .d_logits = d_logits};
  MOE_ASSIGN_OR_RETURN(terms.groups, BlocksOnDevice(groups.offsets, workspace, stream));
  MOE_ASSIGN_OR_RETURN(const auto scale, UploadArray<double>(GroupScales(experts, balance, groups),
                                                             workspace, stream));
  MOE_ASSIGN_OR_RETURN(const auto share, UploadArray(balance.expert_share, workspace, stream));
  MOE_ASSIGN_OR_RETURN(const auto micro_batch, UploadArray(groups.micro_batch, workspace, stream));
  terms.scale = scale.data();
  if (!share.empty()) terms.expert_share = share.data();
  const int64_t cells = terms.groups.blocks * experts;
  MOE_ASSIGN_OR_RETURN(const absl::Span<double> sums, workspace.Array<double>(cells));
  MOE_ASSIGN_OR_RETURN(const absl::Span<int32_t> counts, workspace.Array<int32_t>(cells));
  MOE_ASSIGN_OR_RETURN(const absl::Span<double> by_prob,
                       workspace.Array<double>(terms.groups.units * experts));
  MOE_ASSIGN_OR_RETURN(const absl::Span<double> group_loss,
                       workspace.Array<double>(terms.groups.units));
  terms.block_sums = sums.data();
  terms.block_counts = counts.data();
  terms.by_prob = by_prob.data();
  terms.group_loss = group_loss.data();
  terms.fold = {.value = group_loss.data(),
                .offset = micro_batch.data(),
                .parts = static_cast<int64_t>(groups.micro_batch.size()) - 1,
                .sum = loss};
  return RunOp(kName, terms, stream);
}

absl::Status AddZLoss(const RouterScores& scores, absl::Span<const int64_t> micro_batch_offsets,
                      float coeff, double* loss, MatrixView<float> d_logits, Workspace& workspace,
                      Stream& stream) {
  constexpr char kName[] = "AddZLoss";
  const size_t micro_batches = std::max<size_t>(micro_batch_offsets.size(), 1) - 1;
  MOE_RETURN_IF_ERROR(CheckLogits(kName, scores));
  MOE_RETURN_IF_ERROR(CheckGradient(kName, scores, d_logits));
  MOE_RETURN_IF_ERROR(
      CheckGroups(kName, "micro-batches", micro_batch_offsets, micro_batches, scores.score.rows()));
  InlineDoubles scale;
  for (size_t b = 0; b < micro_batches; ++b) {
    scale.push_back(static_cast<double>(coeff) /
                    static_cast<double>(micro_batch_offsets[b + 1] - micro_batch_offsets[b]));
  }
  router_loss::ZLoss terms = {.d_logits = d_logits};
  MOE_ASSIGN_OR_RETURN(terms.input,
                       EntropyOf(scores, micro_batch_offsets, loss, workspace, stream));
  MOE_ASSIGN_OR_RETURN(const auto scale_of, UploadArray<double>(scale, workspace, stream));
  terms.scale = scale_of.data();
  return RunOp(kName, terms, stream);
}

absl::Status AddEntropy(const RouterScores& scores, double* sum, int64_t* bad_logit,
                        Workspace& workspace, Stream& stream) {
  constexpr char kName[] = "AddEntropy";
  MOE_RETURN_IF_ERROR(CheckLogits(kName, scores));
  const int64_t all[] = {0, scores.score.rows()};
  MOE_ASSIGN_OR_RETURN(router_loss::Entropy terms, EntropyOf(scores, all, sum, workspace, stream));
  terms.bad_logit = bad_logit;
  return RunOp(kName, terms, stream);
}

}  // namespace moe
