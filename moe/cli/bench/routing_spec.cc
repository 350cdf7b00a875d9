#include "moe/cli/bench/routing_spec.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include <absl/strings/numbers.h>
#include <absl/strings/str_cat.h>
#include <absl/strings/str_join.h>
#include <absl/strings/str_split.h>

#include "dispatch/placement.h"
#include "kernels/base/status_macros.h"

namespace moe::bench {

absl::StatusOr<Replay> Replay::Create(const RoutingTrace& trace, int ranks) {
  const int recorded = trace.header.ranks;
  if (ranks < 1 || recorded % ranks != 0) {
    std::vector<int> divisors;
    for (int n = 1; n <= recorded; ++n) {
      if (recorded % n == 0) divisors.push_back(n);
    }
    return absl::InvalidArgumentError(absl::StrCat(
        ranks, " ranks for routing recorded on ", recorded, ", expected ",
        absl::StrJoin(divisors, ", "), ": as many, or so many that neighbours can be merged"));
  }
  Replay replay(trace.header, ranks);
  for (const RoutingTraceRecord& record : trace.records) replay.Add(record);
  return replay;
}

void Replay::Add(const RoutingTraceRecord& recorded) {
  const int experts = header_.num_experts;
  const int merged = header_.ranks / ranks_;
  Record record{.tokens = std::vector<int64_t>(ranks_, 0),
                .slots = std::vector<int64_t>(static_cast<size_t>(ranks_) * experts, 0)};
  for (int source = 0; source < header_.ranks; ++source) {
    const int rank = source / merged;
    record.tokens[rank] += recorded.tokens[source];
    const auto slots = recorded.of_rank(source, experts);
    for (int e = 0; e < experts; ++e) record.slots[rank * experts + e] += slots[e];
  }
  const std::vector<int64_t> traffic = TrafficOf(record);
  for (int r = 0; r < ranks_; ++r) {
    int64_t sent = 0;
    int64_t received = 0;
    for (int p = 0; p < ranks_; ++p) {
      sent += traffic[r * ranks_ + p];
      received += traffic[p * ranks_ + r];
    }
    const int64_t tokens = record.tokens[r];
    largest_ = std::max({largest_, sent, received});
    most_tokens_ = std::max(most_tokens_, tokens);
    if (tokens > 0) most_slots_ = std::max(most_slots_, (sent + tokens - 1) / tokens);
  }
  records_.push_back(std::move(record));
}

std::vector<int64_t> Replay::TrafficOf(const Record& record) const {
  const ExpertPlacement placement(header_.num_experts, ranks_);
  std::vector<int64_t> traffic(static_cast<size_t>(ranks_) * ranks_, 0);
  for (int r = 0; r < ranks_; ++r) {
    for (int e = 0; e < header_.num_experts; ++e) {
      traffic[r * ranks_ + placement.RankOf(e)] += record.slots[r * header_.num_experts + e];
    }
  }
  return traffic;
}

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
