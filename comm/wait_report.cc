#include "comm/wait_report.h"

#include <algorithm>
#include <cstring>

#include <absl/strings/str_join.h>

#include "comm/hosts.h"

namespace moe {
namespace {

static_assert(sizeof(CallCard) == 48 && std::has_unique_object_representations_v<CallCard>);

std::string TextOf(const CallCard& card) {
  return absl::StrCat(
      card.operation, " of ", card.count, " x ", NameOf(static_cast<DType>(card.type)),
      card.op == static_cast<int32_t>(ReduceOp::kMax) ? ", max" : "", ", root ", card.root);
}

// "dispatch, layer 3, step 120"; "" when nothing was set.
std::string DescribeSite(const Site& site) {
  std::string text = site.name;
  const auto add = [&text](absl::string_view name, int64_t value) {
    if (value >= 0) absl::StrAppend(&text, text.empty() ? "" : ", ", name, " ", value);
  };
  add("stage", site.stage);
  add("layer", site.layer);
  add("micro-batch", site.micro_batch);
  add("step", site.step);
  return text;
}

}  // namespace

std::string DescribeCall(absl::string_view operation, const Site& site) {
  if (operation.empty()) return DescribeCall(site.name, site.Named(""));
  const std::string doing = DescribeSite(site);
  return absl::StrCat(operation, doing.empty() ? "" : " (", doing, doing.empty() ? "" : ")");
}

std::string DescribePlace(int world_rank, absl::string_view operation, const Site& site) {
  return absl::StrCat("rank ", world_rank, " on host ", HostName(), " in ",
                      DescribeCall(operation, site));
}

absl::Status LateError(absl::string_view place, std::vector<int> missing, absl::Duration waited,
                       absl::Duration timeout, absl::Span<const std::string> hosts) {
  std::sort(missing.begin(), missing.end());
  missing.erase(std::unique(missing.begin(), missing.end()), missing.end());
  const bool one_host = std::all_of(hosts.begin(), hosts.end(),
                                    [&](const std::string& host) { return host == hosts.front(); });
  const auto name = [&](std::string* out, int rank) {
    absl::StrAppend(out, rank);
    if (!one_host) absl::StrAppend(out, " (host ", hosts[rank], ")");
  };
  return absl::DeadlineExceededError(absl::StrCat(
      place, ": waited ", absl::FormatDuration(absl::Trunc(waited, absl::Milliseconds(1))), " for ",
      missing.size() == 1 ? "rank " : "ranks ", absl::StrJoin(missing, ", ", name), ", deadline ",
      absl::FormatDuration(timeout)));
}

CallCard CardOf(const char* operation) {
  CallCard card{.type = static_cast<int32_t>(DType::kUInt8),
                .op = static_cast<int32_t>(ReduceOp::kSum)};
  std::strncpy(card.operation, operation, sizeof(card.operation) - 1);
  return card;
}

CallCard CardOf(const CollectiveCall& call) {
  CallCard card = CardOf(NameOf(call.kind));
  card.type = static_cast<int32_t>(call.type);
  card.op = static_cast<int32_t>(call.op);
  card.root = call.root;
  card.count = call.count();
  return card;
}

absl::Status CheckSame(const CallCard& mine, int rank, const CallCard& other, int other_rank) {
  CallCard same = mine;
  same.color = other.color;
  same.key = other.key;
  if (std::memcmp(&same, &other, sizeof(CallCard)) == 0) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat(mine.operation, ": rank ", rank, " has ",
                                                 TextOf(mine), ", rank ", other_rank, " has ",
                                                 TextOf(other), ", expected the same on all"));
}

absl::Status OtherSizeError(absl::string_view operation, int rank, int64_t expected, int peer,
                            const absl::AlphaNum& sent) {
  return absl::InvalidArgumentError(absl::StrCat(operation, ": rank ", rank, " expects ", expected,
                                                 " bytes from rank ", peer, ", which sends ",
                                                 sent));
}

absl::StatusOr<CallCard> SplitCard(int color, int key) {
  if (color < -1) {
    return absl::InvalidArgumentError(
        absl::StrCat("Split: color is ", color, ", expected >= 0, or -1 for no group"));
  }
  CallCard card = CardOf("Split");
  card.color = color;
  card.key = key;
  return card;
}

std::vector<int> MembersOf(int color, absl::Span<const CallCard> cards) {
  std::vector<int> members;
  for (int r = 0; r < static_cast<int>(cards.size()); ++r) {
    if (cards[r].color == color) members.push_back(r);
  }
  std::stable_sort(members.begin(), members.end(),
                   [&](int a, int b) { return cards[a].key < cards[b].key; });
  return members;
}

}  // namespace moe
