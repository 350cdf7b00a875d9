// Sums over ranks: all-reduce and reduce-scatter.
#include <algorithm>
#include <memory>
#include <type_traits>
#include <utility>

#include <absl/strings/str_cat.h>

#include "kernels/base/status_macros.h"
#include "moe/cli/measure/collective_case.h"

namespace moe::measure {
namespace {

// Element i of rank r's input to a sum. 61 is prime: blocks of any size differ from each other.
int64_t Term(int rank, int64_t i) {
  return (int64_t{7} * rank + i) % 61;
}

template <typename T>
T Exact(int64_t value) {
  if constexpr (std::is_same_v<T, BFloat16> || std::is_same_v<T, Float16>) {
    return T(static_cast<float>(value));
  } else {
    return static_cast<T>(value);
  }
}

int64_t SumOfTerms(int ranks, int64_t i) {
  int64_t sum = 0;
  for (int r = 0; r < ranks; ++r) sum += Term(r, i);
  return sum;
}
const char* AlgorithmName(AllReduceAlgorithm algorithm) {
  if (algorithm == AllReduceAlgorithm::kRing) return "ring";
  return algorithm == AllReduceAlgorithm::kDirect ? "direct" : "library";
}

}  // namespace

template <typename T>
absl::Status CollectiveCase::SetupReduceScatter() {
  const int ranks = comm_.size();
  const int me = comm_.rank();
  const int64_t block = BlockElements();
  DescribeEvenBlocks();
  // The receive buffer has room for the copy that bounds a call.
  const int64_t copied = std::max(block, (ranks + 1) * block / 2);
  MOE_RETURN_IF_ERROR(Allocate(ranks * block, in_place() ? ranks * block : copied));
  result_ = Elements(recv_, 0, in_place() ? ranks * block : block);
  const absl::Span<T> sent = host_send().span<T>();
  for (int64_t i = 0; i < ranks * block; ++i) sent[i] = Exact<T>(Term(me, i));
  for (int64_t i = 0; i < block; ++i) {
    want_.span<T>()[i] = Exact<T>(SumOfTerms(ranks, me * block + i));
  }
  if (in_place()) {
    input_ = result_;
    result_ = Elements(recv_, me * block, block);
  }
  call_ = [this, ranks, block] {
    const Buffer& from = in_place() ? recv_ : send_;
    return comm_.ReduceScatter<T>(
        from.span<const T>().first(ranks * block),
        absl::MakeSpan(reinterpret_cast<T*>(result_.data()), static_cast<size_t>(block)),
        ReduceOp::kSum, stream_, site());
  };
  return absl::OkStatus();
}

absl::Status CollectiveCase::StartFromSent() {
  if (in_place()) return absl::OkStatus();
  return stream_.CopyBytes(send_.data(), recv_.data(), send_.bytes());
}

template <typename T>
absl::Status CollectiveCase::SetupAllReduce() {
  const int ranks = comm_.size();
  const int64_t count = std::max<int64_t>(1, SpecElements());
  algorithm_ = AlgorithmName(spec_.all_reduce);
  size_elements_ = count_ = count;
  MOE_RETURN_IF_ERROR(Allocate(count, count));
  if (in_place()) input_ = result_;
  const absl::Span<T> sent = host_send().span<T>();
  for (int64_t i = 0; i < count; ++i) {
    sent[i] = Exact<T>(Term(comm_.rank(), i));
    want_.span<T>()[i] = Exact<T>(SumOfTerms(ranks, i));
  }
  traffic_ =
      EvenTraffic(ranks, spec_.all_reduce == AllReduceAlgorithm::kDirect ? 2 * count / ranks : 0);
  if (spec_.all_reduce == AllReduceAlgorithm::kRing) {
    for (int r = 0; r < ranks; ++r) {
      traffic_.at(r, (r + 1) % ranks) = 2 * count * (ranks - 1) / ranks;
    }
  }
  traffic_known_ = spec_.all_reduce != AllReduceAlgorithm::kLibrary;
  MOE_ASSIGN_OR_RETURN(std::unique_ptr<AllReducer> made,
                       AllReducer::Create(spec_.all_reduce, comm_));
  const std::shared_ptr<AllReducer> reducer = std::move(made);
  if constexpr (std::is_same_v<T, float> || std::is_same_v<T, int64_t>) {
    call_ = [this, reducer, count]() -> absl::Status {
      MOE_RETURN_IF_ERROR(StartFromSent());
      return reducer->Sum(recv_.span<T>().first(count), stream_, site());
    };
    return absl::OkStatus();
  }
  if (spec_.all_reduce == AllReduceAlgorithm::kRing) {
    return absl::InvalidArgumentError(
        absl::StrCat("CollectiveCase: the ring sums f32 and i64, not ", moe::NameOf(spec_.dtype),
                     ", expected direct (local) or library (mpi, nccl)"));
  }
  call_ = [this, count]() -> absl::Status {
    MOE_RETURN_IF_ERROR(StartFromSent());
    return comm_.AllReduce<T>(recv_.span<T>().first(count), ReduceOp::kSum, stream_, site());
  };
  return absl::OkStatus();
}

absl::Status CollectiveCase::SetupSum() {
  const auto setup = [this](auto type) {
    using T = decltype(type);
    return spec_.op == Op::kAllReduce ? SetupAllReduce<T>() : SetupReduceScatter<T>();
  };
  switch (spec_.dtype) {
    case DType::kFloat64:
      return setup(double{});
    case DType::kBFloat16:
      return setup(BFloat16{});
    case DType::kFloat16:
      return setup(Float16{});
    case DType::kInt32:
      return setup(int32_t{});
    case DType::kInt64:
      return setup(int64_t{});
    default:
      return setup(float{});
  }
}

}  // namespace moe::measure
