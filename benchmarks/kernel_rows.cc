// Permute and combine: rows of tokens to rows grouped by expert, and backward.
#include <algorithm>
#include <memory>
#include <utility>
#include <vector>

#include "benchmarks/kernel_group.h"
#include "kernels/base/status_macros.h"
#include "kernels/base/storage_type.h"
#include "kernels/base/tensor_view.h"
#include "kernels/combine/combine.h"
#include "kernels/permute/permute.h"

namespace moe::measure {
namespace {

template <typename T>
class RowKernels final : public KernelGroup {
 public:
  RowKernels(const KernelShape& shape, KernelDevice& device)
      : shape_(shape), device_(device), copy_(device) {}

  absl::Status SetUp() {
    MOE_RETURN_IF_ERROR(Group());
    const int64_t H = shape_.hidden;
    MOE_ASSIGN_OR_RETURN(tokens_,
                         UniformValues<T>(shape_.tokens * H, shape_.seed, 0, device_, "tokens"));
    MOE_ASSIGN_OR_RETURN(rows_, UniformValues<T>(N_ * H, shape_.seed, 1, device_, "rows"));
    MOE_ASSIGN_OR_RETURN(out_,
                         Array<T>::Allocate(std::max(shape_.tokens, N_) * H, device_, "results"));
    MOE_ASSIGN_OR_RETURN(weight_, UniformValues<float>(N_, shape_.seed, 2, device_, "weights"));
    MOE_ASSIGN_OR_RETURN(d_weight_, Array<float>::Allocate(N_, device_, "gradients"));
    return copy_.Reserve(Bytes(N_ + shape_.tokens, 12, shape_.tokens + 1));
  }

  void AddPermute() {
    Add("gather", &RowKernels::Gather, Bytes(used_tokens_ + N_, 8, shape_.tokens + 1));
    Add("sum", &RowKernels::SumUp, Bytes(N_ + shape_.tokens, 4, shape_.tokens + 1));
  }
  void AddCombine() {
    Add("combine", &RowKernels::Combine, Bytes(N_ + shape_.tokens, 8, shape_.tokens + 1));
    Add("scale", &RowKernels::Scale, Bytes(used_tokens_ + N_, 12, shape_.tokens + 1));
    Add("weight_grad", &RowKernels::WeightGradient, Bytes(N_ + used_tokens_, 8, shape_.tokens + 1));
  }

 private:
  void Add(const char* name, absl::Status (RowKernels::*run)(), double bytes) {
    kernels_.push_back({name, std::bind_front(run, this), {copy_.Of(bytes)}});
  }
  double Bytes(int64_t rows, int64_t each_slot, int64_t offsets) const {
    return static_cast<double>(rows * shape_.hidden * static_cast<int64_t>(sizeof(T)) +
                               each_slot * N_ + 8 * offsets);
  }

  // Rows of the slots, by expert and then by token.
  absl::Status Group() {
    const TokenSlots slots = DrawSlots(shape_.routing, shape_.slots());
    N_ = static_cast<int64_t>(slots.expert.size());
    std::vector<int64_t> next = CountSlots(slots, shape_.router.num_experts);
    for (int64_t first = 0; int64_t & count : next) first += std::exchange(count, first);
    std::vector<int32_t> token_of_row(N_), row_of_slot(N_);
    for (int64_t t = 0; t < slots.tokens(); ++t) {
      used_tokens_ += slots.slot_offset[t + 1] > slots.slot_offset[t] ? 1 : 0;
      for (int64_t s = slots.slot_offset[t]; s < slots.slot_offset[t + 1]; ++s) {
        const int64_t row = next[slots.expert[s]]++;
        token_of_row[row] = static_cast<int32_t>(t);
        row_of_slot[s] = static_cast<int32_t>(row);
      }
    }
    MOE_ASSIGN_OR_RETURN(slot_offset_, Array<int64_t>::Of(slots.slot_offset, device_, "offsets"));
    MOE_ASSIGN_OR_RETURN(token_of_row_, Array<int32_t>::Of(token_of_row, device_, "rows"));
    MOE_ASSIGN_OR_RETURN(row_of_slot_, Array<int32_t>::Of(row_of_slot, device_, "rows"));
    return absl::OkStatus();
  }

  template <typename U>
  MatrixView<U> View(const Array<T>& array, int64_t rows) const {
    return {array.data(), rows, shape_.hidden};
  }
  MatrixView<const T> Tokens() const { return View<const T>(tokens_, shape_.tokens); }
  MatrixView<const T> Rows() const { return View<const T>(rows_, N_); }

  absl::Status Gather() { return GatherWith({}); }
  absl::Status Scale() { return GatherWith(weight_.span()); }
  absl::Status GatherWith(absl::Span<const float> weight) {
    return GatherTokens<T>(Tokens(),
                           {.slot_offset = slot_offset_.span(),
                            .row_of_slot = row_of_slot_.span(),
                            .token_of_row = token_of_row_.span()},
                           weight, View<T>(out_, N_), device_.stream());
  }
  absl::Status SumUp() { return CombineWith({}); }
  absl::Status Combine() { return CombineWith(weight_.span()); }
  absl::Status CombineWith(absl::Span<const float> weight) {
    return CombineRows<T>(Rows(), slot_offset_.span(), row_of_slot_.span(), weight,
                          View<T>(out_, shape_.tokens), Write::kOverwrite, device_.stream());
  }
  absl::Status WeightGradient() {
    return CombineWeightGradient<T>(Tokens(), Rows(), slot_offset_.span(), row_of_slot_.span(),
                                    d_weight_.span(), device_.stream());
  }

  const KernelShape shape_;
  KernelDevice& device_;
  CopyLimit copy_;
  int64_t N_ = 0, used_tokens_ = 0;
  Array<int64_t> slot_offset_;
  Array<int32_t> token_of_row_, row_of_slot_;
  Array<T> tokens_, rows_, out_;
  Array<float> weight_, d_weight_;
};

template <typename Add>
MadeKernels MakeRowKernels(const KernelShape& shape, KernelDevice& device, Add add) {
  return WithStorageType(shape.dtype, [&]<typename T>(T) -> MadeKernels {
    auto kernels = std::make_unique<RowKernels<T>>(shape, device);
    MOE_RETURN_IF_ERROR(kernels->SetUp());
    add(*kernels);
    return kernels;
  });
}

}  // namespace

MadeKernels MakePermuteKernels(const KernelShape& shape, KernelDevice& device) {
  return MakeRowKernels(shape, device, [](auto& kernels) { kernels.AddPermute(); });
}

MadeKernels MakeCombineKernels(const KernelShape& shape, KernelDevice& device) {
  return MakeRowKernels(shape, device, [](auto& kernels) { kernels.AddCombine(); });
}

}  // namespace moe::measure
