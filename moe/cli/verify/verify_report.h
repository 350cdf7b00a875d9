// Rows of `moe verify`, in every form of -o.
#ifndef MOE_MOE_CLI_VERIFY_VERIFY_REPORT_H_
#define MOE_MOE_CLI_VERIFY_VERIFY_REPORT_H_

#include <cstdint>
#include <cstdio>
#include <optional>
#include <string>
#include <vector>

#include "moe/cli/bench/tables.h"
#include "moe/cli/verify/verify.h"
#include "moe/cli/verify/verify_options.h"

namespace moe::cli {

// Writes reports as they come in one form: "table", "csv", "json", "jsonl" or "md". The table
// leaves cases that were skipped to the summary, unless all is to be seen (-v).
class VerifyWriter {
 public:
  VerifyWriter(const std::string& form, const VerifyOptions& options,
               const std::vector<verify::Problem>& problems, std::FILE* out);

  // All return text to print, maybe none.
  std::string Head() const;
  std::string Rows(const verify::CaseReport& report);
  std::string Tail() const;

 private:
  std::string TableRows(const verify::CaseReport& report) const;

  const VerifyOptions& options_;
  const std::vector<verify::Problem>& problems_;
  std::FILE* const out_;                    // where the text will be printed, for its colours
  std::optional<bench::TableWriter> rows_;  // empty: the table for people
};

// What became of a verification.
struct VerifyTotals {
  int64_t layouts = 0, references = 0, failed = 0, skipped = 0;
  std::string skip_reason;

  void Add(const verify::CaseReport& report);
};
std::string SummaryText(const VerifyTotals& totals, const VerifyOptions& options, double seconds);

}  // namespace moe::cli

#endif  // MOE_MOE_CLI_VERIFY_VERIFY_REPORT_H_
