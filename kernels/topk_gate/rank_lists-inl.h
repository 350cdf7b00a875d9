// The best ranks of rows as sorted lists, one in each lane: their comparisons are many but wait for
// one another seldom. For sources that Highway compiles once per target.
// (No plain include guard: foreach_target.h includes this file once per target.)
#if defined(MOE_KERNELS_TOPK_GATE_RANK_LISTS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef MOE_KERNELS_TOPK_GATE_RANK_LISTS_INL_H_
#undef MOE_KERNELS_TOPK_GATE_RANK_LISTS_INL_H_
#else
#define MOE_KERNELS_TOPK_GATE_RANK_LISTS_INL_H_
#endif

#include <algorithm>
#include <cstdint>

#include "kernels/base/simd-inl.h"

HWY_BEFORE_NAMESPACE();
namespace moe {
namespace HWY_NAMESPACE {

// Ranks: doubles in [1, 2), see gate_rows-inl.h; 0 is below all of them.
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

}  // namespace HWY_NAMESPACE
}  // namespace moe
HWY_AFTER_NAMESPACE();

#endif  // MOE_KERNELS_TOPK_GATE_RANK_LISTS_INL_H_
