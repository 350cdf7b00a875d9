// Which rank of an expert-parallel group holds which expert.
#ifndef MOE_DISPATCH_PLACEMENT_H_
#define MOE_DISPATCH_PLACEMENT_H_

#include <cstdint>

namespace moe {

// Experts in contiguous blocks, as even as possible: the first E mod R ranks hold one more.
// E < R leaves the last ranks without an expert.
class ExpertPlacement {
 public:
  ExpertPlacement(int32_t num_experts, int ranks) : experts_(num_experts), ranks_(ranks) {}

  int32_t num_experts() const { return experts_; }
  int ranks() const { return ranks_; }
  // First expert of `rank`; FirstExpert(ranks()) == num_experts().
  int32_t FirstExpert(int rank) const {
    const int32_t extra = experts_ % ranks_;
    return rank * (experts_ / ranks_) + (rank < extra ? rank : extra);
  }
  // L of `rank`.
  int32_t LocalExperts(int rank) const { return FirstExpert(rank + 1) - FirstExpert(rank); }
  int RankOf(int32_t expert) const {
    const int32_t each = experts_ / ranks_;
    const int32_t extra = experts_ % ranks_;
    const int32_t in_larger = extra * (each + 1);
    if (expert < in_larger) return expert / (each + 1);
    return extra + (expert - in_larger) / each;
  }

 private:
  int32_t experts_;
  int ranks_;
};

}  // namespace moe

#endif  // MOE_DISPATCH_PLACEMENT_H_
