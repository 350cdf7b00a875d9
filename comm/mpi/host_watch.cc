#include "comm/mpi/host_watch.h"

#include <algorithm>
#include <array>
#include <cerrno>
#include <chrono>
#include <csignal>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <functional>
#include <map>
#include <memory>
#include <set>
#include <utility>
#include <vector>

#include <absl/strings/numbers.h>
#include <absl/strings/str_cat.h>
#include <absl/strings/str_join.h>
#include <absl/strings/str_split.h>
#include <absl/time/clock.h>
#include <fcntl.h>
#include <poll.h>
#include <sys/epoll.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#include "comm/patience.h"
#include "kernels/base/status_macros.h"
#include "kernels/base/trace.h"

namespace moe {
namespace {

// Messages from ranks to the watch, and back. With kHost comes the file of the rank's places.
enum Word : int32_t { kRank, kHost, kMaySpeak, kMaySpeakInTurn, kYes, kNo, kEnds };
struct Message {
  int32_t word = 0;
  int32_t rank = -1;                 // kHost: number of this host among those of the job; -1: alone
  std::array<char, 1000> text = {};  // kYes: ranks that have not asked
};

constexpr size_t kNameBytes = 6;  // bytes of an abstract address that the system chooses

// The first rank that asks is answered after this time: by then all ranks have asked whose deadline
// passes at the same time.
constexpr absl::Duration kAskingTime = absl::Milliseconds(250);
// Time between the hosts' answers, in which a launcher ends a job, and the longest until the last.
constexpr absl::Duration kTurn = absl::Milliseconds(500);
constexpr absl::Duration kLastTurn = absl::Seconds(3);
// By then a launcher that has killed a rank of its own accord has ended, too. One that finds a rank
// dead gives the others longer: two seconds (Open MPI).
constexpr absl::Duration kLauncherEnds = absl::Milliseconds(1500);
// Longest wait for a process that only answers.
constexpr absl::Duration kAnswerTime = absl::Seconds(1);

// A message with room for a descriptor.
class Envelope {
 public:
  explicit Envelope(Message& message) : bytes_{.iov_base = &message, .iov_len = sizeof message} {}

  bool Send(int to, int file) {
    if (file >= 0) {
      cmsghdr* const part = CMSG_FIRSTHDR(&header_);
      *part = {
          .cmsg_len = CMSG_LEN(sizeof file), .cmsg_level = SOL_SOCKET, .cmsg_type = SCM_RIGHTS};
      std::memcpy(CMSG_DATA(part), &file, sizeof file);
    } else {
      header_.msg_controllen = 0;
    }
    return ::sendmsg(to, &header_, MSG_NOSIGNAL) == static_cast<ssize_t>(sizeof(Message));
  }
  bool Receive(int from, Descriptor& file) {
    const ssize_t got = ::recvmsg(from, &header_, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);
    const cmsghdr* const part = got < 0 ? nullptr : CMSG_FIRSTHDR(&header_);
    if (part != nullptr && part->cmsg_type == SCM_RIGHTS) {
      int number = -1;
      std::memcpy(&number, CMSG_DATA(part), sizeof number);
      file = Descriptor(number);
    }
    return got == static_cast<ssize_t>(sizeof(Message));
  }

 private:
  iovec bytes_;
  alignas(cmsghdr) std::array<char, CMSG_SPACE(sizeof(int))> control_ = {};
  msghdr header_ = {.msg_iov = &bytes_,
                    .msg_iovlen = 1,
                    .msg_control = control_.data(),
                    .msg_controllen = control_.size()};
};

bool Send(int to, Message message, const Descriptor& file = Descriptor()) {
  return Envelope(message).Send(to, file.number());
}

sockaddr_un AddressOf(const std::string& name) {
  sockaddr_un address = {};
  address.sun_family = AF_UNIX;
  std::copy_n(name.data(), std::min(name.size(), sizeof address.sun_path), address.sun_path);
  return address;
}

int MillisecondsUntil(SteadyTime then) {
  const auto left = absl::FromChrono(then - std::chrono::steady_clock::now());
  return static_cast<int>(std::max<int64_t>(0, absl::ToInt64Milliseconds(left)));
}

socklen_t LengthOf(const std::string& name) {
  return static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + name.size());
}

Descriptor NewSocket() {
  return Descriptor(::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0));
}

// A process that dies closes its files in the order of their numbers. MPICH's launcher listens on a
// file that the process was born with, and ends the other ranks as soon as it closes: `socket`
// takes its number, and that file a later one, so that the watch is informed first. Called before
// MPI reads PMI_FD.
void CloseBeforeLaunchers(Descriptor& socket) {
  const char* const text = std::getenv("PMI_FD");
  int number = -1;
  if (text == nullptr || !absl::SimpleAtoi(text, &number) || number > socket.number()) return;
  const int later = ::fcntl(number, F_DUPFD, socket.number());
  if (later < 0 || ::dup3(socket.number(), number, O_CLOEXEC) < 0) return;
  ::setenv("PMI_FD", std::to_string(later).c_str(), 1);
  socket = Descriptor(number);
}

// A socket with an abstract address that the system chose: "" if it has none.
std::string Listen(int socket) {
  const sockaddr_un any = AddressOf("");
  sockaddr_un own = {};
  socklen_t length = sizeof own;
  if (::bind(socket, reinterpret_cast<const sockaddr*>(&any), sizeof any.sun_family) != 0 ||
      ::listen(socket, SOMAXCONN) != 0 ||
      ::getsockname(socket, reinterpret_cast<sockaddr*>(&own), &length) != 0) {
    return "";
  }
  const size_t bytes = length - offsetof(sockaddr_un, sun_path);
  return bytes == kNameBytes ? std::string(own.sun_path, bytes) : "";
}

// What follows the name in a process's stat; empty if it is gone.
std::vector<std::string> StatOf(pid_t process) {
  std::ifstream file(absl::StrCat("/proc/", process, "/stat"));
  std::string text;
  std::getline(file, text);
  const size_t name_end = text.rfind(") ");
  if (name_end == std::string::npos) return {};
  return absl::StrSplit(text.substr(name_end + 2), ' ');
}

bool IsStopped(pid_t process) {
  const std::vector<std::string> stat = StatOf(process);
  return !stat.empty() && (stat.front() == "T" || stat.front() == "t");
}

// Whether, for `whole`, somebody reads what is written to the pipe behind `fd`; false where `fd` is
// something else, whose reader is unknown.
bool ReaderStays(int fd, absl::Duration whole) {
  struct stat about = {};
  if (::fstat(fd, &about) != 0 || !S_ISFIFO(about.st_mode)) return false;
  const SteadyTime end = SteadyIn(whole);
  pollfd state = {.fd = fd, .events = 0, .revents = 0};
  for (;;) {
    const int events = ::poll(&state, 1, MillisecondsUntil(end));
    if (events >= 0 || errno != EINTR) return events == 0;
  }
}

// Whether a launcher ends processes in this way.
bool IsOfLaunchers(int status) {
  return WIFSIGNALED(status) && (WTERMSIG(status) == SIGTERM || WTERMSIG(status) == SIGKILL);
}

// Whether a rank with this wait status failed by itself. A library may end one, with an exit code
// or by SIGABRT, because a rank of another host is gone.
bool IsCrash(int status) {
  if (status < 0 || !WIFSIGNALED(status)) return false;
  const int signal = WTERMSIG(status);
  return signal == SIGSEGV || signal == SIGBUS || signal == SIGILL || signal == SIGFPE;
}

// Wait status of a process that is exiting: it can be read before the process's files are closed.
// -1: it can no longer be read.
int WaitStatusOf(pid_t process) {
  const std::vector<std::string> stat = StatOf(process);
  int status = -1;
  return !stat.empty() && absl::SimpleAtoi(stat.back(), &status) ? status : -1;
}

// The process beside the ranks.
class Watch {
 public:
  Watch(int listener, const std::function<void(const absl::Status&)>& report)
      : report_(report), epoll_(::epoll_create1(EPOLL_CLOEXEC)), listener_(listener) {
    Add(listener);
  }

  // Runs until the last rank is gone. Events arrive in the order in which they happened: where a
  // launcher ends all ranks after the first, the first arrives first.
  void Run() {
    do {
      epoll_event event = {};
      const int patience_ms = asking_.empty() ? -1 : MillisecondsUntil(answer_at_);
      const int events = ::epoll_wait(epoll_.number(), &event, 1, patience_ms);
      if (events == 0) AnswerAll();
      if (events < 1) continue;
      if (event.data.fd == listener_) {
        Accept();
      } else {
        Hear(event.data.fd);
      }
    } while (!members_.empty());
  }

 private:
  struct Member {
    Descriptor socket;
    pid_t process = 0;
    int rank = -1;
    bool asks = false, ends = false;
    std::unique_ptr<LastPlaces> places = {};  // nullptr: unknown
  };

  // "rank 1 (process 7) <what> 4ms after it came to AllToAllV (dispatch, layer 0, step 2)": from
  // there to `at_ns`, a MonotonicNs.
  static std::string Describe(const Member& member, absl::string_view what, int64_t at_ns) {
    const std::string text =
        absl::StrCat("rank ", member.rank, " (process ", member.process, ") ", what);
    const auto place = member.places == nullptr ? std::nullopt : member.places->Latest();
    if (!place.has_value()) return text;
    const absl::Duration since = absl::Nanoseconds(std::max<int64_t>(0, at_ns - place->at_ns));
    return absl::StrCat(text, " ", absl::FormatDuration(absl::Trunc(since, absl::Milliseconds(1))),
                        " after it came to ", TextOf(*place));
  }

  static std::string HowEnded(int status) {
    if (status < 0) return "is gone without a word";
    if (WIFSIGNALED(status)) {
      return absl::StrCat("was killed by signal ", WTERMSIG(status), " (",
                          strsignal(WTERMSIG(status)), ")");
    }
    return absl::StrCat("left with exit code ", WEXITSTATUS(status), " and without a word");
  }

  void Add(int socket) {
    epoll_event event = {};
    event.events = EPOLLIN;
    event.data.fd = socket;
    (void)::epoll_ctl(epoll_.number(), EPOLL_CTL_ADD, socket, &event);
  }

  // Abstract addresses are open to every user of the machine.
  void Accept() {
    Descriptor socket(::accept4(listener_, nullptr, nullptr, SOCK_CLOEXEC));
    ucred peer = {};
    socklen_t length = sizeof peer;
    if (::getsockopt(socket.number(), SOL_SOCKET, SO_PEERCRED, &peer, &length) != 0) return;
    if (peer.uid != ::geteuid()) return;
    const int number = socket.number();
    Add(number);
    members_[number] = {.socket = std::move(socket), .process = peer.pid};
    several_ = several_ || members_.size() > 1;
  }

  void Hear(int socket) {
    Member& member = members_[socket];
    Message message;
    Descriptor file;
    if (!Envelope(message).Receive(socket, file)) {
      const Member gone = std::move(member);
      members_.erase(socket);
      asking_.erase(std::remove(asking_.begin(), asking_.end(), socket), asking_.end());
      if (!gone.ends) Gone(gone);
      return;
    }
    switch (message.word) {
      case kRank:
        member.rank = message.rank;
        Send(socket, {.word = kYes});
        break;
      case kHost:
        one_host_ = message.rank < 0;
        turn_ = std::min(kLastTurn, kTurn * (message.rank + 1));
        member.places = LastPlaces::Open(file);
        break;
      case kMaySpeak:
        turn_ = absl::ZeroDuration();
        [[fallthrough]];
      case kMaySpeakInTurn:
        if (asking_.empty() || message.word == kMaySpeak) answer_at_ = SteadyIn(kAskingTime);
        asking_.push_back(socket);
        member.asks = true;
        break;
      case kEnds:
        member.ends = true;
        ended_.push_back(member.process);
        break;
      default:
        break;
    }
  }

  void AnswerAll() {
    const absl::Duration turn = std::exchange(turn_, absl::ZeroDuration());
    if (turn > absl::ZeroDuration() && Silent().empty()) {
      answer_at_ = SteadyIn(turn);
      return;
    }
    std::sort(asking_.begin(), asking_.end(),
              [&](int a, int b) { return members_[a].rank < members_[b].rank; });
    for (const int socket : std::exchange(asking_, {})) {
      Message answer = {.word = std::exchange(spoken_, true) ? kNo : kYes};
      if (answer.word == kYes) Silent().copy(answer.text.data(), answer.text.size() - 1);
      Send(socket, answer);
    }
  }

  // Ranks that have not asked, as text. A stopped rank holds up the ranks for which others wait.
  std::string Silent() const {
    std::vector<std::string> silent;
    for (const auto& [socket, member] : members_) {
      if (member.ends || member.asks) continue;
      silent.push_back(Describe(member, IsStopped(member.process) ? "is stopped" : "does not fail",
                                MonotonicNs()));
    }
    return absl::StrJoin(silent, ", ");
  }

  // Also reports other ranks that are exiting or gone: a library may have ended `gone` because of
  // one of them, whose memory goes before its files are closed, and a launcher ends the rest at
  // once. No launcher makes a rank leave with an exit code: a rank that does comes first.
  void Gone(const Member& gone) {
    const int64_t at_ns = MonotonicNs();  // CameFirst waits
    std::vector<std::pair<Member const*, int>> going = {{&gone, WaitStatusOf(gone.process)}};
    if (gone.asks || LauncherEnded(going.front().second)) return;
    for (const auto& [socket, member] : members_) {
      const int status = WaitStatusOf(member.process);
      if (status != 0 && !member.ends) going.emplace_back(&member, status);
    }
    if (spoken_ || !CameFirst(going.front().second)) return;
    spoken_ = true;
    std::stable_partition(going.begin(), going.end(), [](const auto& rank) {
      return rank.second >= 0 && WIFEXITED(rank.second);
    });
    std::vector<std::string> texts;
    for (const auto& [member, status] : going) {
      texts.push_back(Describe(*member, HowEnded(status), at_ns));
    }
    report_(absl::UnavailableError(
        absl::StrCat("on host ", HostName(), " ", absl::StrJoin(texts, ", "))));
    AwaitReader(STDERR_FILENO, kAnswerTime);
  }

  // Whether the launcher ended the rank: another rank has left after its kEnds, with an exit code
  // of its own, and the launcher ends those that are still leaving MPI.
  bool LauncherEnded(int status) const {
    return status > 0 && IsOfLaunchers(status) &&
           std::any_of(ended_.begin(), ended_.end(),
                       [](pid_t process) { return WaitStatusOf(process) != 0; });
  }

  // Whether a rank with this wait status ended of itself, and not as the launcher ends a job
  // because of another host. Waits, unless that is certain, to see whether the launcher ends: so a
  // rank that a library ends because of another is reported after that one.
  bool CameFirst(int status) const {
    if (one_host_ || OthersLiveOn() || IsCrash(status)) return true;
    const bool may_be_launchers = status < 0 || IsOfLaunchers(status);
    if (may_be_launchers && several_) return false;
    return ReaderStays(STDERR_FILENO, kLauncherEnds) || !may_be_launchers;
  }

  bool OthersLiveOn() const {
    absl::SleepFor(absl::Milliseconds(100));
    for (const auto& [socket, member] : members_) {
      pollfd state = {.fd = socket, .events = POLLRDHUP, .revents = 0};
      if (::poll(&state, 1, 0) == 0) return true;
    }
    return false;
  }

  const std::function<void(const absl::Status&)>& report_;
  const Descriptor epoll_;
  const int listener_;
  std::map<int, Member> members_;  // by socket
  std::vector<pid_t> ended_;       // processes of ranks that have sent kEnds
  std::vector<int> asking_;        // sockets of ranks that ask to report
  SteadyTime answer_at_;           // time of the answer, while ranks ask
  bool one_host_ = false;          // all ranks are on this host
  bool several_ = false;           // this host has more than one rank
  absl::Duration turn_;            // what other hosts have before this one, unless it is awaited
  bool spoken_ = false;
};

// Body of the forked process: of its parent's files only standard error stays open, and nothing
// that is sent to the job's processes reaches it.
[[noreturn]] void RunWatch(int listener, const RunOptions& options) {
  constexpr int kListener = STDERR_FILENO + 1;
  ::setsid();
  ::prctl(PR_SET_NAME, "moe-watch");
  for (const int number : {SIGTERM, SIGINT, SIGHUP, SIGPIPE}) ::signal(number, SIG_IGN);
  ::dup2(listener, kListener);
  ::close_range(kListener + 1, ~0U, 0);
  for (const int stream : {STDIN_FILENO, STDOUT_FILENO}) {
    ::close(stream);
    ::open("/dev/null", O_RDWR);
  }
  Watch(kListener, options.report).Run();
  _exit(0);
}

}  // namespace

HostWatch::HostWatch(const RunOptions& options) {
  const LaunchInfo& launch = options.plan.launch;
  if (launch.size == 1 || !options.report) return;
  peer_ = NewSocket();
  CloseBeforeLaunchers(peer_);
  if (launch.local_rank != 0) return;
  const Descriptor listener = NewSocket();
  name_ = Listen(listener.number());
  if (name_.empty()) return;
  Connect(name_, launch.rank);  // before the fork: the watch ends when it has no rank
  if (::fork() == 0) RunWatch(listener.number(), options);
}

HostWatch::~HostWatch() {
  Send(peer_.number(), {.word = kEnds});
}

void HostWatch::Connect(const std::string& name, int rank) {
  const sockaddr_un address = AddressOf(name);
  const auto* const to = reinterpret_cast<const sockaddr*>(&address);
  if (::connect(peer_.number(), to, LengthOf(name)) == 0)
    Send(peer_.number(), {.word = kRank, .rank = rank});
}

absl::Status HostWatch::Join(Communicator& world, const LastPlaces* places, uint64_t host) {
  struct Card {
    int64_t host = 0;
    std::array<char, 8> name = {};
  };
  static_assert(sizeof(Card) == 2 * sizeof(int64_t));
  Card mine = {.host = static_cast<int64_t>(host)};
  std::copy(name_.begin(), name_.end(), mine.name.begin());
  std::vector<Card> all(world.size());
  const auto bytes = [](Card* cards, size_t count) {
    return absl::MakeSpan(reinterpret_cast<uint8_t*>(cards), count * sizeof(Card));
  };
  const auto stream = MakeInlineStream();
  MOE_RETURN_IF_ERROR(
      world.AllGather<uint8_t>(bytes(&mine, 1), bytes(all.data(), all.size()), *stream));
  MOE_RETURN_IF_ERROR(stream->Synchronize());
  const Card* const first = std::find_if(all.data(), all.data() + all.size(),
                                         [&](const Card& card) { return card.host == mine.host; });
  const std::string name(first->name.data(), first->name[1] == 0 ? 0 : kNameBytes);
  if (name != name_ && !name.empty() && peer_.is_open()) {
    if (!name_.empty()) {  // every rank took itself for the first
      Send(peer_.number(), {.word = kEnds});
      peer_ = NewSocket();
    }
    Connect(name, world.rank());
  }
  std::set<int64_t> before;  // hosts of ranks before this host's
  for (const Card* card = all.data(); card != first; ++card) before.insert(card->host);
  const bool one_host =
      std::all_of(all.begin(), all.end(), [&](const Card& card) { return card.host == mine.host; });
  const Descriptor none;
  Send(peer_.number(), {.word = kHost, .rank = one_host ? -1 : static_cast<int32_t>(before.size())},
       places == nullptr ? none : places->file());
  // On a busy machine the watch may start late, and rank by rank: each waits for it, at most
  // kAnswerTime.
  (void)Answer(kAnswerTime);
  return absl::OkStatus();
}

std::optional<std::string> HostWatch::Answer(absl::Duration longest) {
  pollfd state = {.fd = peer_.number(), .events = POLLIN, .revents = 0};
  Message answer;
  if (::poll(&state, 1, static_cast<int>(absl::ToInt64Milliseconds(longest))) < 1) return "";
  if (::recv(peer_.number(), &answer, sizeof answer, MSG_DONTWAIT) != sizeof answer) return "";
  if (answer.word == kNo) return std::nullopt;
  return std::string(answer.text.data(), strnlen(answer.text.data(), answer.text.size()));
}

std::optional<std::string> HostWatch::MaySpeak(const absl::Status& status) {
  const bool late = absl::IsDeadlineExceeded(status);
  if (!Send(peer_.number(), {.word = late ? kMaySpeakInTurn : kMaySpeak})) return "";
  return Answer(late ? kAnswerTime + kLastTurn : kAnswerTime);
}

}  // namespace moe
