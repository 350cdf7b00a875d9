#include "moe/lm/routing_recorder.h"

#include "kernels/base/status_macros.h"

namespace moe::lm {

absl::StatusOr<std::vector<RoutingTraceRecord>> RoutingRecorder::Gather(int64_t step,
                                                                        Communicator& world,
                                                                        Stream& stream) const {
  const int ranks = world.size();
  const bool first = world.rank() == 0;
  const auto size = static_cast<int64_t>(counts_.size());
  std::vector<int64_t> all(first ? size * ranks : 0), send(ranks, 0), receive(ranks, 0);
  send[0] = size;
  if (first) std::fill(receive.begin(), receive.end(), size);
  MOE_RETURN_IF_ERROR(
      world.AllToAllV<int64_t>(counts_, send, absl::MakeSpan(all), receive, stream));
  MOE_RETURN_IF_ERROR(stream.Synchronize());
  std::vector<RoutingTraceRecord> records;
  for (int layer = 0; first && layer < moe_layers_; ++layer) {
    RoutingTraceRecord& record = records.emplace_back();
    record.step = step;
    record.layer = layer;
    for (int r = 0; r < ranks; ++r) {
      const auto of_rank = all.begin() + size * r;
      const auto slots = of_rank + 1 + int64_t{layer} * num_experts_;
      record.tokens.push_back(*of_rank);
      record.slots.insert(record.slots.end(), slots, slots + num_experts_);
    }
  }
  return records;
}

}  // namespace moe::lm
