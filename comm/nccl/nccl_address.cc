#include "comm/nccl/nccl_address.h"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <memory>

#include <absl/strings/str_cat.h>
#include <absl/time/time.h>
#include <netdb.h>
#include <netinet/in.h>

#include "kernels/base/status_macros.h"

namespace moe {
namespace {

absl::Status SystemError(absl::string_view what, int error) {
  return absl::UnavailableError(absl::StrCat(what, ": ", std::strerror(error)));
}

bool IsEveryAddress(const SocketAddress& address) {
  if (address.storage.ss_family == AF_INET) {
    return reinterpret_cast<const sockaddr_in*>(&address.storage)->sin_addr.s_addr == INADDR_ANY;
  }
  const auto& ip6 = reinterpret_cast<const sockaddr_in6*>(&address.storage)->sin6_addr;
  return IN6_IS_ADDR_UNSPECIFIED(&ip6) != 0;
}

// Every machine numbers its own interfaces.
SocketAddress WithoutScope(SocketAddress address) {
  if (address.storage.ss_family == AF_INET6) {
    reinterpret_cast<sockaddr_in6*>(&address.storage)->sin6_scope_id = 0;
  }
  return address;
}

Descriptor OpenSocket(const SocketAddress& address) {
  return Descriptor(
      socket(address.storage.ss_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, IPPROTO_TCP));
}

void Set(const Descriptor& socket, int level, int option) {
  const int on = 1;
  (void)setsockopt(socket.number(), level, option, &on, sizeof(on));
}

absl::StatusOr<Descriptor> ListenOn(const SocketAddress& address, int* error) {
  Descriptor listener = OpenSocket(address);
  if (listener.is_open()) {
    Set(listener, SOL_SOCKET, SO_REUSEADDR);  // connections of a run before may still be ending
    if (address.storage.ss_family == AF_INET6) Set(listener, IPPROTO_IPV6, IPV6_V6ONLY);
    if (bind(listener.number(), address.get(), address.bytes) == 0 &&
        listen(listener.number(), SOMAXCONN) == 0) {
      return listener;
    }
  }
  *error = errno;
  return SystemError(absl::StrCat("JoinNcclByTcp: cannot listen on ", ToString(address)), *error);
}

bool IsReady(const Descriptor& socket, int16_t events, Patience& patience, SteadyTime deadline) {
  pollfd ready = {.fd = socket.number(), .events = events, .revents = 0};
  do {
    WaitFor({&ready, 1}, std::min(deadline, patience.NextLook()));
  } while (ready.revents == 0 && !patience.IsOver(false) && Patience::Clock::now() < deadline);
  return ready.revents != 0;
}

}  // namespace

SocketAddress NearEnd(const Descriptor& socket) {
  SocketAddress address;
  (void)getsockname(socket.number(), address.get(), &address.bytes);
  return WithoutScope(address);
}

SocketAddress FarEnd(const Descriptor& socket) {
  SocketAddress address;
  (void)getpeername(socket.number(), address.get(), &address.bytes);
  return WithoutScope(address);
}

std::string ToString(const SocketAddress& address) {
  char host[NI_MAXHOST];
  char port[NI_MAXSERV];
  if (getnameinfo(address.get(), address.bytes, host, sizeof(host), port, sizeof(port),
                  NI_NUMERICHOST | NI_NUMERICSERV) != 0) {
    return "an unknown address";
  }
  return address.storage.ss_family == AF_INET6 ? absl::StrCat("[", host, "]:", port)
                                               : absl::StrCat(host, ":", port);
}

absl::StatusOr<std::vector<SocketAddress>> Resolve(const std::string& host, int port) {
  addrinfo wanted = {};
  wanted.ai_flags = AI_NUMERICSERV;
  wanted.ai_socktype = SOCK_STREAM;
  addrinfo* found = nullptr;
  const int error = getaddrinfo(host.c_str(), std::to_string(port).c_str(), &wanted, &found);
  if (error != 0) {
    const std::string text =
        absl::StrCat("JoinNcclByTcp: host '", host, "': ", gai_strerror(error));
    return error == EAI_AGAIN ? absl::UnavailableError(text) : absl::InvalidArgumentError(text);
  }
  const std::unique_ptr<addrinfo, decltype(&freeaddrinfo)> owner(found, &freeaddrinfo);
  std::vector<SocketAddress> addresses;
  for (const addrinfo* next = found; next != nullptr; next = next->ai_next) {
    SocketAddress& address = addresses.emplace_back();
    std::memcpy(&address.storage, next->ai_addr, next->ai_addrlen);
    address.bytes = next->ai_addrlen;
    if (IsEveryAddress(address) && host != "0.0.0.0" && host != "::") {
      return absl::InvalidArgumentError(
          absl::StrCat("JoinNcclByTcp: host '", host,
                       "' means every address of the machine, expected one of them, "
                       "or 0.0.0.0 or :: for all"));
    }
  }
  return addresses;
}

absl::StatusOr<Descriptor> ListenOn(const std::vector<SocketAddress>& addresses) {
  absl::Status status;
  for (const SocketAddress& address : addresses) {
    int error = 0;
    absl::StatusOr<Descriptor> listener = ListenOn(address, &error);
    if (listener.ok()) return listener;
    status = listener.status();
    if (error != EADDRNOTAVAIL && error != EAFNOSUPPORT) break;
  }
  return status;
}

Descriptor AcceptFrom(const Descriptor& listener) {
  return Descriptor(accept4(listener.number(), nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC));
}

absl::StatusOr<Descriptor> ConnectTo(const SocketAddress& address, Patience& patience,
                                     SteadyTime deadline) {
  const std::string place = ToString(address);
  Descriptor socket = OpenSocket(address);
  if (!socket.is_open()) return SystemError(place, errno);
  if (connect(socket.number(), address.get(), address.bytes) != 0) {
    if (errno != EINPROGRESS) return SystemError(place, errno);
    if (!IsReady(socket, POLLOUT, patience, deadline)) return SystemError(place, ETIMEDOUT);
    int error = 0;
    socklen_t bytes = sizeof(error);
    (void)getsockopt(socket.number(), SOL_SOCKET, SO_ERROR, &error, &bytes);
    if (error != 0) return SystemError(place, error);
  }
  if (ToString(NearEnd(socket)) != ToString(FarEnd(socket))) return socket;
  // Nobody listens: the system chose the same port for this side, and the connection is to itself.
  // Reset rather than closed: it leaves nothing behind that keeps rank 0 from this port.
  const linger reset = {.l_onoff = 1, .l_linger = 0};
  (void)setsockopt(socket.number(), SOL_SOCKET, SO_LINGER, &reset, sizeof(reset));
  return SystemError(place, ECONNREFUSED);
}

void WaitFor(absl::Span<pollfd> sockets, SteadyTime deadline) {
  const int64_t wait = absl::ToInt64Milliseconds(
      absl::Ceil(absl::FromChrono(deadline - Patience::Clock::now()), absl::Milliseconds(1)));
  constexpr int64_t kLongest = 60'000;
  (void)poll(sockets.data(), sockets.size(),
             static_cast<int>(std::clamp<int64_t>(wait, 0, kLongest)));
}

absl::Status Send(const Descriptor& to, absl::string_view bytes) {
  const ssize_t sent = send(to.number(), bytes.data(), bytes.size(), MSG_NOSIGNAL);
  if (sent == static_cast<ssize_t>(bytes.size())) return absl::OkStatus();
  return SystemError("cannot send", sent < 0 ? errno : ENOBUFS);
}

absl::StatusOr<size_t> ReceiveSome(const Descriptor& from, absl::Span<char> bytes) {
  const ssize_t received = recv(from.number(), bytes.data(), bytes.size(), 0);
  if (received > 0) return static_cast<size_t>(received);
  if (received == 0) return absl::UnavailableError("the connection was closed");
  if (errno == EAGAIN || errno == EINTR) return size_t{0};
  return SystemError("cannot receive", errno);
}

absl::Status Receive(const Descriptor& from, absl::Span<char> bytes, Patience& patience,
                     SteadyTime deadline) {
  while (!bytes.empty()) {
    if (!IsReady(from, POLLIN, patience, deadline)) return SystemError("silent", ETIMEDOUT);
    MOE_ASSIGN_OR_RETURN(const size_t received, ReceiveSome(from, bytes));
    bytes.remove_prefix(received);
  }
  return absl::OkStatus();
}

}  // namespace moe
