// One JSON object as a typed row.
#ifndef MOE_MOE_REPORT_ROW_READER_H_
#define MOE_MOE_REPORT_ROW_READER_H_

#include <absl/status/status.h>

#include <nlohmann/json_fwd.hpp>

#include "moe/report/rows.h"

namespace moe::report {

// Adds the row to `run`; the first row decides its kind. kDataLoss with the reason, without a
// place.
absl::Status AddRow(const nlohmann::json& object, Run& run);

}  // namespace moe::report

#endif  // MOE_MOE_REPORT_ROW_READER_H_
