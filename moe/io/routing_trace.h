// Recorded routing: how many slots each rank had for each expert in every step, written by training
// and replayed by benchmarks. JSON lines, schema moe.routing/1 (docs/bench.md).
#ifndef MOE_MOE_IO_ROUTING_TRACE_H_
#define MOE_MOE_IO_ROUTING_TRACE_H_

#include <cstdint>
#include <string>
#include <vector>

#include <absl/status/statusor.h>
#include <absl/strings/string_view.h>
#include <absl/types/span.h>

#include "kernels/base/dtype.h"

namespace moe {

// The run that was trained. Experts are placed over the ranks of each expert-parallel group as by
// ExpertPlacement (dispatch/placement.h).
struct RoutingTraceHeader {
  int ranks = 1;                 // R
  int expert_parallel_size = 1;  // EP; divides R
  int num_experts = 1;           // E, those that are dispatched
  int top_k = 1;
  int64_t hidden_size = 1;        // H
  DType dtype = DType::kFloat32;  // type of dispatched rows: f32, bf16 or f16
  int moe_layers = 1;             // L
};

// One MoE layer in one optimiser step, micro-batches added up.
struct RoutingTraceRecord {
  int64_t step = 0;
  int layer = 0;                // counts the MoE layers alone: 0 .. L - 1
  std::vector<int64_t> tokens;  // [R]
  // [R][E], rank by rank: slots of the rank's tokens for the expert that capacity did not drop. A
  // token chooses an expert at most once, so each is at most tokens[rank].
  std::vector<int64_t> slots;

  absl::Span<const int64_t> of_rank(int rank, int num_experts) const {  // [E]
    const auto experts = static_cast<size_t>(num_experts);
    return absl::MakeConstSpan(slots).subspan(static_cast<size_t>(rank) * experts, experts);
  }
};

struct RoutingTrace {
  RoutingTraceHeader header;
  std::vector<RoutingTraceRecord> records;  // ascending by (step, layer), each pair at most once
};

// The lines of a file, with their end of line: the header first, then records in ascending order.
std::string HeaderLine(const RoutingTraceHeader& header);
std::string RecordLine(const RoutingTraceRecord& record);

// Whether the file of a run of `steps` steps of `tokens_per_step` tokens (over all ranks) can be
// read back: kInvalidArgument "what is, expected at most what" if it exceeds the limits below.
absl::Status CheckRoutingTraceFits(const RoutingTraceHeader& header, int64_t steps,
                                   int64_t tokens_per_step);

// Reads an untrusted file; `file` is the name used in messages. kDataLoss "<file>:<line>: <reason>"
// unless the header and at least one record are there and every value is within what is stated
// above and the limits below, which ensure that the bytes of any sum of a record fit an int64.
// Unknown keys are refused. Reads no byte beyond the limits. Memory: 8 bytes for each number kept
// and about 100 for each record, one line of JSON beside it.
absl::StatusOr<RoutingTrace> ParseRoutingTrace(absl::string_view file, absl::string_view text);

// Limits of a file: R and E; R * E; H; tokens of a record over all ranks; records; numbers in all
// of them; bytes, of which a number has at most 11, a record about 100 and a rank's list 5 beside
// its numbers; bytes of a line.
inline constexpr int64_t kTraceMostRanks = 1 << 12;
inline constexpr int64_t kTraceMostExperts = 1 << 14;
inline constexpr int64_t kTraceMostCells = 1 << 20;
inline constexpr int64_t kTraceMostHidden = 1 << 16;
inline constexpr int64_t kTraceMostTokens = 1 << 29;
inline constexpr int64_t kTraceMostRecords = 1 << 20;
inline constexpr int64_t kTraceMostNumbers = 1 << 23;
inline constexpr int64_t kTraceMostBytes = 1 << 28;
inline constexpr int64_t kTraceMostLineBytes = 1 << 25;

}  // namespace moe

#endif  // MOE_MOE_IO_ROUTING_TRACE_H_
