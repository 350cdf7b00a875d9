// What a layer's passes refuse before they do anything.
#include <absl/strings/str_cat.h>

#include "kernels/base/status_macros.h"
#include "moe/layer/moe_layer.h"

namespace moe {
namespace {

template <typename T>
absl::Status CheckMemory(const char* name, MatrixView<const T> rows) {
  if (rows.data() != nullptr || rows.rows() == 0) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat("MoeLayer: ", name, " [", rows.rows(), ", ",
                                                 rows.cols(), "] is null, expected its memory"));
}

// `reader`: what reads `in` when part of `out` has been written; nullptr: nothing does where they
// are one matrix.
template <typename T>
absl::Status CheckApart(const char* out_name, MatrixView<const T> out, const char* in_name,
                        MatrixView<const T> in, const char* reader) {
  const bool same = out.data() == in.data() && out.stride() == in.stride();
  if ((same && reader == nullptr) || !Overlap(out, in)) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat("MoeLayer: ", out_name, " is ", same ? "" : "partly ", "in the memory of ",
                   in_name, ", expected memory of its own",
                   reader == nullptr ? "" : absl::StrCat(", since ", reader, " reads ", in_name)));
}

}  // namespace

template <typename T>
absl::Status MoeLayer<T>::CheckForward(const Pass& pass, MatrixView<const T> x,
                                       MatrixView<const T> y) const {
  const int64_t hidden = config_.router.hidden_size;
  if (x.rows() < 0 || x.cols() != hidden || y.rows() != x.rows() || y.cols() != hidden) {
    return absl::InvalidArgumentError(absl::StrCat("MoeLayer: x [", x.rows(), ", ", x.cols(),
                                                   "], y [", y.rows(), ", ", y.cols(),
                                                   "], expected both [T, ", hidden, "]"));
  }
  MOE_RETURN_IF_ERROR(CheckMemory("x", x));
  MOE_RETURN_IF_ERROR(CheckMemory("y", y));
  if (pass.context.turns != nullptr && dispatcher_->algorithm() == DispatchAlgorithm::kDirect) {
    return absl::InvalidArgumentError(
        "MoeLayer: direct dispatch in passes that take turns, expected staged or hierarchical: "
        "peers would read the rows of both in one memory");
  }
  if (share_.cut() && pass.batch.micro_batch_offsets.size() > 2) {
    return absl::UnimplementedError(absl::StrCat(
        "MoeLayer: ", pass.batch.micro_batch_offsets.size() - 1, " micro-batches in a call of ",
        share_.ranks, " tensor-parallel ranks, expected one"));
  }
  const int64_t all = share_.cut() ? RowsOf(pass.batch) : x.rows();
  const RankCounts rows = share_.RowsOf(all);
  const int64_t own = rows[share_.index + 1] - rows[share_.index];
  if (share_.cut() && x.rows() != own) {
    return absl::InvalidArgumentError(absl::StrCat(
        "MoeLayer: x [", x.rows(), ", ", hidden, "] of a batch of ", all, " rows on rank ",
        share_.index, " of ", share_.ranks, " tensor-parallel ones, expected its own ", own));
  }
  const auto mask = std::ssize(pass.batch.padding_mask);
  if (mask != 0 && mask != all) {
    return absl::InvalidArgumentError(
        absl::StrCat("MoeLayer: padding_mask [", mask, "], expected [", all, "], as rows of ",
                     share_.cut() ? "the batch, those of all tensor-parallel ranks" : "x"));
  }
  const bool identities = config_.router.num_zero_experts > 0;
  MOE_RETURN_IF_ERROR(CheckApart("y", y, "x", x,
                                 pass.stash != nullptr ? "Backward"
                                 : identities          ? "an identity expert"
                                                       : nullptr));
  for (const Parameter* const parameter : parameters()) {
    if (pass.stash == nullptr || parameter->contiguous()) continue;
    return absl::FailedPreconditionError(absl::StrCat(
        "MoeLayer: the parts of ", parameter->spec().name,
        " lie apart in a file that they are borrowed from, expected Forward without a stash"));
  }
  return absl::OkStatus();
}

template <typename T>
absl::StatusOr<typename MoeLayer<T>::Saved*> MoeLayer<T>::SavedOf(const Pass& pass) const {
  if (pass.stash == nullptr) {
    return absl::FailedPreconditionError(
        "MoeLayer::Backward: a pass without a stash, as in an evaluation, expected that of the "
        "Forward");
  }
  Saved* const saved = saved_.Find(pass.stash);
  if (saved == nullptr || saved->ended == Saved::Ended::kNone) {
    return absl::FailedPreconditionError(
        "MoeLayer::Backward: the stash has no Forward of this layer since it was taken, expected "
        "one");
  }
  if (saved->ended == Saved::Ended::kBackward) {
    return absl::FailedPreconditionError(
        "MoeLayer::Backward: the stash was used by another Backward, expected one Backward for "
        "each Forward");
  }
  return saved;
}

template <typename T>
absl::Status MoeLayer<T>::CheckBackward(MatrixView<const T> dy, const Saved& saved,
                                        MatrixView<const T> dx) const {
  for (const Parameter* const parameter : parameters_) {
    if (!parameter->spec().trainable || parameter->has_sum()) continue;
    return absl::FailedPreconditionError(
        absl::StrCat("MoeLayer::Backward: ", parameter->spec().name,
                     " has no sum of gradients, expected a GradientReducer before it"));
  }
  const MatrixView<const T> x = saved.given;
  const auto fits = [&](MatrixView<const T> rows) {
    return rows.rows() == x.rows() && rows.cols() == x.cols();
  };
  if (!fits(dy) || !fits(dx)) {
    return absl::InvalidArgumentError(
        absl::StrCat("MoeLayer: dy [", dy.rows(), ", ", dy.cols(), "], dx [", dx.rows(), ", ",
                     dx.cols(), "], expected both as x, [", x.rows(), ", ", x.cols(), "]"));
  }
  MOE_RETURN_IF_ERROR(CheckMemory("dy", dy));
  MOE_RETURN_IF_ERROR(CheckMemory("dx", dx));
  MOE_RETURN_IF_ERROR(CheckApart("dx", dx, "x", x, "the router's gradient"));
  const bool identities = config_.router.num_zero_experts > 0;
  return CheckApart("dx", dx, "dy", dy,
                    shared_ != nullptr ? "the shared expert"
                    : identities       ? "an identity expert"
                                       : nullptr);
}

#define MOE_INSTANTIATE(T)                                                                         \
  template absl::Status MoeLayer<T>::CheckForward(const Pass&, MatrixView<const T>,                \
                                                  MatrixView<const T>) const;                      \
  template absl::StatusOr<typename MoeLayer<T>::Saved*> MoeLayer<T>::SavedOf(const Pass&) const;   \
  template absl::Status MoeLayer<T>::CheckBackward(MatrixView<const T>, const MoeLayer<T>::Saved&, \
                                                   MatrixView<const T>) const;
MOE_FOR_STORAGE_TYPES(MOE_INSTANTIATE)
#undef MOE_INSTANTIATE

}  // namespace moe
