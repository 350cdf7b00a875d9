#include "moe/cli/measure/routing_spec.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <utility>

#include <absl/strings/numbers.h>
#include <absl/strings/str_cat.h>
#include <absl/strings/str_join.h>
#include <absl/strings/str_split.h>

#include "dispatch/placement.h"
#include "kernels/base/status_macros.h"

namespace moe::measure {

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

// `hot` experts share P, the others the rest.
std::vector<double> HotShares(int hot, int experts, double hot_share) {
  std::vector<double> shares(experts, (1 - hot_share) / std::max(1, experts - hot));
  std::fill_n(shares.begin(), hot, hot == experts ? 1.0 / hot : hot_share / hot);
  return shares;
}

bool IsDrawn(const RoutingSpec& routing) {
  return routing.kind == RoutingSpec::kZipf || routing.kind == RoutingSpec::kHotExpert ||
         routing.kind == RoutingSpec::kHotRank;
}

TokenSlots EmptySlots(int64_t tokens, int64_t each) {
  TokenSlots slots;
  for (int64_t t = 1; t <= tokens; ++t) slots.slot_offset.push_back(t * each);
  slots.expert.resize(tokens * each);
  return slots;
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
  // A number of 64 bytes is a long one; the rest is for comments.
  const int64_t most = int64_t{64} * ranks * ranks + (int64_t{1} << 20);
  if (static_cast<int64_t>(text.size()) > most) {
    return absl::InvalidArgumentError(
        absl::StrCat(text.size(), " bytes, expected at most ", most, " for ", ranks, " ranks"));
  }
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

RandomKey KeyOf(uint64_t seed, Draw draw, int rank, int64_t token) {
  return {.seed = seed,
          .purpose = RandomPurpose::kData,
          .layer = static_cast<uint32_t>(draw),
          .step = static_cast<uint64_t>(rank),
          .item = static_cast<uint64_t>(token)};
}

std::vector<double> ExpertShares(const RoutingSpec& routing, int ranks, int num_experts) {
  MOE_CHECK(routing.kind != RoutingSpec::kMatrix && routing.kind != RoutingSpec::kTrace);
  if (routing.kind == RoutingSpec::kHotExpert) {
    return HotShares(1, num_experts, routing.parameter);
  }
  if (routing.kind == RoutingSpec::kHotRank) {
    return HotShares(ExpertPlacement(num_experts, ranks).LocalExperts(0), num_experts,
                     routing.parameter);
  }
  // S = 0 where nothing is skewed.
  std::vector<double> shares(num_experts);
  for (int e = 0; e < num_experts; ++e) shares[e] = std::pow(e + 1.0, -routing.parameter);
  const double sum = std::accumulate(shares.begin(), shares.end(), 0.0);
  for (double& share : shares) share /= sum;
  return shares;
}

std::vector<float> DrawPreferences(const RoutingSpec& routing, const SlotOptions& options) {
  // log(1e-300) is further down than noise (-3.1 to 22.2 for 32-bit uniforms) lifts anything.
  std::vector<double> log_share =
      ExpertShares(routing, options.expert_parallel_size, options.num_experts);
  for (double& share : log_share) share = std::log(std::max(share, 1e-300));
  const int64_t tokens = TokensOfRank(routing, options);
  std::vector<float> preference;
  preference.reserve(tokens * options.num_experts);
  for (int64_t t = 0; t < tokens; ++t) {
    const RandomKey key = KeyOf(options.seed, Draw::kPreference, options.rank, t);
    for (int e = 0; e < options.num_experts; ++e) {
      const double noise = -std::log(-std::log(Uniform(key, static_cast<uint32_t>(e))));
      preference.push_back(static_cast<float>(log_share[e] + noise));
    }
  }
  return preference;
}

int64_t TokensOfRank(const RoutingSpec& routing, const SlotOptions& options, Draw draw) {
  MOE_CHECK(routing.kind != RoutingSpec::kMatrix && routing.kind != RoutingSpec::kTrace);
  if (routing.kind == RoutingSpec::kZeroRank && options.rank == options.ranks - 1) return 0;
  if (routing.kind != RoutingSpec::kRagged) return options.tokens;
  const double u = Uniform(KeyOf(options.seed, draw, options.rank, 0));
  return static_cast<int64_t>(u * static_cast<double>(options.tokens + 1));
}

TokenSlots DrawSlots(const RoutingSpec& routing, const SlotOptions& options) {
  const int64_t tokens = TokensOfRank(routing, options);
  const int experts = options.num_experts;
  const int k = options.top_k;
  TokenSlots slots = EmptySlots(tokens, k);
  if (!IsDrawn(routing)) {
    for (int64_t t = 0; t < tokens; ++t) {
      const int64_t global = options.rank * options.tokens + t;
      for (int j = 0; j < k; ++j) {
        slots.expert[t * k + j] = static_cast<int32_t>((global + j * (experts / k)) % experts);
      }
    }
    return slots;
  }
  const std::vector<float> preference = DrawPreferences(routing, options);
  std::vector<int32_t> ids(experts);
  for (int64_t t = 0; t < tokens; ++t) {
    const float* const of_token = preference.data() + t * experts;
    std::iota(ids.begin(), ids.end(), 0);
    std::partial_sort(ids.begin(), ids.begin() + k, ids.end(), [&](int32_t a, int32_t b) {
      return of_token[a] != of_token[b] ? of_token[a] > of_token[b] : a < b;
    });
    std::copy_n(ids.begin(), k, slots.expert.begin() + t * k);
  }
  return slots;
}

TokenSlots DealSlots(absl::Span<const int64_t> count, int64_t tokens) {
  TokenSlots slots;
  slots.slot_offset.assign(tokens + 1, 0);
  const int64_t total = std::accumulate(count.begin(), count.end(), int64_t{0});
  if (total == 0) return slots;
  for (int64_t t = 0; t < tokens; ++t) {
    slots.slot_offset[t + 1] = slots.slot_offset[t] + total / tokens + (t < total % tokens ? 1 : 0);
  }
  slots.expert.resize(total);
  int64_t dealt = 0;
  for (size_t e = 0; e < count.size(); ++e) {
    MOE_CHECK(count[e] >= 0 && count[e] <= tokens);
    for (int64_t i = 0; i < count[e]; ++i, ++dealt) {
      slots.expert[slots.slot_offset[dealt % tokens] + dealt / tokens] = static_cast<int32_t>(e);
    }
  }
  return slots;
}

std::vector<int64_t> CountSlots(const TokenSlots& slots, int num_experts) {
  std::vector<int64_t> count(num_experts, 0);
  for (const int32_t e : slots.expert) ++count[e];
  return count;
}

}  // namespace moe::measure
