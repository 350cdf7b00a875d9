// Where the rows of `moe bench` go.
#ifndef MOE_MOE_CLI_BENCH_BENCH_OUTPUT_H_
#define MOE_MOE_CLI_BENCH_BENCH_OUTPUT_H_

#include <memory>
#include <string>
#include <vector>

#include <absl/status/status.h>
#include <absl/types/span.h>

#include "moe/cli/bench/bench_options.h"
#include "moe/cli/bench/bench_row.h"
#include "moe/cli/bench/tables.h"

namespace moe::cli {

// For -oe: to standard error.
void PrintBenchForm(const std::string& text);

// Prints rows as they come, in the forms that the options ask for. Of the rank that speaks.
class BenchOutput {
 public:
  explicit BenchOutput(const BenchOptions& options);

  // `about`: lines that say what is measured; part of the table, not of -o.
  absl::Status Begin(const std::string& about);
  // The rows of one size: one, for p2p all pairs.
  absl::Status Add(absl::Span<const bench::BenchRow> rows);
  // Footers and files.
  absl::Status End();

 private:
  std::string Foot() const;
  bool pairs() const { return options_.spec.op == bench::Op::kPointToPoint; }

  const BenchOptions& options_;
  std::unique_ptr<bench::TableWriter> out_, err_;
  std::vector<bench::BenchRow> rows_;
  std::vector<bench::BenchRow> last_;  // of the last size
};

}  // namespace moe::cli

#endif  // MOE_MOE_CLI_BENCH_BENCH_OUTPUT_H_
