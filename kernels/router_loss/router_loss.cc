#include "kernels/router_loss/router_loss.h"

#include <algorithm>

#include <absl/container/inlined_vector.h>
#include <absl/strings/str_cat.h>
#include <absl/strings/string_view.h>

#include "kernels/base/device_arrays.h"
#include "kernels/base/run_op.h"
#include "kernels/base/shape_check.h"
#include "kernels/base/status_macros.h"
#include "kernels/router_loss/router_loss_cpu.h"
#include "kernels/router_loss/router_loss_cuda.h"

namespace moe {
namespace {

using router_loss::TokenBlocks;

using InlineDoubles = absl::InlinedVector<double, router_loss::kMostInline>;

// Units [offsets[u], offsets[u + 1]) of tokens, cut into blocks.
absl::StatusOr<TokenBlocks> BlocksOnDevice(absl::Span<const int64_t> offsets, Workspace& workspace,
                                           Stream& stream) {
  const router_loss::HostBlocks cut = router_loss::CutIntoBlocks(offsets);
  TokenBlocks blocks = cut.view();
  const auto upload = [&](absl::Span<const int64_t> array, const int64_t*& to) -> absl::Status {
    MOE_ASSIGN_OR_RETURN(const auto copy, UploadArray(array, workspace, stream));
    to = copy.data();
    return absl::OkStatus();
  };
  MOE_RETURN_IF_ERROR(upload(cut.begin, blocks.begin));
  MOE_RETURN_IF_ERROR(upload(cut.unit, blocks.unit));
  MOE_RETURN_IF_ERROR(upload(cut.first_block, blocks.first_block));
  return blocks;
}

absl::Status CheckGradient(absl::string_view function, const RouterScores& scores,
                           MatrixView<float> d_logits) {
  if (d_logits.data() == nullptr) return absl::OkStatus();
  return CheckShape(function, "d_logits", d_logits, scores.score.rows(),
                    std::max(d_logits.cols(), scores.score.cols()));
}

// What entropy and z-loss read beside the scores.
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

// [groups] coeff * E / (k * T_g^2) / groups of the micro-batch.
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

// Entropy's arguments, with one value per block of `units` to be folded unit by unit.
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
