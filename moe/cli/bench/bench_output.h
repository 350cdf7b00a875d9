// The rows of a benchmark as its flags ask for them.
#ifndef MOE_MOE_CLI_BENCH_BENCH_OUTPUT_H_
#define MOE_MOE_CLI_BENCH_BENCH_OUTPUT_H_

#include <cstddef>
#include <optional>
#include <string>
#include <vector>

#include <absl/functional/function_ref.h>
#include <absl/status/status.h>

#include "moe/cli/bench/bench_options.h"
#include "moe/cli/bench/tables.h"

namespace moe::cli {

// A table for people, unless -o names another form; -oe and -J beside it. Of the rank that speaks.
class BenchOutput {
 public:
  // `model`: a row, for its keys.
  BenchOutput(const BenchCall& call, const bench::Fields& model);

  bool is_table() const { return !out_.has_value(); }
  // `text`: what the table has of it.
  absl::Status Begin(const std::string& text);
  absl::Status Add(const bench::Fields& row, const std::string& text);
  absl::Status End(const std::string& text);

  // Exit code 1 if --fail-if holds for a row; `where` ends the message: "at size 4096".
  absl::Status CheckBound(absl::FunctionRef<std::string(size_t row)> where) const;
  const std::vector<bench::Fields>& rows() const { return rows_; }

 private:
  // With where it comes from, and flags that no other key tells.
  bench::Fields Whole(bench::Fields row) const;

  const BenchCall& call_;
  const std::vector<std::string> keys_;
  std::optional<bench::TableWriter> out_, err_;
  std::vector<bench::Fields> rows_;
};

}  // namespace moe::cli

#endif  // MOE_MOE_CLI_BENCH_BENCH_OUTPUT_H_
