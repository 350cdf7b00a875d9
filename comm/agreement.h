// Whether the ranks of a world were given the same: settings by their texts, files by their bytes.
#ifndef MOE_COMM_AGREEMENT_H_
#define MOE_COMM_AGREEMENT_H_

#include <cstdint>
#include <string>
#include <vector>

#include <absl/status/status.h>
#include <absl/types/span.h>

#include "comm/communicator.h"

namespace moe {

// A value that must be the same on every rank.
struct AgreedValue {
  std::string name;  // for people: "--seq-length", "text (--data)"
  std::string text;
  bool shown = true;  // the message quotes short texts; a hash means nothing to people
  // The value follows from another one; where both differ, the message names the other one.
  bool derived = false;
};

// Bytes of mapped files that must be the same on every rank.
struct AgreedBytes {
  std::string name;  // for people: "weights (--weights)"
  // Parts in an order that does not depend on the names of the files.
  std::vector<absl::Span<const uint8_t>> parts;
  std::string forms;  // types of the parts, compared beside their sizes: "F32,BF16"
  // Ranks of one host with equal identities map the same files.
  uint64_t identity = 0;
};

// kInvalidArgument, unless all ranks have the same: "ranks 0 (host a) and 2 (host b) were given a
// different --seed: 1 and 2, expected the same on all ...". The message names the first difference,
// values before bytes, between rank 0 and the first rank that differs from it.
//
// Collective over `world`, blocks; the same status on every rank, but for errors of the
// communicator. The first collective has one shape whatever is compared, so that ranks whose lists
// hold different things receive this error, too. Cost: an all-gather of 96 bytes a rank. Bytes are
// read only where ranks map different files: ranks of equal identity share the reading of theirs.
// Up to 64 GiB are read whole, of more every n-th MiB; a barrier every 256 MiB of a rank keeps the
// waits short.
absl::Status CheckAgreement(absl::Span<const AgreedValue> values,
                            absl::Span<const AgreedBytes> bytes, Communicator& world);

}  // namespace moe

#endif  // MOE_COMM_AGREEMENT_H_
