#include "comm/agreement.h"

#include <algorithm>
#include <cstddef>
#include <cstring>

#include <absl/strings/match.h>
#include <absl/strings/str_cat.h>
#include <absl/strings/str_split.h>
#include <absl/strings/string_view.h>

#include "comm/hosts.h"
#include "kernels/base/status_macros.h"
#include "kernels/base/xxh3.h"

namespace moe {
namespace {

constexpr size_t kBlockBytes = size_t{1} << 20;
constexpr size_t kMostBlocks = size_t{64} << 10;  // 64 GiB
constexpr size_t kRoundBlocks = 256;              // blocks that a rank reads between two barriers
constexpr size_t kMostShown = 40;                 // characters of a value in a message

// What every rank sends in the first collective.
struct Card {
  uint64_t hash = 0;       // hash of the rank's list
  int64_t list_bytes = 0;  // bytes of the list
  uint64_t identity = 0;   // hash of the host and of the files that the rank maps
  char host[72] = {};      // names have 64 characters at most
};
static_assert(sizeof(Card) == 96 && std::has_unique_object_representations_v<Card>);

uint64_t HashOf(absl::string_view text) {
  return Xxh3(text.data(), text.size());
}

// Fields of a value in a list, each followed by a NUL.
enum Field : uint8_t { kName, kText, kShown, kDerived, kFields };

void Append(const AgreedValue& value, std::string& list) {
  for (const absl::string_view field :
       {absl::string_view(value.name), absl::string_view(value.text),
        absl::string_view(value.shown ? "1" : ""), absl::string_view(value.derived ? "1" : "")}) {
    absl::StrAppend(&list, field, absl::string_view("\0", 1));
  }
}

// Ranks with equal lists have parts of equal sizes in every entry of `bytes`.
std::string ListOf(absl::Span<const AgreedValue> values, absl::Span<const AgreedBytes> bytes) {
  std::string list;
  for (const AgreedValue& value : values) Append(value, list);
  for (const AgreedBytes& entry : bytes) {
    std::string form = entry.forms;
    for (const auto& part : entry.parts) absl::StrAppend(&form, " ", part.size());
    Append({.name = entry.name, .text = absl::StrCat(HashOf(form)), .shown = false}, list);
  }
  return list;
}

Card CardOf(const std::string& list, absl::Span<const AgreedBytes> bytes) {
  std::string files = absl::StrCat(HostId());
  for (const AgreedBytes& entry : bytes) absl::StrAppend(&files, " ", entry.identity);
  Card card = {.hash = HashOf(list),
               .list_bytes = static_cast<int64_t>(list.size()),
               .identity = HashOf(files)};
  std::strncpy(card.host, HostName().c_str(), sizeof(card.host) - 1);
  return card;
}

template <typename T>
absl::StatusOr<std::vector<T>> GatherAll(const T& mine, Communicator& world, Stream& stream) {
  std::vector<T> all(world.size());
  MOE_RETURN_IF_ERROR(world.AllGather<uint8_t>(
      {reinterpret_cast<const uint8_t*>(&mine), sizeof(T)},
      {reinterpret_cast<uint8_t*>(all.data()), all.size() * sizeof(T)}, stream));
  MOE_RETURN_IF_ERROR(stream.Synchronize());
  return all;
}

// `what`: the name, and the texts if they are shown.
absl::Status Different(absl::string_view name, absl::string_view what,
                       const std::vector<Card>& cards, size_t rank) {
  const char* const where =
      absl::StartsWith(name, "--") ? ": as a flag, or in the environment of every host" : "";
  return absl::InvalidArgumentError(
      absl::StrCat("ranks 0 (host ", cards[0].host, ") and ", rank, " (host ", cards[rank].host,
                   ") were given a different ", what, ", expected the same on all", where));
}

// The error that names the first difference between `first`, the list of rank 0, and `other`, the
// list of `rank`.
absl::Status FirstDifference(const std::string& first, const std::string& other,
                             const std::vector<Card>& cards, size_t rank) {
  const std::vector<absl::string_view> a = absl::StrSplit(first, '\0');
  const std::vector<absl::string_view> b = absl::StrSplit(other, '\0');
  const auto differs = [&](size_t at) {
    return a[at + kName] != b[at + kName] || a[at + kText] != b[at + kText];
  };
  const size_t end = std::min(a.size(), b.size()) / kFields * kFields;
  size_t found = end;
  for (size_t at = 0; at < end; at += kFields) {
    if (!differs(at)) continue;
    const bool derived = !a[at + kDerived].empty() || !b[at + kDerived].empty();
    if (!derived || found == end) found = at;
    if (!derived) break;
  }
  const auto& longer = found < a.size() - 1 ? a : b;
  if (found == end) return Different(longer[end], longer[end], cards, rank);
  const auto text = [&](const std::vector<absl::string_view>& list) {
    return list[found + kText].empty() ? "none" : list[found + kText];
  };
  const absl::string_view name = a[found + kName];
  const bool shown = !a[found + kShown].empty() && name == b[found + kName] &&
                     std::max(text(a).size(), text(b).size()) <= kMostShown;
  return Different(name, shown ? absl::StrCat(name, ": ", text(a), " and ", text(b)) : name, cards,
                   rank);
}

// Every rank receives the list of rank 0 and that of `rank`, the first rank whose list differs.
absl::Status NameDifference(std::string list, const std::vector<Card>& cards, size_t rank,
                            Communicator& world, Stream& stream) {
  const auto of = [&](size_t root) -> absl::StatusOr<std::string> {
    std::string text = list;
    text.resize(cards[root].list_bytes);
    MOE_RETURN_IF_ERROR(world.Broadcast<uint8_t>(
        {reinterpret_cast<uint8_t*>(text.data()), text.size()}, static_cast<int>(root), stream));
    MOE_RETURN_IF_ERROR(stream.Synchronize());
    return text;
  };
  MOE_ASSIGN_OR_RETURN(const std::string first, of(0));
  MOE_ASSIGN_OR_RETURN(const std::string other, of(rank));
  return FirstDifference(first, other, cards, rank);
}

// Blocks of the entry, at most kMostBlocks, evenly spread.
std::vector<absl::Span<const uint8_t>> BlocksOf(const AgreedBytes& entry) {
  std::vector<absl::Span<const uint8_t>> all;
  for (const auto& part : entry.parts) {
    for (size_t at = 0; at < part.size(); at += kBlockBytes) {
      all.push_back(part.subspan(at, kBlockBytes));
    }
  }
  const size_t stride = (all.size() + kMostBlocks - 1) / kMostBlocks;
  if (stride <= 1) return all;
  std::vector<absl::Span<const uint8_t>> some;
  for (size_t i = 0; i < all.size(); i += stride) some.push_back(all[i]);
  return some;
}

// The ranks that map the same files as `rank`, in order.
std::vector<size_t> GroupOf(size_t rank, const std::vector<Card>& cards) {
  std::vector<size_t> group;
  for (size_t r = 0; r < cards.size(); ++r) {
    if (cards[r].identity == cards[rank].identity) group.push_back(r);
  }
  return group;
}

// Sums of the hashes of blocks do not depend on which rank has hashed which block.
absl::Status CheckBytes(const AgreedBytes& entry, const std::vector<Card>& cards,
                        Communicator& world, Stream& stream) {
  const std::vector<absl::Span<const uint8_t>> blocks = BlocksOf(entry);
  // The ranks of the smallest group read most; all ranks take as many rounds as they do.
  size_t smallest = cards.size();
  for (size_t r = 0; r < cards.size(); ++r) smallest = std::min(smallest, GroupOf(r, cards).size());
  const auto mine = static_cast<size_t>(world.rank());
  const std::vector<size_t> group = GroupOf(mine, cards);
  const size_t place = std::find(group.begin(), group.end(), mine) - group.begin();
  size_t at = blocks.size() * place / group.size();
  const size_t end = blocks.size() * (place + 1) / group.size();
  const size_t rounds = (blocks.size() / smallest + kRoundBlocks) / kRoundBlocks;
  uint64_t sum = 0;
  for (size_t round = 0; round < rounds; ++round) {
    for (const size_t until = std::min(end, at + kRoundBlocks); at < until; ++at) {
      sum += Xxh3(blocks[at].data(), blocks[at].size(), at);
    }
    MOE_RETURN_IF_ERROR(world.Barrier());
  }
  MOE_ASSIGN_OR_RETURN(const auto sums, GatherAll(sum, world, stream));
  const auto sum_of = [&](size_t rank) {
    uint64_t all = 0;
    for (const size_t r : GroupOf(rank, cards)) all += sums[r];
    return all;
  };
  const uint64_t first = sum_of(0);
  for (size_t r = 1; r < cards.size(); ++r) {
    if (sum_of(r) != first) return Different(entry.name, entry.name, cards, r);
  }
  return absl::OkStatus();
}

}  // namespace

absl::Status CheckAgreement(absl::Span<const AgreedValue> values,
                            absl::Span<const AgreedBytes> bytes, Communicator& world) {
  const auto stream = MakeInlineStream();
  const std::string list = ListOf(values, bytes);
  MOE_ASSIGN_OR_RETURN(const std::vector<Card> cards,
                       GatherAll(CardOf(list, bytes), world, *stream));
  const auto other = std::find_if(cards.begin(), cards.end(),
                                  [&](const Card& card) { return card.hash != cards[0].hash; });
  if (other != cards.end()) {
    return NameDifference(list, cards, other - cards.begin(), world, *stream);
  }
  const bool same_files = std::all_of(cards.begin(), cards.end(), [&](const Card& card) {
    return card.identity == cards[0].identity;
  });
  if (same_files) return absl::OkStatus();
  for (const AgreedBytes& entry : bytes) {
    MOE_RETURN_IF_ERROR(CheckBytes(entry, cards, world, *stream));
  }
  return absl::OkStatus();
}

}  // namespace moe
