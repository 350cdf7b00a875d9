#include "moe/bench/routing_spec.h"

#include <cmath>

#include <absl/strings/numbers.h>
#include <absl/strings/str_cat.h>
#include <absl/strings/str_split.h>

#include "kernels/base/status_macros.h"

namespace moe::bench {
namespace {

constexpr char kForms[] =
    "uniform, zipf:S, hot_expert:P, hot_rank:P, ragged, zero_rank, matrix:FILE or trace:FILE";

absl::StatusOr<double> Parameter(absl::string_view text, absl::string_view value, double most,
                                 absl::string_view expected) {
  double number = 0;
  if (absl::SimpleAtod(value, &number) && number >= 0 && number <= most) return number;
  return absl::InvalidArgumentError(absl::StrCat("routing is '", text, "', expected ", expected));
}

}  // namespace

absl::StatusOr<RoutingSpec> ParseRouting(absl::string_view text) {
  const std::pair<absl::string_view, absl::string_view> parts =
      absl::StrSplit(text, absl::MaxSplits(':', 1));
  const auto [name, value] = parts;
  const bool plain = name.size() == text.size();
  RoutingSpec spec;
  spec.text = std::string(text);
  if (plain && name == "uniform") return spec;
  if (plain && (name == "ragged" || name == "zero_rank")) {
    spec.kind = name == "ragged" ? RoutingSpec::kRagged : RoutingSpec::kZeroRank;
    return spec;
  }
  if (name == "zipf") {
    spec.kind = RoutingSpec::kZipf;
    // 1 / e^64 is below what a token in 2^32 could show.
    MOE_ASSIGN_OR_RETURN(spec.parameter, Parameter(text, value, 64, "zipf:S with 0 <= S <= 64"));
    return spec;
  }
  if (name == "hot_expert" || name == "hot_rank") {
    spec.kind = name == "hot_rank" ? RoutingSpec::kHotRank : RoutingSpec::kHotExpert;
    MOE_ASSIGN_OR_RETURN(spec.parameter,
                         Parameter(text, value, 1, absl::StrCat(name, ":P with 0 <= P <= 1")));
    return spec;
  }
  if ((name == "matrix" || name == "trace") && !value.empty()) {
    spec.kind = name == "matrix" ? RoutingSpec::kMatrix : RoutingSpec::kTrace;
    spec.path = std::string(value);
    return spec;
  }
  return absl::InvalidArgumentError(absl::StrCat("routing is '", text, "', expected ", kForms));
}

int64_t CallsOf(const RoutingSpec& routing) {
  return routing.replay == nullptr ? 1 : routing.replay->records();
}

absl::StatusOr<std::vector<double>> ParseTrafficMatrix(absl::string_view text, int ranks) {
  std::vector<double> weights;
  double total = 0;
  int line_number = 0;
  for (const absl::string_view line : absl::StrSplit(text, '\n')) {
    ++line_number;
    const absl::string_view content = line.substr(0, line.find('#'));
    int columns = 0;
    for (const absl::string_view word :
         absl::StrSplit(content, absl::ByAnyChar(" \t\r,"), absl::SkipEmpty())) {
      double number = 0;
      if (!absl::SimpleAtod(word, &number) || !std::isfinite(number) || number < 0) {
        return absl::InvalidArgumentError(absl::StrCat(
            "line ", line_number, ": '", word.substr(0, 40), "', expected a number >= 0"));
      }
      weights.push_back(number);
      total += number;
      ++columns;
    }
    if (columns != 0 && columns != ranks) {
      return absl::InvalidArgumentError(absl::StrCat("line ", line_number, " has ", columns,
                                                     " numbers, expected one for each of ", ranks,
                                                     " ranks"));
    }
    if (weights.size() > static_cast<size_t>(ranks) * static_cast<size_t>(ranks)) {
      return absl::InvalidArgumentError(
          absl::StrCat("line ", line_number, " is one too many for ", ranks, " ranks"));
    }
  }
  if (weights.size() != static_cast<size_t>(ranks) * static_cast<size_t>(ranks)) {
    return absl::InvalidArgumentError(absl::StrCat(weights.size() / static_cast<size_t>(ranks),
                                                   " lines of numbers, expected ", ranks,
                                                   ", one for each rank"));
  }
  if (!(total > 0) || !std::isfinite(total)) {
    return absl::InvalidArgumentError(
        absl::StrCat("the numbers add up to ", total, ", expected a finite sum above 0"));
  }
  return weights;
}

}  // namespace moe::bench
