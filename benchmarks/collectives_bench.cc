// collectives_bench: time and bandwidth of the collectives, checked, against plain copies.
//   collectives_bench --ranks 2 --pin --begin 65536 --end 67108864 --factor 4
//   mpirun -n 2 collectives_bench
// A round times a few calls back to back on every rank and takes the slowest rank; us is the median
// over rounds, best the fastest round (on a busy machine the better figure), algbw and busbw belong
// to the median. memcpy, GB/s: every rank copies that many bytes of its own at the same time, in the
// same rounds, so that it sees the same neighbours.
//   size   bytes per rank: what it sends (alltoall, broadcast, allreduce, reducescatter) or receives
//          (allgather), its own part included
//   algbw  size / time
//   busbw  algbw x (R-1)/R for alltoall, allgather and reducescatter, x 2(R-1)/R for allreduce
//   wrong  elements that differ from the exact result, on any rank
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include <absl/strings/str_split.h>
#include <sched.h>

#include <boost/program_options.hpp>

#include "comm/all_reduce.h"
#include "comm/create.h"
#include "kernels/base/buffer.h"
#include "kernels/base/status_macros.h"

namespace moe::bench {
namespace {

struct Options {
  int ranks = 0;  // 0: what PlanWorld chooses
  std::string ops = "alltoall,allgather,reducescatter,broadcast,ring,direct,library";
  int64_t begin = int64_t{64} << 10;
  int64_t end = int64_t{64} << 20;
  int64_t factor = 4;
  int rounds = 21;
  int64_t ring_chunk = RingOptions{}.chunk_bytes;
  double timeout_s = 60;
  bool pin = false;
};

// One collective on buffers of its own. send[i] of rank r is Value(r, i): small integers, so that
// sums of float32 are exact.
struct Case {
  std::string name;
  double bus_factor;
  std::function<absl::Status()> call;
  std::function<int64_t()> wrong;  // after one call on fresh buffers
};

float Value(int rank, int64_t i) {
  return static_cast<float>((int64_t{7} * rank + i) % 61);
}

// What all cases of one size share.
struct Bench {
  Communicator& comm;
  Stream& stream;
  int64_t count;      // float32 per rank
  Buffer send, recv;  // [count]
  std::unique_ptr<AllReducer> reducer;

  absl::Span<float> Send() const { return send.span<float>().first(count); }
  absl::Span<float> Recv() const { return recv.span<float>().first(count); }
  int64_t part() const { return count / comm.size(); }

  void Fill() const {
    for (int64_t i = 0; i < count; ++i) {
      Send()[i] = Value(comm.rank(), i);
      Recv()[i] = -1;
    }
  }
  // Elements of `got` that differ from expected(i).
  template <typename F>
  int64_t Differ(absl::Span<const float> got, F expected) const {
    int64_t wrong = 0;
    for (size_t i = 0; i < got.size(); ++i) wrong += got[i] != expected(static_cast<int64_t>(i));
    return wrong;
  }
  float Sum(int64_t i) const {
    float sum = 0;
    for (int r = 0; r < comm.size(); ++r) sum += Value(r, i);
    return sum;
  }
};

Case AllToAllCase(Bench& b) {
  const double n = b.comm.size();
  return {"alltoall", (n - 1) / n,
          [&b] { return b.comm.AllToAll<float>(b.Send(), b.Recv(), b.stream); },
          [&b] {
            return b.Differ(b.Recv(), [&](int64_t i) {
              return Value(static_cast<int>(i / b.part()), b.comm.rank() * b.part() + i % b.part());
            });
          }};
}

Case AllGatherCase(Bench& b) {
  const double n = b.comm.size();
  return {"allgather", (n - 1) / n,
          [&b] { return b.comm.AllGather<float>(b.Send().first(b.part()), b.Recv(), b.stream); },
          [&b] {
            return b.Differ(b.Recv(), [&](int64_t i) {
              return Value(static_cast<int>(i / b.part()), i % b.part());
            });
          }};
}

Case ReduceScatterCase(Bench& b) {
  const double n = b.comm.size();
  return {"reducescatter", (n - 1) / n,
          [&b] {
            return b.comm.ReduceScatter<float>(b.Send(), b.Recv().first(b.part()), ReduceOp::kSum,
                                               b.stream);
          },
          [&b] {
            return b.Differ(b.Recv().first(b.part()),
                            [&](int64_t i) { return b.Sum(b.comm.rank() * b.part() + i); });
          }};
}

Case BroadcastCase(Bench& b) {
  return {"broadcast", 1.0, [&b] { return b.comm.Broadcast<float>(b.Send(), 0, b.stream); },
          [&b] {
            return b.Differ(b.Send(), [](int64_t i) { return Value(0, i); });
          }};
}

Case AllReduceCase(Bench& b, const std::string& algorithm) {
  const double n = b.comm.size();
  return {"allreduce " + algorithm, 2 * (n - 1) / n,
          [&b] { return b.reducer->Sum(b.Send(), b.stream); },
          [&b] {
            return b.Differ(b.Send(), [&](int64_t i) { return b.Sum(i); });
          }};
}

absl::StatusOr<Case> MakeCase(Bench& b, const std::string& op, const Options& options) {
  if (op == "alltoall") return AllToAllCase(b);
  if (op == "allgather") return AllGatherCase(b);
  if (op == "reducescatter") return ReduceScatterCase(b);
  if (op == "broadcast") return BroadcastCase(b);
  AllReduceAlgorithm algorithm = AllReduceAlgorithm::kRing;
  if (op == "direct") {
    algorithm = AllReduceAlgorithm::kDirect;
  } else if (op == "library") {
    algorithm = AllReduceAlgorithm::kLibrary;
  } else if (op != "ring") {
    return absl::NotFoundError(absl::StrCat("--ops: '", op,
                                            "', expected alltoall, allgather, reducescatter, "
                                            "broadcast, ring, direct or library"));
  }
  MOE_ASSIGN_OR_RETURN(b.reducer,
                       AllReducer::Create(algorithm, b.comm, {.chunk_bytes = options.ring_chunk}));
  return AllReduceCase(b, op);
}

using Work = std::function<absl::Status()>;

// Seconds of `loops` calls, on the slowest rank.
absl::StatusOr<double> TimeRound(Bench& b, const Work& work, int loops) {
  MOE_RETURN_IF_ERROR(b.comm.Barrier());
  const auto start = std::chrono::steady_clock::now();
  for (int i = 0; i < loops; ++i) MOE_RETURN_IF_ERROR(work());
  double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  MOE_RETURN_IF_ERROR(b.comm.AllReduce<double>({&seconds, 1}, ReduceOp::kMax, b.stream));
  return seconds;
}

double Median(std::vector<double> x) {
  std::nth_element(x.begin(), x.begin() + static_cast<int64_t>(x.size() / 2), x.end());
  return x[x.size() / 2];
}

absl::Status RunCase(Bench& b, const Case& c, const Options& options) {
  b.Fill();
  MOE_RETURN_IF_ERROR(b.comm.Barrier());
  MOE_RETURN_IF_ERROR(c.call());
  int64_t wrong = c.wrong();
  MOE_RETURN_IF_ERROR(b.comm.AllReduce<int64_t>({&wrong, 1}, ReduceOp::kSum, b.stream));

  const auto bytes = static_cast<size_t>(b.count) * sizeof(float);
  const Work copy = [&] {
    std::memcpy(b.recv.data(), b.send.data(), bytes);
    return absl::OkStatus();
  };
  // Zeros: sums that repeat in place must neither overflow nor become denormal.
  std::memset(b.send.data(), 0, bytes);
  std::memset(b.recv.data(), 0, bytes);
  MOE_RETURN_IF_ERROR(TimeRound(b, c.call, 2).status());  // warm-up: page faults, first wake-ups
  MOE_ASSIGN_OR_RETURN(const double three, TimeRound(b, c.call, 3));
  const int loops = std::clamp(static_cast<int>(3e-3 / three), 1, 50);
  std::vector<double> calls, copies;
  for (int round = 0; round < options.rounds; ++round) {
    MOE_ASSIGN_OR_RETURN(const double call_s, TimeRound(b, c.call, loops));
    MOE_ASSIGN_OR_RETURN(const double copy_s, TimeRound(b, copy, loops));
    calls.push_back(call_s / loops);
    copies.push_back(copy_s / loops);
  }
  if (b.comm.rank() != 0) return absl::OkStatus();
  const double call_s = Median(calls);
  const double algbw = static_cast<double>(bytes) / call_s / 1e9;
  const double best_s = *std::min_element(calls.begin(), calls.end());
  std::printf("%-18s %5d %11zu %11.1f %11.1f %9.2f %9.2f %9.2f %6ld\n", c.name.c_str(),
              b.comm.size(), bytes, call_s * 1e6, best_s * 1e6, algbw, algbw * c.bus_factor,
              static_cast<double>(bytes) / Median(copies) / 1e9, static_cast<long>(wrong));
  std::fflush(stdout);
  return wrong == 0 ? absl::OkStatus()
                    : absl::InternalError(absl::StrCat(c.name, ": wrong result"));
}

// Keeps this thread on the rank-th of the CPUs that the process may use, as mpirun does: on a busy
// machine the scheduler may put two ranks on one core, which measures the scheduler.
absl::Status Pin(int rank) {
  cpu_set_t allowed;
  CPU_ZERO(&allowed);
  if (sched_getaffinity(0, sizeof(allowed), &allowed) != 0) {
    return absl::InternalError("--pin: the CPUs of this process are unknown");
  }
  int skip = rank % CPU_COUNT(&allowed);
  for (int cpu = 0; cpu < CPU_SETSIZE; ++cpu) {
    if (!CPU_ISSET(cpu, &allowed) || skip-- > 0) continue;
    cpu_set_t one;
    CPU_ZERO(&one);
    CPU_SET(cpu, &one);
    if (sched_setaffinity(0, sizeof(one), &one) == 0) return absl::OkStatus();
    break;
  }
  return absl::InternalError(absl::StrCat("--pin: rank ", rank, " cannot be pinned"));
}

absl::Status RunRank(const Options& options, std::unique_ptr<Communicator> world) {
  if (options.pin) MOE_RETURN_IF_ERROR(Pin(world->rank()));
  const auto stream = MakeInlineStream();
  if (world->rank() == 0) {
    std::printf("# backend %s\n%-18s %5s %11s %11s %11s %9s %9s %9s %6s\n",
                std::string(world->backend()).c_str(), "# op", "ranks", "size B", "us", "best us",
                "algbw", "busbw", "memcpy", "wrong");
  }
  const std::vector<std::string> ops = absl::StrSplit(options.ops, ',');
  for (const std::string& op : ops) {
    const bool absent = (op == "direct" && !world->has_peer_memory()) ||
                        (op == "library" && world->backend() == "local");
    if (absent) continue;
    for (int64_t bytes = options.begin; bytes <= options.end; bytes *= options.factor) {
      const int64_t unit = world->size() * static_cast<int64_t>(sizeof(float));
      Bench b{*world, *stream, std::max<int64_t>(bytes / unit, 1) * world->size(), {}, {}, nullptr};
      MOE_ASSIGN_OR_RETURN(b.send, Buffer::Allocate(b.count * 4));
      MOE_ASSIGN_OR_RETURN(b.recv, Buffer::Allocate(b.count * 4));
      MOE_ASSIGN_OR_RETURN(const Case c, MakeCase(b, op, options));
      MOE_RETURN_IF_ERROR(RunCase(b, c, options));
    }
  }
  return absl::OkStatus();
}

absl::Status Run(const Options& options) {
  MOE_ASSIGN_OR_RETURN(const LaunchInfo launch,
                       DetectLaunch({}, [](const char* name) { return std::getenv(name); }));
  WorldRequest request;
  if (options.ranks > 0) request.ranks = options.ranks;
  MOE_ASSIGN_OR_RETURN(const WorldPlan plan, PlanWorld(request, launch));
  const RunOptions run = {
      .plan = plan,
      .timeout = absl::Seconds(options.timeout_s),
      .report = [](const absl::Status& s) { std::fprintf(stderr, "%s\n", s.ToString().c_str()); },
      .exit_code =
          [](const absl::Status&) {
            return 1;
          }};
  return RunRanks(run, [&options](std::unique_ptr<Communicator> world) {
    return RunRank(options, std::move(world));
  });
}

int Main(int argc, char** argv) {
  namespace po = boost::program_options;
  Options o;
  po::options_description flags("collectives_bench: collectives over threads, or under mpirun");
  flags.add_options()("help", "this text")("ranks", po::value(&o.ranks), "threads (default 4)")(
      "ops", po::value(&o.ops)->default_value(o.ops), "comma list; the last three are all-reduces")(
      "begin", po::value(&o.begin)->default_value(o.begin), "smallest size, bytes per rank")(
      "end", po::value(&o.end)->default_value(o.end), "largest size")(
      "factor", po::value(&o.factor)->default_value(o.factor), "between sizes")(
      "rounds", po::value(&o.rounds)->default_value(o.rounds), "timed rounds")(
      "ring-chunk", po::value(&o.ring_chunk)->default_value(o.ring_chunk), "bytes")(
      "timeout", po::value(&o.timeout_s)->default_value(o.timeout_s), "of every wait, seconds")(
      "pin", po::bool_switch(&o.pin), "one core for each thread");
  try {
    po::variables_map given;
    po::store(po::parse_command_line(argc, argv, flags), given);
    po::notify(given);
    if (given.count("help") > 0) {
      std::printf("usage: collectives_bench [flags]\n");
      for (const auto& flag : flags.options()) {
        std::printf("  --%-12s %s\n", flag->long_name().c_str(), flag->description().c_str());
      }
      return 0;
    }
  } catch (const po::error& e) {
    std::fprintf(stderr, "collectives_bench: %s\n", e.what());
    return 2;
  }
  if (o.begin < 1 || o.factor < 2 || o.rounds < 1 || o.timeout_s <= 0) {
    std::fprintf(stderr,
                 "collectives_bench: expected begin, rounds >= 1, factor >= 2, timeout > 0\n");
    return 2;
  }
  const absl::Status status = Run(o);
  if (!status.ok()) std::fprintf(stderr, "collectives_bench: %s\n", status.ToString().c_str());
  return status.ok() ? 0 : 1;
}

}  // namespace
}  // namespace moe::bench

int main(int argc, char** argv) {
  return moe::bench::Main(argc, argv);
}
