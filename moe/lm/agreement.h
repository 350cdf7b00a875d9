// Whether all ranks of a training run were asked for the same.
#ifndef MOE_MOE_LM_AGREEMENT_H_
#define MOE_MOE_LM_AGREEMENT_H_

#include <vector>

#include <absl/status/status.h>

#include "comm/communicator.h"
#include "moe/lm/run_settings.h"

namespace moe::lm {

// kInvalidArgument, naming a flag (or field) and two ranks, unless every rank has the same text and
// the same of every setting that changes results or what ranks exchange. Not compared: threads,
// packed weights, the progress interval; records and traces, which CheckRecords compares.
// Collective over `world`, blocks; the same status on every rank, but for errors of the
// communicator. `settings`: of SettingsOf. Cost: one small all-reduce.
absl::Status CheckAgreement(const std::vector<RunSetting>& settings, Communicator& world);

}  // namespace moe::lm

#endif  // MOE_MOE_LM_AGREEMENT_H_
