// TCP connections to and from one address. No call here waits beyond its deadline.
#ifndef MOE_COMM_NCCL_NCCL_ADDRESS_H_
#define MOE_COMM_NCCL_NCCL_ADDRESS_H_

#include <string>
#include <vector>

#include <absl/status/status.h>
#include <absl/status/statusor.h>
#include <absl/strings/string_view.h>
#include <absl/types/span.h>
#include <poll.h>
#include <sys/socket.h>

#include "comm/descriptor.h"
#include "comm/patience.h"

namespace moe {

struct SocketAddress {
  sockaddr_storage storage = {};
  socklen_t bytes = sizeof(sockaddr_storage);

  sockaddr* get() { return reinterpret_cast<sockaddr*>(&storage); }
  const sockaddr* get() const { return reinterpret_cast<const sockaddr*>(&storage); }
};

// Where a connection ends on this side and on the other, as both sides see it.
SocketAddress NearEnd(const Descriptor& socket);
SocketAddress FarEnd(const Descriptor& socket);

// "127.0.0.1:29500", "[::1]:29500".
std::string ToString(const SocketAddress& address);

// All addresses of a host: a name, or an IPv4 or IPv6 address. A name takes as long as the system's
// resolver takes. kInvalidArgument for an unknown name, and for one that means every address of the
// machine and does not say so (0.0.0.0, ::); kUnavailable where the resolver does not answer.
absl::StatusOr<std::vector<SocketAddress>> Resolve(const std::string& host, int port);

// Listens on the first of the addresses that is this machine's, and on no other.
// kUnavailable, with the system's reason.
absl::StatusOr<Descriptor> ListenOn(const std::vector<SocketAddress>& addresses);

// The next connection. Nothing is open in it when there is none; then errno says why.
Descriptor AcceptFrom(const Descriptor& listener);

// kUnavailable: nobody listens there, or does not answer by `deadline`, or `patience` is over.
absl::StatusOr<Descriptor> ConnectTo(const SocketAddress& address, Patience& patience,
                                     SteadyTime deadline = SteadyTime::max());

// Returns when one of them is ready, at the deadline, or earlier.
void WaitFor(absl::Span<pollfd> sockets, SteadyTime deadline);

// Into a connection that has room for all of `bytes`; else kUnavailable.
absl::Status Send(const Descriptor& to, absl::string_view bytes);
// What is there already, at most bytes.size() > 0 of it. kUnavailable: the connection has ended.
absl::StatusOr<size_t> ReceiveSome(const Descriptor& from, absl::Span<char> bytes);
// Fills `bytes`. kUnavailable: the peer closed the connection, or was silent until `deadline` or
// until `patience` was over.
absl::Status Receive(const Descriptor& from, absl::Span<char> bytes, Patience& patience,
                     SteadyTime deadline = SteadyTime::max());

}  // namespace moe

#endif  // MOE_COMM_NCCL_NCCL_ADDRESS_H_
