// Runs problems in layouts and compares their results.
#ifndef MOE_MOE_CLI_VERIFY_VERIFY_H_
#define MOE_MOE_CLI_VERIFY_VERIFY_H_

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "comm/create.h"
#include "kernels/grouped_gemm/gemm_options.h"
#include "moe/cli/verify/axes.h"
#include "moe/cli/verify/compare.h"
#include "moe/cli/verify/faults.h"
#include "moe/cli/verify/problem.h"
#include "moe/run/context.h"

namespace moe::verify {

// One run of one problem.
struct Case {
  size_t problem = 0;
  Numerics numerics = Numerics::kLayoutInvariant;
  Layout layout;
};

struct VerifyPlan {
  std::vector<Problem> problems;  // of one type
  std::vector<Case> cases;
  Fault fault = Fault::kNone;
  DeviceKind device = DeviceKind::kCpu;  // device of all ranks
  // Order of bfloat16 products, the same in all cases; left out: that of AgreedBFloat16Order for
  // the processes of the launch.
  std::optional<BFloat16Order> bfloat16_order;
  // Options of ranks that are threads; the plan in them is replaced by each case's.
  RunOptions run = {};
};

// What a case is compared with.
enum class Against : uint8_t {
  kOneRank,    // the product on one rank, local, staged, no overlap
  kReference,  // that one-rank product itself, with the float64 loop
};

struct CaseReport {
  Case what;
  Against against = Against::kOneRank;
  std::string skipped;  // why it did not run; empty = it ran
  std::vector<TensorReport> tensors;
  int64_t torn_replicas = 0;
  // Order of its products of bfloat16; none where it has none, or did not run.
  std::optional<BFloat16Order> bfloat16_order = {};

  bool ok() const;
};

// Compares first the one-rank product of every (problem, numerics) with the reference, which a
// layer has and a model has not, then every case with that product. on_report is called with each
// result once it is known. `world`: the processes that a launcher started, with the transport of
// all cases, which run on its first ranks; nullptr: ranks are threads of this process. Collective
// over `world`; its rank 0 computes the one-rank products and alone reports. Errors are those of
// ranks (timeouts, lost peers), not wrong results. Threads over NCCL that are more than the
// machine's GPUs are skipped.
absl::Status Verify(const VerifyPlan& plan, Communicator* world,
                    const std::function<void(const CaseReport&)>& on_report);

}  // namespace moe::verify

#endif  // MOE_MOE_CLI_VERIFY_VERIFY_H_
