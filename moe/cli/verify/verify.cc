#include "moe/cli/verify/verify.h"

#include <algorithm>
#include <map>
#include <set>
#include <utility>

#include <absl/strings/str_cat.h>

#include "kernels/base/cuda_devices.h"
#include "kernels/base/status_macros.h"

namespace moe::verify {
namespace {

// Prefixed with the case, for errors that end the run.
absl::Status InCase(const Case& what, const absl::Status& status) {
  return absl::Status(status.code(), absl::StrCat(Describe(what.layout), ": ", status.message()));
}

absl::StatusOr<LayerResult> RunOnThreads(const VerifyPlan& plan, const Case& what) {
  const Backend backend = what.layout.transport;
  LayerResult result;
  RunOptions options = plan.run;
  options.plan = {.backend = backend, .ranks = what.layout.ranks};
  options.report = [&](const absl::Status& status) {
    if (plan.run.report) plan.run.report(InCase(what, status));
  };
  const auto body = [&](std::unique_ptr<Communicator> world) -> absl::Status {
    const bool first = world->rank() == 0;
    MOE_ASSIGN_OR_RETURN(LayerResult mine,
                         RunLayer(plan.problems[what.problem], what.layout, what.numerics,
                                  plan.fault, plan.device, std::move(world)));
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
  Run(const VerifyPlan& plan, const ProcessRunner& run_processes,
      const std::function<void(const CaseReport&)>& on_report)
      : plan_(plan), run_processes_(run_processes), on_report_(on_report) {}

  absl::Status All() {
    MOE_RETURN_IF_ERROR(OneRank());
    for (const Case& what : plan_.cases) {
      if (OfProcesses(what)) continue;
      MOE_ASSIGN_OR_RETURN(const std::string missing, MissingGpus(what.layout));
      if (!missing.empty()) {
        on_report_({.what = what, .skipped = missing});
        continue;
      }
      MOE_ASSIGN_OR_RETURN(const LayerResult result, RunOnThreads(plan_, what));
      ReportAgainstOneRank(what, result);
    }
    return Processes();
  }

 private:
  using Key = std::pair<size_t, Numerics>;

  // The products that everything else is compared with.
  absl::Status OneRank() {
    std::set<Key> keys;
    for (const Case& what : plan_.cases) keys.emplace(what.problem, what.numerics);
    for (const auto& [problem, numerics] : keys) {
      Case what = {.problem = problem, .numerics = numerics};
      what.layout.capacity = plan_.problems[problem].spec.layer.router.capacity_factor;
      MOE_ASSIGN_OR_RETURN(LayerResult result, RunOnThreads(plan_, what));
      on_report_({.what = what,
                  .against = Against::kReference,
                  .tensors = CompareWithReference(plan_.problems[problem], result),
                  .torn_replicas = result.torn_replicas});
      one_rank_[{problem, numerics}] = std::move(result);
    }
    return absl::OkStatus();
  }

  bool OfProcesses(const Case& what) const {
    if (what.layout.transport == Backend::kNccl) return plan_.nccl_processes;
    return what.layout.transport == Backend::kMpi;
  }

  // Why threads over NCCL cannot run; "" if they can.
  static absl::StatusOr<std::string> MissingGpus(const Layout& layout) {
    if (layout.transport != Backend::kNccl) return std::string();
    MOE_ASSIGN_OR_RETURN(const int gpus, CudaDeviceCount());
    if (layout.ranks <= gpus) return std::string();
    return absl::StrCat(layout.ranks, " ranks, ", gpus, gpus == 1 ? " GPU" : " GPUs");
  }

  absl::Status Processes() {
    std::map<std::pair<Backend, int>, std::vector<Case>> launches;
    for (const Case& what : plan_.cases) {
      if (OfProcesses(what)) launches[{what.layout.transport, what.layout.ranks}].push_back(what);
    }
    for (const auto& [launch, cases] : launches) {
      const absl::StatusOr<std::vector<LayerResult>> results = run_processes_(launch.second, cases);
      if (!results.ok() && !absl::IsUnimplemented(results.status())) return results.status();
      for (size_t i = 0; i < cases.size(); ++i) {
        if (results.ok()) {
          ReportAgainstOneRank(cases[i], (*results)[i]);
        } else {
          on_report_({.what = cases[i], .skipped = std::string(results.status().message())});
        }
      }
    }
    return absl::OkStatus();
  }

  void ReportAgainstOneRank(const Case& what, const LayerResult& result) const {
    const Measure measure =
        what.numerics == Numerics::kLayoutInvariant ? Measure::kBits : Measure::kTwiceBound;
    on_report_({.what = what,
                .against = Against::kOneRank,
                .tensors = CompareResults(plan_.problems[what.problem], result,
                                          one_rank_.at({what.problem, what.numerics}), measure),
                .torn_replicas = result.torn_replicas});
  }

  const VerifyPlan& plan_;
  const ProcessRunner& run_processes_;
  const std::function<void(const CaseReport&)>& on_report_;
  std::map<Key, LayerResult> one_rank_;
};

}  // namespace

bool CaseReport::ok() const {
  return torn_replicas == 0 &&
         std::all_of(tensors.begin(), tensors.end(), [](const TensorReport& t) { return t.ok(); });
}

absl::Status Verify(const VerifyPlan& plan, const ProcessRunner& run_processes,
                    const std::function<void(const CaseReport&)>& on_report) {
  return Run(plan, run_processes, on_report).All();
}

absl::StatusOr<std::vector<LayerResult>> RunCases(const std::vector<Problem>& problems,
                                                  const std::vector<Case>& cases, Fault fault,
                                                  DeviceKind device, Communicator& world) {
  std::vector<LayerResult> results;
  for (const Case& what : cases) {
    MOE_ASSIGN_OR_RETURN(std::unique_ptr<Communicator> own, world.Split(0, world.rank()));
    absl::StatusOr<LayerResult> result =
        RunLayer(problems[what.problem], what.layout, what.numerics, fault, device, std::move(own));
    if (!result.ok()) return InCase(what, result.status());
    results.push_back(*std::move(result));
  }
  return results;
}

}  // namespace moe::verify
