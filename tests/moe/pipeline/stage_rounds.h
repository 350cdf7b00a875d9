// Rounds of one stage without a trainer, and a loop around them that does nothing.
#ifndef MOE_TESTS_MOE_PIPELINE_STAGE_ROUNDS_H_
#define MOE_TESTS_MOE_PIPELINE_STAGE_ROUNDS_H_

#include <cstdint>

#include <absl/status/status.h>

#include "moe/pipeline/runner.h"

namespace moe::testing {

struct StageRounds {
  const Context& context;
  int64_t count = 0;
  bool trains = true;
  int64_t rounds() const { return count; }
  bool evaluates() const { return !trains; }
  Round RoundAt(int64_t index) const { return Round(index, index, 1, 0); }
  Pass PassOf(const Round& round) const {
    return {.context = context, .site = {.round = static_cast<int32_t>(round.index())}};
  }
  absl::Status BeginBackward(const Round&, int /*chunk*/) { return absl::OkStatus(); }
  absl::Status MarkComplete(const Round&, const Parameter&) { return absl::OkStatus(); }
};

struct StageLoop : RoundHost {
  int64_t RowsOf(const Round& round) const override { return round.empty() ? 0 : 3; }
  absl::Status BeginRound(const Round&, int /*chunk*/, Pass&) override { return absl::OkStatus(); }
  absl::Status EndRound(const Round&, int /*chunk*/, const Pass&) override {
    return absl::OkStatus();
  }
};

}  // namespace moe::testing

#endif  // MOE_TESTS_MOE_PIPELINE_STAGE_ROUNDS_H_
