// Permute and combine. Values are small whole numbers and weights eighths, so that every sum is exact
// in any order and the results can be computed in integers.
#include <algorithm>
#include <memory>
#include <utility>

#include <absl/strings/str_cat.h>

#include "kernels/base/buffer.h"
#include "kernels/base/rng.h"
#include "kernels/base/status_macros.h"
#include "kernels/base/tensor_view.h"
#include "kernels/combine/combine.h"
#include "kernels/permute/permute.h"
#include "moe/bench/kernel_bench.h"

namespace moe::bench {
namespace {

constexpr int kParts = 8;  // of 1: weights are 1/8 .. 8/8

// What an element of a call is.
struct Grouping {
  TokenSlots slots;
  std::vector<int32_t> token_of_row;  // [N] rows in expert order
  std::vector<int32_t> row_of_slot;   // [S]
  std::vector<int32_t> eighths;       // [S] the weights times 8
  std::vector<float> weight;          // [S]
  std::vector<float> scale;           // [N]
  int64_t used_tokens = 0;            // T'
};

int32_t SmallNumber(uint64_t seed, uint32_t which, int64_t item, int32_t least, int32_t count) {
  const uint32_t bits = Random4({.seed = seed,
                                 .purpose = RandomPurpose::kData,
                                 .layer = which,
                                 .item = static_cast<uint64_t>(item / 4)})[item % 4];
  return least + static_cast<int32_t>(bits % static_cast<uint32_t>(count));
}

Grouping Group(const KernelSpec& spec, TokenSlots slots) {
  Grouping g{.slots = std::move(slots)};
  const auto rows = static_cast<int64_t>(g.slots.expert.size());
  std::vector<int64_t> next = CountSlots(g.slots, spec.router.num_experts);
  for (int64_t first = 0; int64_t & count : next) first += std::exchange(count, first);
  g.token_of_row.resize(rows);
  g.row_of_slot.resize(rows);
  g.scale.resize(rows);
  for (int64_t t = 0; t < g.slots.tokens(); ++t) {
    g.used_tokens += g.slots.slot_offset[t + 1] > g.slots.slot_offset[t] ? 1 : 0;
    for (int64_t s = g.slots.slot_offset[t]; s < g.slots.slot_offset[t + 1]; ++s) {
      const int64_t row = next[g.slots.expert[s]]++;
      g.eighths.push_back(SmallNumber(spec.seed, 2, s, 1, kParts));
      g.weight.push_back(static_cast<float>(g.eighths[s]) / kParts);
      g.token_of_row[row] = static_cast<int32_t>(t);
      g.row_of_slot[s] = static_cast<int32_t>(row);
      g.scale[row] = g.weight[s];
    }
  }
  return g;
}

template <typename T>
class RowKernels final : public KernelCases {
 public:
  RowKernels(const KernelSpec& spec, Stream& stream) : spec_(spec), stream_(stream) {}

  absl::Status Setup() {
    int64_t tokens = 0;
    int64_t rows = 0;
    for (int64_t call = 0; call < CallsOf(spec_.routing); ++call) {
      MOE_ASSIGN_OR_RETURN(const TokenSlots slots, KernelSlots(spec_, call));
      tokens = std::max(tokens, slots.tokens());
      rows = std::max(rows, static_cast<int64_t>(slots.expert.size()));
    }
    MOE_RETURN_IF_ERROR(Fill(tokens, 0, tokens_));
    MOE_RETURN_IF_ERROR(Fill(rows, 1, rows_));
    MOE_ASSIGN_OR_RETURN(out_, Buffer::Allocate(std::max(tokens_.bytes(), rows_.bytes())));
    d_weight_.resize(rows);
    const auto out = out_.span<std::byte>();
    if (spec_.op == KernelOp::kPermute) {
      Add("forward", "gather", &RowKernels::GatherBytes, &RowKernels::Gather,
          &RowKernels::WrongGather, out);
      Add("backward", "sum", &RowKernels::SumBytes, &RowKernels::SumUp, &RowKernels::WrongSum, out);
      return absl::OkStatus();
    }
    Add("forward", "combine", &RowKernels::CombineBytes, &RowKernels::Combine,
        &RowKernels::WrongCombine, out);
    Add("backward", "scale", &RowKernels::ScaleBytes, &RowKernels::Scale, &RowKernels::WrongScale,
        out);
    Add("backward", "weight_grad", &RowKernels::WeightGradientBytes, &RowKernels::WeightGradient,
        &RowKernels::WrongWeightGradient,
        {reinterpret_cast<std::byte*>(d_weight_.data()), d_weight_.size() * sizeof(float)});
    return absl::OkStatus();
  }

 private:
  void Add(const char* pass, const char* kernel, double (RowKernels::*bytes)() const,
           absl::Status (RowKernels::*run)(), int64_t (RowKernels::*wrong)() const,
           absl::Span<std::byte> result) {
    const auto prepare = [this, bytes](int64_t call) {
      const int64_t record = call % CallsOf(spec_.routing);
      if (record != record_) {
        grouping_ = Group(spec_, KernelSlots(spec_, record).value());
        record_ = record;
      }
      return (this->*bytes)();
    };
    const auto checked_run = [this, run] {
      return (this->*run)();
    };
    const auto count = [this, wrong] {
      return (this->*wrong)();
    };
    cases_.push_back({.pass = pass,
                      .kernel = kernel,
                      .timed = {.prepare = prepare,
                                .run = checked_run,
                                .wrong = count,
                                .spoil =
                                    [result] {
                                      SpoilBytes(result);
                                    }},
                      .result = result});
  }

  absl::Status Fill(int64_t rows, uint32_t which, Buffer& buffer) {
    MOE_ASSIGN_OR_RETURN(buffer,
                         Buffer::Allocate(rows * spec_.hidden * static_cast<int64_t>(sizeof(T))));
    const absl::Span<T> values = buffer.span<T>();
    for (size_t i = 0; i < values.size(); ++i) {
      values[i] =
          T(static_cast<float>(SmallNumber(spec_.seed, which, static_cast<int64_t>(i), -4, 9)));
    }
    return absl::OkStatus();
  }

  int64_t tokens() const { return grouping_.slots.tokens(); }
  int64_t N() const { return static_cast<int64_t>(grouping_.token_of_row.size()); }
  double RowBytes(int64_t rows) const {
    return static_cast<double>(rows * spec_.hidden * static_cast<int64_t>(sizeof(T)));
  }
  double Bytes(int64_t rows, int64_t each_slot, int64_t offsets) const {
    return RowBytes(rows) + static_cast<double>(each_slot * N() + 8 * offsets);
  }
  double GatherBytes() const { return Bytes(grouping_.used_tokens + N(), 4, 0); }
  double SumBytes() const { return Bytes(N() + tokens(), 4, tokens() + 1); }
  double CombineBytes() const { return Bytes(N() + tokens(), 8, tokens() + 1); }
  double ScaleBytes() const { return Bytes(grouping_.used_tokens + N(), 8, 0); }
  double WeightGradientBytes() const { return Bytes(N() + grouping_.used_tokens, 8, tokens() + 1); }

  MatrixView<const T> Tokens() const {
    return {tokens_.span<const T>().data(), tokens(), spec_.hidden};
  }
  MatrixView<const T> ExpertRows() const {
    return {rows_.span<const T>().data(), N(), spec_.hidden};
  }
  MatrixView<T> Out(int64_t rows) const { return {out_.span<T>().data(), rows, spec_.hidden}; }

  absl::Status Gather() {
    MOE_RETURN_IF_ERROR(GatherRows<T>(Tokens(), grouping_.token_of_row, Out(N()), stream_));
    return stream_.Synchronize();
  }
  absl::Status Scale() {
    MOE_RETURN_IF_ERROR(
        GatherScaledRows<T>(Tokens(), grouping_.token_of_row, grouping_.scale, Out(N()), stream_));
    return stream_.Synchronize();
  }
  absl::Status SumUp() { return CombineWith({}); }
  absl::Status Combine() { return CombineWith(grouping_.weight); }
  absl::Status CombineWith(absl::Span<const float> weight) {
    MOE_RETURN_IF_ERROR(CombineRows<T>(ExpertRows(), grouping_.slots.slot_offset,
                                       grouping_.row_of_slot, weight, Out(tokens()),
                                       Write::kOverwrite, stream_));
    return stream_.Synchronize();
  }
  absl::Status WeightGradient() {
    MOE_RETURN_IF_ERROR(CombineWeightGradient<T>(
        Tokens(), ExpertRows(), grouping_.slots.slot_offset, grouping_.row_of_slot,
        absl::MakeSpan(d_weight_).first(grouping_.weight.size()), stream_));
    return stream_.Synchronize();
  }

  static int64_t Whole(T value) { return static_cast<int64_t>(static_cast<float>(value)); }
  static T FromEighths(int64_t eighths) { return T(static_cast<float>(eighths) / kParts); }

  // Elements of the first `rows` rows of the result that are not eighths(row, column) / 8.
  template <typename Eighths>
  int64_t CountWrong(int64_t rows, Eighths eighths) const {
    int64_t wrong = 0;
    const MatrixView<T> out = Out(rows);
    for (int64_t r = 0; r < rows; ++r) {
      for (int64_t h = 0; h < spec_.hidden; ++h) {
        wrong += !(out(r, h) == FromEighths(eighths(r, h)));
      }
    }
    return wrong;
  }
  int64_t WrongGather() const {
    return CountWrong(N(), [&](int64_t r, int64_t h) {
      return kParts * Whole(Tokens()(grouping_.token_of_row[r], h));
    });
  }
  int64_t WrongScale() const {
    return CountWrong(N(), [&](int64_t r, int64_t h) {
      return static_cast<int64_t>(grouping_.scale[r] * kParts) *
             Whole(Tokens()(grouping_.token_of_row[r], h));
    });
  }
  // Sum over the slots of a token of factor(slot) * its row.
  template <typename Factor>
  int64_t WrongSumOf(Factor factor) const {
    return CountWrong(tokens(), [&](int64_t t, int64_t h) {
      int64_t sum = 0;
      for (int64_t s = grouping_.slots.slot_offset[t]; s < grouping_.slots.slot_offset[t + 1];
           ++s) {
        sum += factor(s) * Whole(ExpertRows()(grouping_.row_of_slot[s], h));
      }
      return sum;
    });
  }
  int64_t WrongSum() const {
    return WrongSumOf([](int64_t) { return int64_t{kParts}; });
  }
  int64_t WrongCombine() const {
    return WrongSumOf([&](int64_t s) { return int64_t{grouping_.eighths[s]}; });
  }
  int64_t WrongWeightGradient() const {
    int64_t wrong = 0;
    for (int64_t t = 0; t < tokens(); ++t) {
      for (int64_t s = grouping_.slots.slot_offset[t]; s < grouping_.slots.slot_offset[t + 1];
           ++s) {
        int64_t dot = 0;
        for (int64_t h = 0; h < spec_.hidden; ++h) {
          dot += Whole(Tokens()(t, h)) * Whole(ExpertRows()(grouping_.row_of_slot[s], h));
        }
        wrong += d_weight_[s] != static_cast<float>(dot);
      }
    }
    return wrong;
  }

  const KernelSpec spec_;
  Stream& stream_;
  int64_t record_ = -1;
  Grouping grouping_;  // of record_
  Buffer tokens_, rows_, out_;
  std::vector<float> d_weight_;
};

template <typename T>
absl::StatusOr<std::unique_ptr<KernelCases>> Make(const KernelSpec& spec, Stream& stream) {
  auto kernels = std::make_unique<RowKernels<T>>(spec, stream);
  MOE_RETURN_IF_ERROR(kernels->Setup());
  return std::unique_ptr<KernelCases>(std::move(kernels));
}

}  // namespace

absl::StatusOr<std::unique_ptr<KernelCases>> MakeRowCases(const KernelSpec& spec, Stream& stream) {
  if (spec.dtype == DType::kFloat32) return Make<float>(spec, stream);
  if (spec.dtype == DType::kBFloat16) return Make<BFloat16>(spec, stream);
  return absl::InvalidArgumentError(
      absl::StrCat("MakeRowCases: type ", moe::NameOf(spec.dtype), ", expected f32 or bf16"));
}

}  // namespace moe::bench
