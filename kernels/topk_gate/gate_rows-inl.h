// Rows of expert scores as SIMD lanes: order-preserving keys, the search for the best of them, in
// sorted lists, one in each lane, whose comparisons are many but wait for one another seldom; and
// the sum of exponentials. For sources that Highway compiles once per target.
// A row is padded to whole blocks of kPartials experts, so that body and tail are the same code.
// (No plain include guard: foreach_target.h includes this file once per target.)
#if defined(MOE_KERNELS_TOPK_GATE_GATE_ROWS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef MOE_KERNELS_TOPK_GATE_GATE_ROWS_INL_H_
#undef MOE_KERNELS_TOPK_GATE_GATE_ROWS_INL_H_
#else
#define MOE_KERNELS_TOPK_GATE_GATE_ROWS_INL_H_
#endif

#include <algorithm>
#include <bit>
#include <cstdint>
#include <limits>

#include <absl/container/inlined_vector.h>

#include "kernels/base/simd-inl.h"
#include "kernels/topk_gate/gate_rows.h"

HWY_BEFORE_NAMESPACE();
namespace moe {
namespace HWY_NAMESPACE {

// Ranks: doubles in [1, 2); 0 is below all of them.
using RankTag = hn::CappedTag<double, kPartials / 2>;
using RankLanes = hn::Vec<RankTag>;
constexpr int64_t kRankLanes = static_cast<int64_t>(hn::MaxLanes(RankTag()));

// A list in each lane, largest rank first.
constexpr int64_t kListRanks = 8;
struct RankLists {
  RankLanes rank[kListRanks];
};

// The larger of two first, lane by lane.
template <int kFirst, int kSecond>
HWY_INLINE void PutInOrder(RankLists& lists) {
  RankLanes &first = lists.rank[kFirst], &second = lists.rank[kSecond];
  const auto larger = hn::Max(first, second);
  second = hn::Min(first, second);
  first = larger;
}

// From any order: a network of 19 comparisons, the fewest for eight.
HWY_INLINE void Sort(RankLists& lists) {
  PutInOrder<0, 2>(lists), PutInOrder<1, 3>(lists), PutInOrder<4, 6>(lists);
  PutInOrder<5, 7>(lists), PutInOrder<0, 4>(lists), PutInOrder<1, 5>(lists);
  PutInOrder<2, 6>(lists), PutInOrder<3, 7>(lists), PutInOrder<0, 1>(lists);
  PutInOrder<2, 3>(lists), PutInOrder<4, 5>(lists), PutInOrder<6, 7>(lists);
  PutInOrder<2, 4>(lists), PutInOrder<3, 5>(lists), PutInOrder<1, 4>(lists);
  PutInOrder<3, 6>(lists), PutInOrder<1, 2>(lists), PutInOrder<3, 4>(lists);
  PutInOrder<5, 6>(lists);
}

// The best of both lists of a lane.
HWY_INLINE RankLists Merge(const RankLists& a, const RankLists& b) {
  // The larger of a falling and a rising list: the best of both, in a bitonic order.
  RankLists best;
  MOE_UNROLL for (int64_t i = 0; i < kListRanks; ++i) {
    best.rank[i] = hn::Max(a.rank[i], b.rank[kListRanks - 1 - i]);
  }
  PutInOrder<0, 4>(best), PutInOrder<1, 5>(best), PutInOrder<2, 6>(best), PutInOrder<3, 7>(best);
  PutInOrder<0, 2>(best), PutInOrder<1, 3>(best), PutInOrder<4, 6>(best), PutInOrder<5, 7>(best);
  PutInOrder<0, 1>(best), PutInOrder<2, 3>(best), PutInOrder<4, 5>(best), PutInOrder<6, 7>(best);
  return best;
}

// Of vectors [begin, begin + kListRanks) of a row of `vectors`, those that there are.
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

// The best of row ranks [padded], as one list per lane.
HWY_INLINE RankLists ListsOfRow(const double* ranks, int64_t padded) {
  const int64_t vectors = padded / kRankLanes;
  RankLists best = ListsOf(ranks, vectors, 0);
  for (int64_t v = kListRanks; v < vectors; v += kListRanks) {
    best = Merge(best, ListsOf(ranks, vectors, v));
  }
  return best;
}

#if HWY_TARGET != HWY_SCALAR
// Lists of half as many lanes of two rows, a's first.
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

// The best of `rows` <= kRankLanes rows of ranks [rows, padded], row r's in lane r.
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

// Order-preserving keys. No key of a number is below that of -infinity, 0x807fffff.
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

// Ranks: a number for every expert of a row, larger for the better one and for the lower id among
// equals, so that no two are equal and the next best is the largest below the last: nothing has to
// be marked as taken, and no branch depends on where the best is. Doubles in [1, 2), because every
// target has their maximum in one instruction: the upper 32 bits of the mantissa are the key, the
// lower 20 the complement of the id.
constexpr uint64_t kIdMask = (uint64_t{1} << kExpertIdBits) - 1;
// Rows whose experts are looked for at a time: a search waits for its own steps most of the time,
// and lists are of as many rows as there are lanes.
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

// The ranks of kRankRows rows, and the scratch to make them.
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

  // Ranks the experts of one row, as number r.
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
    // Lists cost the same for every K.
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
  absl::InlinedVector<int32_t, kMostInlineExperts> keys_;  // of one row
  // What ranks have in common over rows: the exponent and the ids.
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

}  // namespace HWY_NAMESPACE
}  // namespace moe
HWY_AFTER_NAMESPACE();

#endif  // MOE_KERNELS_TOPK_GATE_GATE_ROWS_INL_H_
