// The rows that a layer is given, and which of them are tokens: padding is taken out before a pass,
// so that no part of it sees any, and is 0 behind it.
#include <algorithm>

#include <absl/strings/str_cat.h>

#include "gating/token_groups.h"
#include "kernels/base/status_macros.h"
#include "moe/layer/moe_layer.h"
#include "moe/tensor/own_rows.h"

namespace moe {
namespace {

constexpr Work kTakeOut = {.phase = Phase::kPlan, .name = "rows without padding"};
constexpr Work kPutBack = {.phase = Phase::kPlan, .name = "rows with padding"};

}  // namespace

template <typename T>
absl::StatusOr<Batch> MoeLayer<T>::TakePaddingOut(const Pass& pass, Saved& saved) const {
  Workspace& host = pass.kept_host();
  const absl::Span<const uint8_t> mask = pass.batch.padding_mask;
  const auto whole = std::ssize(mask);
  MOE_ASSIGN_OR_RETURN(Batch batch, CopyBatch(pass.batch, whole, host));
  const auto count = std::count(mask.begin(), mask.end(), uint8_t{0});
  MOE_ASSIGN_OR_RETURN(const auto picked, host.Array<int32_t>(count));  // of the whole batch
  for (size_t t = 0, i = 0; t < mask.size(); ++t) {
    if (mask[t] == 0) picked[i++] = static_cast<int32_t>(t);
  }
  const int64_t first = saved.rows.begin();  // row of the batch
  saved.rows = OwnRowsAmong(pass.context, whole, picked);
  MOE_ASSIGN_OR_RETURN(const auto rows, host.Array<int32_t>(saved.rows.count()));
  std::transform(picked.begin() + saved.rows.begin(), picked.begin() + saved.rows.end(),
                 rows.begin(), [&](int32_t row) { return row - static_cast<int32_t>(first); });
  MOE_ASSIGN_OR_RETURN(saved.tokens, MakeRowSubset(rows, saved.given.rows(), pass));
  MOE_ASSIGN_OR_RETURN(saved.segments,
                       SegmentsAmong(batch.micro_batch_offsets, pass.context, picked, host));
  for (absl::Span<const int64_t>* const offsets :
       {&batch.sequence_offsets, &batch.micro_batch_offsets}) {
    MOE_ASSIGN_OR_RETURN(const auto of_tokens, host.Array<int64_t>(std::ssize(*offsets)));
    std::transform(offsets->begin(), offsets->end(), of_tokens.begin(), [&](int64_t row) {
      return std::lower_bound(picked.begin(), picked.end(), row) - picked.begin();
    });
    *offsets = of_tokens;
  }
  return batch;
}

template <typename T>
absl::Status MoeLayer<T>::ForwardTokens(const Pass& pass, MatrixView<T> y, Saved& saved) {
  const absl::Span<const uint8_t> mask = pass.batch.padding_mask;
  saved.rows = OwnRowsOf(pass.context, share_.cut() ? RowsOf(pass.batch) : saved.given.rows());
  const auto is_padding = [](uint8_t value) {
    return value != 0;
  };
  if (std::none_of(mask.begin(), mask.end(), is_padding)) {
    return ForwardRows(pass, saved.given, y, saved);
  }
  Stream& compute = *pass.context.compute;
  Pass of_tokens = pass;
  MatrixView<T> x, token_y;
  MOE_RETURN_IF_ERROR(Timed(pass, kTakeOut, compute, [&]() -> absl::Status {
    MOE_ASSIGN_OR_RETURN(of_tokens.batch, TakePaddingOut(pass, saved));
    MOE_ASSIGN_OR_RETURN(x, Gathered(saved.given, saved.tokens, pass.kept(), compute));
    return absl::OkStatus();
  }));
  MOE_ASSIGN_OR_RETURN(token_y, pass.context.workspace->Matrix<T>(x.rows(), x.cols()));
  MOE_RETURN_IF_ERROR(ForwardRows(of_tokens, x, token_y, saved));
  return Timed(pass, kPutBack, compute,
               [&] { return Spread<T>(token_y, saved.tokens, y, compute); });
}

template <typename T>
absl::Status MoeLayer<T>::BackwardTokens(const Pass& pass, MatrixView<const T> dy, Saved& saved,
                                         MatrixView<T> dx, GradientReady ready) {
  if (saved.tokens.whole() == 0) return BackwardRows(pass, dy, saved, dx, ready);
  Workspace& workspace = *pass.context.workspace;
  Stream& compute = *pass.context.compute;
  MatrixView<T> token_dy;
  MOE_RETURN_IF_ERROR(Timed(pass, kTakeOut, compute, [&]() -> absl::Status {
    MOE_ASSIGN_OR_RETURN(token_dy, Gathered(dy, saved.tokens, workspace, compute));
    return absl::OkStatus();
  }));
  MOE_ASSIGN_OR_RETURN(const auto token_dx, workspace.Matrix<T>(token_dy.rows(), token_dy.cols()));
  MOE_RETURN_IF_ERROR(BackwardRows(pass, token_dy, saved, token_dx, ready));
  return Timed(pass, kPutBack, compute,
               [&] { return Spread<T>(token_dx, saved.tokens, dx, compute); });
}

template <typename T>
absl::Status MoeLayer<T>::MoveInput(const Pass& pass, MatrixView<const T> x) {
  MOE_ASSIGN_OR_RETURN(Saved* const saved, SavedOf(pass));
  const MatrixView<const T> given = saved->given;
  if (x.rows() != given.rows() || x.cols() != given.cols()) {
    return absl::InvalidArgumentError(absl::StrCat("MoeLayer::MoveInput: x is [", x.rows(), ", ",
                                                   x.cols(), "], expected [", given.rows(), ", ",
                                                   given.cols(), "] as in the Forward"));
  }
  saved->given = x;
  if (saved->tokens.whole() > 0) return absl::OkStatus();        // the layer has a copy
  const bool jittered = saved->router.jitter.data() != nullptr;  // then the router has a copy
  saved->x = x;
  if (!jittered) saved->router.tokens = x;
  saved->shared.x = x;
  return absl::OkStatus();
}

#define MOE_INSTANTIATE(T)                                                                  \
  template absl::Status MoeLayer<T>::ForwardTokens(const Pass&, MatrixView<T>,              \
                                                   MoeLayer<T>::Saved&);                    \
  template absl::Status MoeLayer<T>::BackwardTokens(                                        \
      const Pass&, MatrixView<const T>, MoeLayer<T>::Saved&, MatrixView<T>, GradientReady); \
  template absl::Status MoeLayer<T>::MoveInput(const Pass&, MatrixView<const T>);
MOE_FOR_STORAGE_TYPES(MOE_INSTANTIATE)
#undef MOE_INSTANTIATE

}  // namespace moe
