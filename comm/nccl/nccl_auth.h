// What rank 0 and another rank say to each other at a TCP meeting point (nccl_store.h), and how
// each proves that it knows the secret, which itself never travels:
//
//   rank 0 → other   StoreGreeting   rank 0's nonce
//   other → rank 0   StoreClaim      rank, size, the other's nonce; a proof
//   rank 0 → other   StoreAnswer     the id, or why there is none; a proof
//
// A proof is HMAC-SHA256, keyed by the secret, of a label of the message's kind, of the address of
// rank 0's end of the connection and of all that both have said on it so far. Nonces are fresh:
// what was recorded on another connection proves nothing here. Labels differ: neither side can be
// made to speak for the other. Who listens elsewhere cannot pass on what is said to somebody at
// rank 0's address.
//
// Messages travel as they lie in memory; all machines with NCCL order bytes alike.
#ifndef MOE_COMM_NCCL_NCCL_AUTH_H_
#define MOE_COMM_NCCL_NCCL_AUTH_H_

#include <array>
#include <cstdint>
#include <string>
#include <type_traits>

#include <absl/status/status.h>
#include <absl/status/statusor.h>
#include <absl/strings/string_view.h>
#include <absl/types/span.h>

#include "comm/nccl/nccl_world.h"

namespace moe {

// What rank 0 tells the others before there is a world: its id, or why there is none.
struct NcclAnnouncement {
  int32_t code = 0;                    // absl::StatusCode
  std::array<char, 508> message = {};  // the end of a longer one is left out
  NcclId id = {};
};

inline NcclAnnouncement Announce(const absl::StatusOr<NcclId>& made) {
  NcclAnnouncement said;
  said.code = static_cast<int32_t>(made.status().code());
  const absl::string_view message = made.status().message();
  message.copy(said.message.data(), said.message.size());
  if (made.ok()) said.id = *made;
  return said;
}

inline absl::StatusOr<NcclId> IdOf(const NcclAnnouncement& said) {
  if (said.code == 0) return said.id;
  const absl::string_view message(said.message.data(), said.message.size());
  return absl::Status(static_cast<absl::StatusCode>(said.code),
                      message.substr(0, message.find('\0')));
}

using StoreNonce = std::array<uint8_t, 32>;
using StoreProof = std::array<uint8_t, 32>;

struct StoreGreeting {
  std::array<char, 16> magic = {};
  StoreNonce nonce = {};
};
struct StoreClaim {
  int32_t rank = 0;
  int32_t size = 0;
  StoreNonce nonce = {};
  StoreProof proof = {};
};
struct StoreAnswer {
  NcclAnnouncement said;
  StoreProof proof = {};
};

// What both ends know of one connection before anything is proven.
struct StoreSession {
  std::string secret;
  std::string place;  // address and port of rank 0's end
  StoreGreeting greeting;
};

template <typename Message>
absl::string_view BytesOf(const Message& message) {
  static_assert(std::has_unique_object_representations_v<Message>);  // no padding
  return {reinterpret_cast<const char*>(&message), sizeof(Message)};
}
// For a message to be received into.
template <typename Message>
absl::Span<char> RoomOf(Message& message) {
  static_assert(std::is_trivially_copyable_v<Message>);
  return {reinterpret_cast<char*>(&message), sizeof(Message)};
}

// kInternal where OpenSSL has no random numbers or no HMAC-SHA256.
absl::StatusOr<StoreGreeting> MakeGreeting();
absl::StatusOr<StoreClaim> MakeClaim(const StoreSession& session, int rank, int size);
absl::StatusOr<StoreAnswer> MakeAnswer(const StoreSession& session, const StoreClaim& claim,
                                       const NcclAnnouncement& said);

// Whether this is the greeting of a rank 0, of whatever secret.
bool IsGreeting(const StoreGreeting& greeting);
// Whether who sent the message knows the secret and means this connection. Takes the same time
// wherever the proofs differ.
bool IsProven(const StoreSession& session, const StoreClaim& claim);
bool IsProven(const StoreSession& session, const StoreClaim& claim, const StoreAnswer& answer);

}  // namespace moe

#endif  // MOE_COMM_NCCL_NCCL_AUTH_H_
