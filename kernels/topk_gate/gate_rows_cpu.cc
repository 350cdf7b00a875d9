#include <algorithm>
#include <bit>
#include <cstdint>
#include <limits>

#include <absl/container/inlined_vector.h>

#include "kernels/base/highway_targets.h"
#include "kernels/topk_gate/gate_rows.h"
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/topk_gate/gate_rows_cpu.cc"
#include <hwy/foreach_target.h>
// After foreach_target.h.
#include "kernels/base/simd-inl.h"

HWY_BEFORE_NAMESPACE();
namespace moe {
namespace HWY_NAMESPACE {
namespace {

// Rows of expert scores in SIMD lanes: order-preserving keys; the search for the best of them, in
// sorted lists, one in each lane, which takes many comparisons with few dependencies; and the sum
// of exponentials. A row is padded to whole blocks of kPartials experts, so that body and tail are
// the same code.

// Ranks: doubles in [1, 2); 0 is below all of them.
using RankTag = hn::CappedTag<double, kPartials / 2>;
using RankLanes = hn::Vec<RankTag>;
constexpr int64_t kRankLanes = static_cast<int64_t>(hn::MaxLanes(RankTag()));

// A sorted list in each lane, largest rank first.
constexpr int64_t kListRanks = 8;
struct RankLists {
  RankLanes rank[kListRanks];
};

// Exchanges two vectors lane by lane so that the larger values come first.
template <int kFirst, int kSecond>
HWY_INLINE void PutInOrder(RankLists& lists) {
  RankLanes &first = lists.rank[kFirst], &second = lists.rank[kSecond];
  const auto larger = hn::Max(first, second);
  second = hn::Min(first, second);
  first = larger;
}

// Sorts lists in any order: a network of 19 comparisons, the fewest for eight.
HWY_INLINE void Sort(RankLists& lists) {
  PutInOrder<0, 2>(lists), PutInOrder<1, 3>(lists), PutInOrder<4, 6>(lists);
  PutInOrder<5, 7>(lists), PutInOrder<0, 4>(lists), PutInOrder<1, 5>(lists);
  PutInOrder<2, 6>(lists), PutInOrder<3, 7>(lists), PutInOrder<0, 1>(lists);
  PutInOrder<2, 3>(lists), PutInOrder<4, 5>(lists), PutInOrder<6, 7>(lists);
  PutInOrder<2, 4>(lists), PutInOrder<3, 5>(lists), PutInOrder<1, 4>(lists);
  PutInOrder<3, 6>(lists), PutInOrder<1, 2>(lists), PutInOrder<3, 4>(lists);
  PutInOrder<5, 6>(lists);
}

// The best ranks of both lists in each lane.
HWY_INLINE RankLists Merge(const RankLists& a, const RankLists& b) {
  // The maxima of a descending and an ascending list are the best of both, in bitonic order.
  RankLists best;
  MOE_UNROLL for (int64_t i = 0; i < kListRanks; ++i) {
    best.rank[i] = hn::Max(a.rank[i], b.rank[kListRanks - 1 - i]);
  }
  PutInOrder<0, 4>(best), PutInOrder<1, 5>(best), PutInOrder<2, 6>(best), PutInOrder<3, 7>(best);
  PutInOrder<0, 2>(best), PutInOrder<1, 3>(best), PutInOrder<4, 6>(best), PutInOrder<5, 7>(best);
  PutInOrder<0, 1>(best), PutInOrder<2, 3>(best), PutInOrder<4, 5>(best), PutInOrder<6, 7>(best);
  return best;
}

// Sorted lists of vectors [begin, begin + kListRanks) of a row of `vectors`; missing ones are 0.
HWY_INLINE RankLists ListsOf(const double* ranks, int64_t vectors, int64_t begin) {
  const RankTag d;
  RankLists lists;
  MOE_UNROLL for (int64_t i = 0; i < kListRanks; ++i) {
    lists.rank[i] =
        begin + i < vectors ? hn::LoadU(d, ranks + (begin + i) * kRankLanes) : hn::Zero(d);
  }
  Sort(lists);
  return lists;
}

// The best ranks of a row [padded], as one list per lane.
HWY_INLINE RankLists ListsOfRow(const double* ranks, int64_t padded) {
  const int64_t vectors = padded / kRankLanes;
  RankLists best = ListsOf(ranks, vectors, 0);
  for (int64_t v = kListRanks; v < vectors; v += kListRanks) {
    best = Merge(best, ListsOf(ranks, vectors, v));
  }
  return best;
}

#if HWY_TARGET != HWY_SCALAR
// Merges the lists of neighbouring lanes: half as many lists of two rows, a's first.
HWY_INLINE RankLists MergeNeighbours(const RankLists& a, const RankLists& b) {
  const RankTag d;
  RankLists even, odd;
  MOE_UNROLL for (int64_t i = 0; i < kListRanks; ++i) {
    even.rank[i] = hn::ConcatEven(d, b.rank[i], a.rank[i]);
    odd.rank[i] = hn::ConcatOdd(d, b.rank[i], a.rank[i]);
  }
  return Merge(even, odd);
}
#endif

// The best ranks of `rows` <= kRankLanes rows [rows, padded], row r's in lane r.
HWY_INLINE RankLists ListOfEachRow(const double* ranks, int64_t rows, int64_t padded) {
  RankLists lists[kRankLanes];
  for (int64_t r = 0; r < kRankLanes; ++r) {
    lists[r] = ListsOfRow(ranks + std::min(r, rows - 1) * padded, padded);
  }
#if HWY_TARGET != HWY_SCALAR
  for (int64_t n = kRankLanes / 2; n > 0; n /= 2) {
    for (int64_t i = 0; i < n; ++i) lists[i] = MergeNeighbours(lists[2 * i], lists[2 * i + 1]);
  }
#endif
  return lists[0];
}

using KeyTag = hn::RebindToSigned<FloatTag>;
using KeyLanes = hn::Vec<KeyTag>;

// Order-preserving keys. The key of a number is at least that of -infinity, 0x807fffff.
constexpr int32_t kPaddingKey = std::numeric_limits<int32_t>::min();
constexpr int32_t kNanKey = kPaddingKey + 1;

HWY_INLINE int64_t PaddedExperts(int64_t experts) {
  return (experts + kPartials - 1) / kPartials * kPartials;
}

// to [padded] = from [experts], then -infinity, whose exponential is 0.
HWY_INLINE void CopyPadded(const float* from, int64_t experts, int64_t padded, float* to) {
  std::copy_n(from, experts, to);
  std::fill(to + experts, to + padded, -std::numeric_limits<float>::infinity());
}

// Signed integers in the order of the floats; -0 counts as +0, a NaN is below -infinity.
HWY_INLINE KeyLanes KeyOf(FloatLanes x) {
  const KeyTag d;
  const auto bits = hn::BitCast(d, hn::Add(x, hn::Zero(FloatTag())));  // -0 + 0 = +0
  const auto flip = hn::And(hn::ShiftRight<31>(bits), hn::Set(d, 0x7fffffff));
  const auto is_nan = hn::RebindMask(d, hn::IsNaN(x));
  return hn::IfThenElse(is_nan, hn::Set(d, kNanKey), hn::Xor(bits, flip));
}

// The keys of row [experts], then those of the padding, below every other.
HWY_INLINE void WriteKeys(const float* row, int64_t experts, int64_t padded, int32_t* keys) {
  int64_t e = 0;
  for (; e + kLanes <= experts; e += kLanes) {
    hn::StoreU(KeyOf(LoadLanes(row + e)), KeyTag(), keys + e);
  }
  if (e < experts) hn::StoreU(KeyOf(LoadFirst(row + e, experts - e)), KeyTag(), keys + e);
  std::fill(keys + experts, keys + padded, kPaddingKey);
}

// Ranks: a number for every expert of a row, larger for a larger score and, among equals, for a
// lower id. No two are equal, so that the next best is the largest below the previous one: no
// expert has to be marked as taken, and no branch depends on which is the best. They are doubles in
// [1, 2), because every target has a maximum of doubles in one instruction: the upper 32 bits of
// the mantissa are the key, the lower 20 the complement of the id.
constexpr uint64_t kIdMask = (uint64_t{1} << kExpertIdBits) - 1;
// Rows that are searched at a time: a search is bound by the latency of its own steps, and lists
// hold as many rows as there are lanes.
constexpr int64_t kRankRows = std::max<int64_t>(4, kRankLanes);

// The largest of ranks [padded] below `bound`, in every lane.
HWY_INLINE RankLanes LargestBelow(const double* ranks, int64_t padded, RankLanes bound) {
  const RankTag d;
  RankLanes even = hn::Zero(d), odd = hn::Zero(d);
  for (int64_t e = 0; e < padded; e += 2 * kRankLanes) {
    const auto a = hn::LoadU(d, ranks + e), b = hn::LoadU(d, ranks + e + kRankLanes);
    even = hn::Max(even, hn::IfThenElseZero(hn::Lt(a, bound), a));
    odd = hn::Max(odd, hn::IfThenElseZero(hn::Lt(b, bound), b));
  }
  return hn::MaxOfLanes(d, hn::Max(even, odd));
}

// The ranks of kRankRows rows, and the scratch to compute them.
class Ranking {
 public:
  explicit Ranking(int64_t experts)
      : experts_(experts),
        padded_(PaddedExperts(experts)),
        keys_(static_cast<size_t>(padded_)),
        ids_(static_cast<size_t>(padded_)),
        ranks_(static_cast<size_t>(kRankRows * padded_)) {
    for (size_t e = 0; e < ids_.size(); ++e) {
      ids_[e] = std::bit_cast<uint64_t>(1.0) | (kIdMask - e);
    }
  }

  // Ranks the experts of row number r.
  HWY_INLINE void Add(int64_t r, const float* row) {
    WriteKeys(row, experts_, padded_, keys_.data());
    const RankTag d;
    const hn::RebindToUnsigned<RankTag> bits;
    const hn::Rebind<uint32_t, RankTag> narrow;
    const auto sign = hn::Set(narrow, 0x80000000u);
    double* const ranks = ranks_.data() + r * padded_;
    for (int64_t e = 0; e < padded_; e += kRankLanes) {
      const auto key = hn::LoadU(narrow, reinterpret_cast<const uint32_t*>(keys_.data() + e));
      const auto wide = hn::ShiftLeft<kExpertIdBits>(hn::PromoteTo(bits, hn::Xor(key, sign)));
      hn::StoreU(hn::BitCast(d, hn::Or(wide, hn::LoadU(bits, ids_.data() + e))), d, ranks + e);
    }
  }

  // expert [rows, K] = the ids of the K best of rows 0, 1 ..., best first.
  HWY_INLINE void TakeBest(MatrixView<int32_t> expert) const {
    // The cost of lists does not depend on K.
    if (kRankLanes > 1 && expert.cols() >= kFewestListed && expert.cols() <= kListRanks) {
      TakeLists(expert);
    } else {
      TakeInTurn(expert);
    }
  }

 private:
  static constexpr int64_t kFewestListed = 5;

  HWY_INLINE void TakeLists(MatrixView<int32_t> expert) const {
    for (int64_t r = 0; r < expert.rows(); r += kRankLanes) {
      const int64_t rows = std::min(kRankLanes, expert.rows() - r);
      const RankLists best = ListOfEachRow(ranks_.data() + r * padded_, rows, padded_);
      double ranks[kListRanks][kRankLanes];
      for (int64_t j = 0; j < kListRanks; ++j) hn::StoreU(best.rank[j], RankTag(), ranks[j]);
      for (int64_t t = 0; t < rows; ++t) {
        for (int64_t j = 0; j < expert.cols(); ++j) expert(r + t, j) = IdOf(ranks[j][t]);
      }
    }
  }

  HWY_INLINE void TakeInTurn(MatrixView<int32_t> expert) const {
    RankLanes last[kRankRows];
    for (auto& bound : last) bound = hn::Set(RankTag(), 2.0);
    for (int64_t j = 0; j < expert.cols(); ++j) {
      for (int64_t r = 0; r < expert.rows(); ++r) {
        last[r] = LargestBelow(ranks_.data() + r * padded_, padded_, last[r]);
        expert(r, j) = IdOf(hn::GetLane(last[r]));
      }
    }
  }

  static HWY_INLINE int32_t IdOf(double rank) {
    return static_cast<int32_t>(kIdMask - (std::bit_cast<uint64_t>(rank) & kIdMask));
  }

  const int64_t experts_, padded_;
  absl::InlinedVector<int32_t, kMostInlineExperts> keys_;  // keys of one row
  // The bits of ranks that are the same in every row: the exponent and the ids.
  absl::InlinedVector<uint64_t, kMostInlineExperts> ids_;
  absl::InlinedVector<double, kRankRows * kMostInlineExperts> ranks_;
};

// out[e] = exp(row[e] - max) for the largest number of row [padded], in place if out is row; the
// sum is in the order of SelectExperts' contract.
HWY_INLINE ExpSum ExpAndSum(const float* row, int64_t padded, float* out) {
  const FloatTag d;
  const auto lowest = hn::Set(d, -std::numeric_limits<float>::infinity());
  auto max = lowest;
  for (int64_t e = 0; e < padded; e += kLanes) {
    const auto x = LoadLanes(row + e);
    max = hn::Max(max, hn::IfThenElse(hn::IsNaN(x), lowest, x));
  }
  max = hn::MaxOfLanes(d, max);
  FixedPartials partial;
  for (int64_t e = 0; e < padded; e += kPartials) {
    for (int64_t j = 0; j < kPartials / kLanes; ++j) {
      const int64_t at = e + j * kLanes;
      const auto x = hn::Sub(LoadLanes(row + at), max);
      const auto y = hn::IfThenElse(hn::IsNaN(x), x, hn::Exp(d, x));  // Exp(NaN) is 0
      StoreLanes(y, out + at);
      partial.lanes[j] = hn::Add(partial.lanes[j], y);
    }
  }
  return {.max = hn::GetLane(max), .sum = partial.Fold()};
}

HWY_INLINE void DivideBy(float sum, int64_t padded, float* row) {
  const auto divisor = hn::Set(FloatTag(), sum);
  for (int64_t e = 0; e < padded; e += kLanes) {
    StoreLanes(hn::Div(LoadLanes(row + e), divisor), row + e);
  }
}

// The scratch of one task.
class Rows {
 public:
  Rows(MatrixView<const float> logits, const SelectExpertsOutput& out)
      : logits_(logits),
        out_(out),
        padded_(PaddedExperts(logits.cols())),
        row_(static_cast<size_t>(padded_)),
        ranking_(logits.cols()) {}

  // Processes rows [begin, end), at most kRankRows.
  HWY_INLINE void Run(int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      ranking_.Add(t - begin, logits_.row(t));
      Score(t);
    }
    ranking_.TakeBest(RowRange(out_.expert, begin, end));
    for (int64_t t = begin; t < end; ++t) {
      for (int64_t j = 0; j < out_.expert.cols(); ++j) {
        out_.weight(t, j) = out_.score(t, out_.expert(t, j));
      }
    }
  }

 private:
  HWY_INLINE void Score(int64_t t) {
    const int64_t experts = logits_.cols();
    const bool whole = experts == padded_;
    const float* in = logits_.row(t);
    if (!whole) CopyPadded(in, experts, padded_, row_.data());
    float* const probs = whole ? out_.score.row(t) : row_.data();
    in = whole ? in : row_.data();
    const ExpSum sum = ExpAndSum(in, padded_, probs);
    DivideBy(sum.sum, padded_, probs);
    if (!whole) std::copy_n(probs, experts, out_.score.row(t));
    if (!out_.log_sum_exp.empty()) out_.log_sum_exp[static_cast<size_t>(t)] = LogSumExp(sum);
  }

  const MatrixView<const float> logits_;
  const SelectExpertsOutput& out_;
  const int64_t padded_;
  // used if the experts do not fill whole vectors
  absl::InlinedVector<float, kMostInlineExperts> row_;
  Ranking ranking_;
};

void SoftmaxRows(MatrixView<const float> logits, const SelectExpertsOutput& out, int64_t begin,
                 int64_t end) {
  Rows rows(logits, out);
  for (int64_t t = begin; t < end; t += kRankRows) rows.Run(t, std::min(end, t + kRankRows));
}

void SelectRows(MatrixView<const float> value, MatrixView<int32_t> expert, int64_t begin,
                int64_t end) {
  Ranking ranking(value.cols());
  for (int64_t first = begin; first < end; first += kRankRows) {
    const int64_t last = std::min(end, first + kRankRows);
    for (int64_t t = first; t < last; ++t) ranking.Add(t - first, value.row(t));
    ranking.TakeBest(RowRange(expert, first, last));
  }
}

// n / d with e = exp(-|x|), d = 1 + e and n = e below 0, otherwise 1: nothing overflows, and small
// scores keep their digits. The plain quotient q has an error of up to 2.3 ulp: 1 ulp of e may be 2
// of q, and the rounding of d adds up to 1. That rounding error is exactly e - (d - 1); it changes
// the quotient by -q error / d, where 1 - q (below 0) or q is 1 / d.
HWY_INLINE FloatLanes AccurateSigmoid(FloatLanes x) {
  const auto zero = hn::Zero(FloatTag()), one = hn::Set(FloatTag(), 1.0f);
  const auto e = ExpLanes(hn::Neg(hn::Abs(x)));
  const auto d = hn::Add(one, e);
  const auto lost = hn::Sub(e, hn::Sub(d, one));
  const auto below = hn::Lt(x, zero);
  const auto q = hn::Div(hn::IfThenElse(below, e, one), d);
  const auto reciprocal = hn::IfThenElse(below, hn::Sub(one, q), q);
  return hn::NegMulAdd(hn::Mul(q, lost), reciprocal, q);
}

HWY_INLINE void ScoreRow(const float* logits, int64_t experts, float* score) {
  ForLanes(experts, [&](int64_t e, auto lanes) MOE_LANES {
    lanes.Store(AccurateSigmoid(lanes.Load(logits + e)), score + e);
  });
}

void ScoreRows(MatrixView<const float> logits, MatrixView<float> score,
               absl::Span<float> log_sum_exp, int64_t begin, int64_t end) {
  const int64_t experts = logits.cols();
  for (int64_t t = begin; t < end; ++t) ScoreRow(logits.row(t), experts, score.row(t));
  if (log_sum_exp.empty()) return;
  const int64_t padded = PaddedExperts(experts);
  absl::InlinedVector<float, kMostInlineExperts> row(static_cast<size_t>(padded));
  for (int64_t t = begin; t < end; ++t) {
    CopyPadded(logits.row(t), experts, padded, row.data());
    log_sum_exp[static_cast<size_t>(t)] = LogSumExp(ExpAndSum(row.data(), padded, row.data()));
  }
}

// There are few choices: a wider vector would seldom be full.
using ChoiceTag = hn::CappedTag<float, 4>;
constexpr int64_t kChoiceLanes = static_cast<int64_t>(hn::MaxLanes(ChoiceTag()));

HWY_INLINE float SumOf(const float* row, int64_t k) {
  float sum = 0;
  for (int64_t j = 0; j < k; ++j) sum += row[j];
  return sum;
}

// row[j] = row[j] / sum * scale.
HWY_INLINE void DivideAndScale(float sum, float scale, int64_t k, float* row) {
  const ChoiceTag d;
  const auto divisor = hn::Set(d, sum), factor = hn::Set(d, scale);
  int64_t j = 0;
  for (; j + kChoiceLanes <= k; j += kChoiceLanes) {
    hn::StoreU(hn::Mul(hn::Div(hn::LoadU(d, row + j), divisor), factor), d, row + j);
  }
  for (; j < k; ++j) row[j] = row[j] / sum * scale;
}

void WeighRows(MatrixView<float> weight, const GateRule& rule, int64_t begin, int64_t end) {
  const int64_t k = weight.cols();
  for (int64_t t = begin; t < end; ++t) {
    float* const row = weight.row(t);
    const float sum =
        rule.weights == GateWeights::kNormalised ? SumOf(row, k) + rule.epsilon : 1.0f;
    DivideAndScale(sum == 0 ? 1.0f : sum, rule.scale, k, row);
  }
}

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace moe
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace moe {

void SoftmaxTopKCpu(MatrixView<const float> logits, const SelectExpertsOutput& out, int64_t begin,
                    int64_t end) {
  MOE_SIMD(SoftmaxRows)(logits, out, begin, end);
}

void TopKSelectCpu(MatrixView<const float> value, MatrixView<int32_t> expert, int64_t begin,
                   int64_t end) {
  MOE_SIMD(SelectRows)(value, expert, begin, end);
}

void SigmoidScoresCpu(MatrixView<const float> logits, MatrixView<float> score,
                      absl::Span<float> log_sum_exp, int64_t begin, int64_t end) {
  MOE_SIMD(ScoreRows)(logits, score, log_sum_exp, begin, end);
}

void WeighRowsCpu(MatrixView<float> weight, const GateRule& rule, int64_t begin, int64_t end) {
  if (rule.weights == GateWeights::kScores && rule.scale == 1) return;
  MOE_SIMD(WeighRows)(weight, rule, begin, end);
}

}  // namespace moe
#endif  // HWY_ONCE
