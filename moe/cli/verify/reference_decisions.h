// Comparisons of the reference, and whether float32 may take them the other way. Internal.
#ifndef MOE_MOE_CLI_VERIFY_REFERENCE_DECISIONS_H_
#define MOE_MOE_CLI_VERIFY_REFERENCE_DECISIONS_H_

#include <cstdint>
#include <string>
#include <vector>

#include "moe/cli/verify/reference_parts.h"

namespace moe::verify {

// Compares as the definitions do, and notes where float32 might not.
class Decisions {
 public:
  explicit Decisions(std::string& undecided) : undecided_(undecided) {}

  // a and b are compared somewhere: is their order certain?
  void Check(const Bounded& a, const Bounded& b, const std::string& what);

  // Ids 0 .. n-1 with the largest value first, ties to the lowest id. Every comparison among the
  // first `count` and with the next is checked.
  std::vector<int32_t> Largest(const std::vector<Bounded>& value, int64_t count,
                               const std::string& what);

 private:
  std::string& undecided_;
};

// value [tokens] of the tokens of `range`: what Sinkhorn selects by, [outputs] each.
void AddSinkhornValues(const std::vector<ReferenceToken>& tokens, TokenRange range, int64_t outputs,
                       Decisions& decisions, std::vector<std::vector<Bounded>>& value);

}  // namespace moe::verify

#endif  // MOE_MOE_CLI_VERIFY_REFERENCE_DECISIONS_H_
