#include "moe/cli/verify/verify.h"

#include <algorithm>
#include <map>
#include <set>
#include <utility>

#include <absl/strings/str_cat.h>

#include "kernels/base/cuda_devices.h"
#include "kernels/base/status_macros.h"
#include "kernels/grouped_gemm/simd_targets.h"
#include "moe/run/session.h"
#include "moe/train/trainer.h"

namespace moe::verify {
namespace {

// Prefixed with the case, for errors that end the run.
absl::Status InCase(const Case& what, const absl::Status& status) {
  return absl::Status(status.code(), absl::StrCat(Describe(what.layout), ": ", status.message()));
}

// Runs the case's problem in its layout, on the ranks of `world`. Collective; rank 0's result is
// complete.
absl::StatusOr<RunResult> RunSubject(const VerifyPlan& plan, const Case& what,
                                     std::unique_ptr<Communicator> world) {
  const Problem& problem = plan.problems[what.problem];
  return (problem.spec.model.has_value() ? RunModel : RunLayer)(
      problem,
      {.layout = what.layout,
       .numerics = what.numerics,
       .fault = plan.fault,
       .device = plan.device,
       .bfloat16_order = plan.bfloat16_order},
      std::move(world));
}

absl::StatusOr<RunResult> RunOnThreads(const VerifyPlan& plan, const Case& what) {
  const Backend backend = what.layout.transport;
  RunResult result;
  RunOptions options = plan.run;
  options.plan = {.backend = backend, .ranks = what.layout.ranks};
  options.report = [&](const absl::Status& status) {
    if (plan.run.report) plan.run.report(InCase(what, status));
  };
  const auto body = [&](std::unique_ptr<Communicator> world) -> absl::Status {
    const bool first = world->rank() == 0;
    MOE_ASSIGN_OR_RETURN(RunResult mine, RunSubject(plan, what, std::move(world)));
    if (first) result = std::move(mine);
    return absl::OkStatus();
  };
  if (const absl::Status status = RunRanks(options, body); !status.ok()) {
    return InCase(what, status);
  }
  return result;
}

class Run {
 public:
  Run(const VerifyPlan& plan, Communicator* world,
      const std::function<void(const CaseReport&)>& on_report)
      : plan_(plan), world_(world), on_report_(on_report) {}

  absl::Status All() {
    MOE_RETURN_IF_ERROR(OneRank());
    for (const Case& what : plan_.cases) {
      MOE_ASSIGN_OR_RETURN(const std::string missing, MissingGpus(what.layout));
      if (!missing.empty()) {
        on_report_({.what = what, .skipped = missing});
        continue;
      }
      MOE_ASSIGN_OR_RETURN(const RunResult result,
                           world_ == nullptr ? RunOnThreads(plan_, what) : RunOnProcesses(what));
      if (Reports()) ReportAgainstOneRank(what, result);
    }
    return absl::OkStatus();
  }

 private:
  using Key = std::pair<size_t, Numerics>;

  bool Reports() const { return world_ == nullptr || world_->rank() == 0; }

  // Computes the products that all else is compared with. The barriers limit the wait of the other
  // processes, which has a deadline, to the time of one product.
  absl::Status OneRank() {
    std::set<Key> keys;
    for (const Case& what : plan_.cases) keys.emplace(what.problem, what.numerics);
    for (const auto& [problem, numerics] : keys) {
      if (world_ != nullptr) MOE_RETURN_IF_ERROR(world_->Barrier());
      if (!Reports()) continue;
      Case what = {.problem = problem, .numerics = numerics};
      what.layout.capacity = plan_.problems[problem].spec.layer.router.capacity_factor;
      MOE_ASSIGN_OR_RETURN(RunResult result, RunOnThreads(plan_, what));
      if (!plan_.problems[problem].spec.model.has_value()) {
        on_report_({.what = what,
                    .against = Against::kReference,
                    .tensors = CompareWithReference(plan_.problems[problem], result),
                    .torn_replicas = result.torn_replicas,
                    .bfloat16_order = result.bfloat16_order});
      }
      one_rank_[{problem, numerics}] = std::move(result);
    }
    return absl::OkStatus();
  }

  // Why threads over NCCL cannot run; "" if they can.
  absl::StatusOr<std::string> MissingGpus(const Layout& layout) const {
    if (layout.transport != Backend::kNccl || world_ != nullptr) return std::string();
    MOE_ASSIGN_OR_RETURN(const int gpus, CudaDeviceCount());
    if (layout.ranks <= gpus) return std::string();
    return absl::StrCat(layout.ranks, " ranks, ", gpus, gpus == 1 ? " GPU" : " GPUs");
  }

  // Runs on the first processes; the others wait in the next Split.
  absl::StatusOr<RunResult> RunOnProcesses(const Case& what) {
    const bool runs = world_->rank() < what.layout.ranks;
    MOE_ASSIGN_OR_RETURN(std::unique_ptr<Communicator> ranks,
                         world_->Split(runs ? 0 : -1, world_->rank()));
    if (!runs) return RunResult();
    absl::StatusOr<RunResult> result = RunSubject(plan_, what, std::move(ranks));
    if (!result.ok()) return InCase(what, result.status());
    return result;
  }

  void ReportAgainstOneRank(const Case& what, const RunResult& result) const {
    const Measure measure =
        what.numerics == Numerics::kLayoutInvariant ? Measure::kBits : Measure::kTwiceBound;
    on_report_({.what = what,
                .against = Against::kOneRank,
                .tensors = CompareResults(plan_.problems[what.problem], result,
                                          one_rank_.at({what.problem, what.numerics}), measure),
                .torn_replicas = result.torn_replicas,
                .bfloat16_order = result.bfloat16_order});
  }

  const VerifyPlan& plan_;
  Communicator* const world_;
  const std::function<void(const CaseReport&)>& on_report_;
  std::map<Key, RunResult> one_rank_;
};

}  // namespace

bool CaseReport::ok() const {
  return torn_replicas == 0 &&
         std::all_of(tensors.begin(), tensors.end(), [](const TensorReport& t) { return t.ok(); });
}

absl::Status Verify(const VerifyPlan& plan, Communicator* world,
                    const std::function<void(const CaseReport&)>& on_report) {
  const bool has_order =
      !plan.problems.empty() && HasBFloat16Order({.session = {.device = plan.device},
                                                  .dtype = plan.problems.front().spec.dtype});
  if (world == nullptr || !has_order || plan.bfloat16_order.has_value()) {
    return Run(plan, world, on_report).All();
  }
  // Cases have fewer ranks than the launch, which alone might choose otherwise.
  VerifyPlan agreed = plan;
  MOE_ASSIGN_OR_RETURN(
      agreed.bfloat16_order,
      AgreedBFloat16Order(std::nullopt, gemm::FastestBFloat16Order(), *world, *MakeInlineStream()));
  return Run(agreed, world, on_report).All();
}

}  // namespace moe::verify
