// Permute and combine. Values are small whole numbers and weights eighths, so that every sum is
// exact in any order and the results can be computed in integers.
#include <algorithm>
#include <array>
#include <memory>
#include <utility>

#include "kernels/base/rng.h"
#include "kernels/base/status_macros.h"
#include "kernels/base/tensor_view.h"
#include "kernels/combine/combine.h"
#include "kernels/permute/permute.h"
#include "moe/cli/bench/kernel_bench.h"

namespace moe::bench {
namespace {

constexpr int kParts = 8;  // of 1: weights are 1/8 .. 8/8
constexpr int64_t kFillGrain = 1 << 14;

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

// What kernels read of it.
struct GroupingArrays {
  Mirrored<int64_t> slot_offset;
  Mirrored<int32_t> token_of_row, row_of_slot;
  Mirrored<float> weight, scale;
};

// Four numbers in least .. least + count - 1, items 4 `block` .. 4 `block` + 3.
std::array<int32_t, 4> SmallNumbers(uint64_t seed, uint32_t which, int64_t block, int32_t least,
                                    int32_t count) {
  const auto bits = Random4({.seed = seed,
                             .purpose = RandomPurpose::kData,
                             .layer = which,
                             .item = static_cast<uint64_t>(block)});
  std::array<int32_t, 4> numbers;
  for (int i = 0; i < 4; ++i) {
    numbers[i] = least + static_cast<int32_t>(bits[i] % static_cast<uint32_t>(count));
  }
  return numbers;
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
      g.eighths.push_back(SmallNumbers(spec.seed, 2, s / 4, 1, kParts)[s % 4]);
      g.weight.push_back(static_cast<float>(g.eighths[s]) / kParts);
      g.token_of_row[row] = static_cast<int32_t>(t);
      g.row_of_slot[s] = static_cast<int32_t>(row);
      g.scale[row] = g.weight[s];
    }
  }
  return g;
}

absl::StatusOr<GroupingArrays> ArraysOf(const Grouping& g, const KernelDevice& device) {
  constexpr char kName[] = "the rows' grouping";
  GroupingArrays arrays;
  MOE_ASSIGN_OR_RETURN(arrays.slot_offset,
                       Mirrored<int64_t>::Of(g.slots.slot_offset, device, kName));
  MOE_ASSIGN_OR_RETURN(arrays.token_of_row, Mirrored<int32_t>::Of(g.token_of_row, device, kName));
  MOE_ASSIGN_OR_RETURN(arrays.row_of_slot, Mirrored<int32_t>::Of(g.row_of_slot, device, kName));
  MOE_ASSIGN_OR_RETURN(arrays.weight, Mirrored<float>::Of(g.weight, device, kName));
  MOE_ASSIGN_OR_RETURN(arrays.scale, Mirrored<float>::Of(g.scale, device, kName));
  return arrays;
}

template <typename T>
class RowKernels final : public KernelCases {
 public:
  RowKernels(const KernelSpec& spec, KernelDevice& device) : spec_(spec), device_(device) {}

  absl::Status Setup() {
    int64_t tokens = 0;
    int64_t rows = 0;
    for (int64_t call = 0; call < CallsOf(spec_.routing); ++call) {
      MOE_ASSIGN_OR_RETURN(const TokenSlots slots, KernelSlots(spec_, call));
      tokens = std::max(tokens, slots.tokens());
      rows = std::max(rows, static_cast<int64_t>(slots.expert.size()));
    }
    MOE_RETURN_IF_ERROR(Fill(tokens, 0, "tokens", tokens_));
    MOE_RETURN_IF_ERROR(Fill(rows, 1, "rows", rows_));
    MOE_ASSIGN_OR_RETURN(
        out_, Mirrored<T>::Allocate(std::max(tokens, rows) * spec_.hidden, device_, "results"));
    MOE_ASSIGN_OR_RETURN(d_weight_, Mirrored<float>::Allocate(rows, device_, "gradients"));
    if (spec_.op == KernelOp::kPermute) {
      Add(this, device_, "forward", "gather", &RowKernels::GatherBytes, &RowKernels::Gather,
          &RowKernels::WrongGather, out_.bytes());
      Add(this, device_, "backward", "sum", &RowKernels::SumBytes, &RowKernels::SumUp,
          &RowKernels::WrongSum, out_.bytes());
      return absl::OkStatus();
    }
    Add(this, device_, "forward", "combine", &RowKernels::CombineBytes, &RowKernels::Combine,
        &RowKernels::WrongCombine, out_.bytes());
    Add(this, device_, "backward", "scale", &RowKernels::ScaleBytes, &RowKernels::Scale,
        &RowKernels::WrongScale, out_.bytes());
    Add(this, device_, "backward", "weight_grad", &RowKernels::WeightGradientBytes,
        &RowKernels::WeightGradient, &RowKernels::WrongWeightGradient, d_weight_.bytes());
    return absl::OkStatus();
  }

 private:
  friend class KernelCases;

  absl::Status Turn(int64_t record) {
    if (record == record_) return absl::OkStatus();
    MOE_ASSIGN_OR_RETURN(TokenSlots slots, KernelSlots(spec_, record));
    grouping_ = Group(spec_, std::move(slots));
    MOE_ASSIGN_OR_RETURN(arrays_, ArraysOf(grouping_, device_));
    record_ = record;
    return absl::OkStatus();
  }

  absl::Status Fill(int64_t rows, uint32_t which, const char* name, Mirrored<T>& array) {
    MOE_ASSIGN_OR_RETURN(array, Mirrored<T>::Allocate(rows * spec_.hidden, device_, name));
    const absl::Span<T> values = array.host();
    const auto count = static_cast<int64_t>(values.size());
    device_.threads().For((count + 3) / 4, kFillGrain, [&](int64_t begin, int64_t end) {
      for (int64_t block = begin; block < end; ++block) {
        const auto four = SmallNumbers(spec_.seed, which, block, -4, 9);
        for (int64_t i = 4 * block; i < std::min(4 * block + 4, count); ++i) {
          values[i] = T(static_cast<float>(four[i % 4]));
        }
      }
    });
    return array.Upload();
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

  // On the device, and on the host.
  MatrixView<const T> Tokens() const { return View<const T>(tokens_.device(), tokens()); }
  MatrixView<const T> ExpertRows() const { return View<const T>(rows_.device(), N()); }
  MatrixView<T> Out(int64_t rows) const { return View<T>(out_.device(), rows); }
  MatrixView<const T> HostTokens() const { return View<const T>(tokens_.host(), tokens()); }
  MatrixView<const T> HostRows() const { return View<const T>(rows_.host(), N()); }
  template <typename U>
  MatrixView<U> View(absl::Span<T> memory, int64_t rows) const {
    return {memory.data(), rows, spec_.hidden};
  }

  absl::Status Gather() {
    return GatherRows<T>(Tokens(), arrays_.token_of_row.device(), Out(N()), device_.stream());
  }
  absl::Status Scale() {
    return GatherScaledRows<T>(Tokens(), arrays_.token_of_row.device(), arrays_.scale.device(),
                               Out(N()), device_.stream());
  }
  absl::Status SumUp() { return CombineWith({}); }
  absl::Status Combine() { return CombineWith(arrays_.weight.device()); }
  absl::Status CombineWith(absl::Span<const float> weight) {
    return CombineRows<T>(ExpertRows(), arrays_.slot_offset.device(), arrays_.row_of_slot.device(),
                          weight, Out(tokens()), Write::kOverwrite, device_.stream());
  }
  absl::Status WeightGradient() {
    return CombineWeightGradient<T>(
        Tokens(), ExpertRows(), arrays_.slot_offset.device(), arrays_.row_of_slot.device(),
        d_weight_.device().first(grouping_.weight.size()), device_.stream());
  }

  static int64_t Whole(T value) { return static_cast<int64_t>(static_cast<float>(value)); }
  static T FromEighths(int64_t eighths) { return T(static_cast<float>(eighths) / kParts); }

  // Rows that this check looks at, each computed from `sources` rows.
  RowStretch NextChecked(int64_t rows, int64_t sources) {
    return CheckedRows(device_, checks_++, rows, static_cast<int64_t>(RowBytes(sources)));
  }
  // Elements among the first `rows` rows of the result that are not eighths(row, column) / 8.
  template <typename Eighths>
  absl::StatusOr<int64_t> CountWrong(int64_t rows, int64_t sources, Eighths eighths) {
    const RowStretch range = NextChecked(rows, sources);
    MOE_RETURN_IF_ERROR(out_.Download(range.begin * spec_.hidden, range.end * spec_.hidden));
    const MatrixView<T> out = View<T>(out_.host(), rows);
    int64_t wrong = 0;
    for (int64_t r = range.begin; r < range.end; ++r) {
      for (int64_t h = 0; h < spec_.hidden; ++h) {
        wrong += !(out(r, h) == FromEighths(eighths(r, h)));
      }
    }
    return wrong;
  }
  absl::StatusOr<int64_t> WrongGather() {
    return CountWrong(N(), 1, [&](int64_t r, int64_t h) {
      return kParts * Whole(HostTokens()(grouping_.token_of_row[r], h));
    });
  }
  absl::StatusOr<int64_t> WrongScale() {
    return CountWrong(N(), 1, [&](int64_t r, int64_t h) {
      return static_cast<int64_t>(grouping_.scale[r] * kParts) *
             Whole(HostTokens()(grouping_.token_of_row[r], h));
    });
  }
  int64_t SlotsOfToken() const { return N() / std::max<int64_t>(1, tokens()) + 1; }
  // Sum over the slots of a token of factor(slot) * its row.
  template <typename Factor>
  absl::StatusOr<int64_t> WrongSumOf(Factor factor) {
    return CountWrong(tokens(), SlotsOfToken(), [&](int64_t t, int64_t h) {
      int64_t sum = 0;
      for (int64_t s = grouping_.slots.slot_offset[t]; s < grouping_.slots.slot_offset[t + 1];
           ++s) {
        sum += factor(s) * Whole(HostRows()(grouping_.row_of_slot[s], h));
      }
      return sum;
    });
  }
  absl::StatusOr<int64_t> WrongSum() {
    return WrongSumOf([](int64_t) { return int64_t{kParts}; });
  }
  absl::StatusOr<int64_t> WrongCombine() {
    return WrongSumOf([&](int64_t s) { return int64_t{grouping_.eighths[s]}; });
  }
  absl::StatusOr<int64_t> WrongWeightGradient() {
    const std::vector<int64_t>& offset = grouping_.slots.slot_offset;
    const RowStretch range = NextChecked(tokens(), SlotsOfToken());
    MOE_RETURN_IF_ERROR(d_weight_.Download(offset[range.begin], offset[range.end]));
    int64_t wrong = 0;
    for (int64_t t = range.begin; t < range.end; ++t) {
      for (int64_t s = offset[t]; s < offset[t + 1]; ++s) {
        int64_t dot = 0;
        for (int64_t h = 0; h < spec_.hidden; ++h) {
          dot += Whole(HostTokens()(t, h)) * Whole(HostRows()(grouping_.row_of_slot[s], h));
        }
        wrong += d_weight_.host()[s] != static_cast<float>(dot);
      }
    }
    return wrong;
  }

  const KernelSpec spec_;
  KernelDevice& device_;
  int64_t record_ = -1, checks_ = 0;
  Grouping grouping_;  // of record_
  GroupingArrays arrays_;
  Mirrored<T> tokens_, rows_, out_;
  Mirrored<float> d_weight_;
};

}  // namespace

absl::StatusOr<std::unique_ptr<KernelCases>> MakeRowCases(const KernelSpec& spec,
                                                          KernelDevice& device) {
  return MakeCases<RowKernels>("MakeRowCases", spec, device);
}

}  // namespace moe::bench
