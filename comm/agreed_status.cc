#include "comm/agreed_status.h"

#include <cstdint>
#include <string>
#include <vector>

#include <absl/strings/cord.h>
#include <absl/strings/str_cat.h>
#include <absl/strings/string_view.h>
#include <absl/types/span.h>

#include "kernels/base/status_macros.h"

namespace moe {

absl::Status BroadcastStatus(absl::Status& status, int root, Communicator& world, Stream& stream,
                             const Site& site) {
  // The message, then name and content of each payload.
  std::vector<std::string> texts = {std::string(status.message())};
  status.ForEachPayload([&](absl::string_view name, const absl::Cord& content) {
    texts.emplace_back(name);
    texts.emplace_back(content);
  });
  int64_t head[] = {static_cast<int64_t>(status.code()), static_cast<int64_t>(texts.size())};
  MOE_RETURN_IF_ERROR(world.Broadcast(absl::MakeSpan(head), root, stream, site));
  MOE_RETURN_IF_ERROR(stream.Synchronize());
  std::vector<int64_t> bytes(head[1]);
  texts.resize(bytes.size());
  std::string all;
  for (size_t i = 0; i < texts.size(); ++i) {
    bytes[i] = static_cast<int64_t>(texts[i].size());
    all += texts[i];
  }
  MOE_RETURN_IF_ERROR(world.Broadcast(absl::MakeSpan(bytes), root, stream, site));
  MOE_RETURN_IF_ERROR(stream.Synchronize());
  int64_t total = 0;
  for (const int64_t count : bytes) total += count;
  all.resize(total);
  MOE_RETURN_IF_ERROR(world.Broadcast<uint8_t>({reinterpret_cast<uint8_t*>(all.data()), all.size()},
                                               root, stream, site));
  MOE_RETURN_IF_ERROR(stream.Synchronize());
  absl::string_view rest = all;
  for (size_t i = 0; i < texts.size(); ++i) {
    texts[i] = std::string(rest.substr(0, bytes[i]));
    rest.remove_prefix(bytes[i]);
  }
  status = {static_cast<absl::StatusCode>(head[0]), texts[0]};
  for (size_t i = 1; i + 1 < texts.size(); i += 2) {
    status.SetPayload(texts[i], absl::Cord(texts[i + 1]));
  }
  return absl::OkStatus();
}

absl::Status AgreedStatus(const absl::Status& mine, Communicator& world, Stream& stream,
                          const Site& site) {
  int64_t behind = mine.ok() ? 0 : world.size() - world.rank();  // ranks from the first one on
  MOE_RETURN_IF_ERROR(world.AllReduce<int64_t>({&behind, 1}, ReduceOp::kMax, stream, site));
  MOE_RETURN_IF_ERROR(stream.Synchronize());
  if (behind == 0) return absl::OkStatus();
  const int first = world.size() - static_cast<int>(behind);
  absl::Status agreed = mine;
  MOE_RETURN_IF_ERROR(BroadcastStatus(agreed, first, world, stream, site));
  if (first == 0) return agreed;
  absl::Status named(agreed.code(), absl::StrCat("rank ", first, ": ", agreed.message()));
  agreed.ForEachPayload(
      [&](absl::string_view name, const absl::Cord& content) { named.SetPayload(name, content); });
  return named;
}

}  // namespace moe
