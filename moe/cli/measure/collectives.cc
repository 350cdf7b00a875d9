#include "moe/cli/measure/collectives.h"

#include <algorithm>
#include <functional>
#include <numeric>
#include <set>
#include <utility>

#include "comm/hosts.h"
#include "comm/world_plan.h"
#include "kernels/base/status_macros.h"

namespace moe::measure {

namespace {

constexpr double kMicroseconds = 1e-3;  // in a nanosecond

// The rank with the largest mean of `values`, [R][n], one value for each rank and call; -1 unless
// its difference from the next largest is beyond the noise.
int LargestBeyondNoise(absl::Span<const double> values, int ranks) {
  const size_t calls = values.size() / static_cast<size_t>(ranks);
  const auto of = [&](int r) {
    return values.subspan(r * calls, calls);
  };
  std::vector<std::pair<double, int>> by_mean;
  for (int r = 0; r < ranks; ++r) by_mean.emplace_back(Describe(of(r)).mean, r);
  std::partial_sort(by_mean.begin(), by_mean.begin() + std::min(2, ranks), by_mean.end(),
                    std::greater<>());
  if (ranks < 2) return -1;
  const int largest = by_mean[0].second;
  std::vector<double> differences;
  for (size_t i = 0; i < calls; ++i) {
    differences.push_back(of(largest)[i] - of(by_mean[1].second)[i]);
  }
  const Sample sample = SampleOfSeries(differences);
  return sample.mean > StudentT975(sample.degrees) * sample.error ? largest : -1;
}

// A batch is gathered in one piece; this many stamps are 16 MB a rank.
constexpr int64_t kLargestBatch = 1'000'000;

// [rank][call], growing by batches of [R][n].
class StampLog {
 public:
  explicit StampLog(int ranks) : of_rank_(ranks) {}

  void Append(const std::vector<CallStamps>& batch) {
    const size_t calls = batch.size() / of_rank_.size();
    for (size_t r = 0; r < of_rank_.size(); ++r) {
      const auto begin = batch.begin() + static_cast<int64_t>(r * calls);
      of_rank_[r].insert(of_rank_[r].end(), begin, begin + static_cast<int64_t>(calls));
    }
  }
  // Summary of the ranks that take part, ascending; slow_rank is one of them, or -1.
  TimingSummary Summary(const std::vector<int>& ranks, ClocksShared clocks) const {
    std::vector<CallStamps> all;
    for (const int r : ranks) all.insert(all.end(), of_rank_[r].begin(), of_rank_[r].end());
    TimingSummary summary = Summarise(all, static_cast<int>(ranks.size()), clocks);
    if (summary.slow_rank >= 0) summary.slow_rank = ranks[summary.slow_rank];
    return summary;
  }
  // Time from the first call to the last, by rank 0's clock.
  absl::Duration Elapsed() const {
    return absl::Nanoseconds(of_rank_[0].back().leave_ns - of_rank_[0].front().enter_ns);
  }

 private:
  std::vector<std::vector<CallStamps>> of_rank_;
};

// Calls of the next batch: as many as there were, if time allows; 0 = enough.
int64_t NextBatch(const TimingSummary& so_far, absl::Duration elapsed,
                  const MeasureOptions& options) {
  if (so_far.samples_us.cv_pct <= options.max_noise_pct) return 0;
  const absl::Duration left = options.budget - elapsed;
  if (left <= absl::ZeroDuration()) return 0;
  const double affordable = absl::FDivDuration(left, elapsed) * static_cast<double>(so_far.calls);
  return std::min({so_far.calls, kLargestBatch,
                   static_cast<int64_t>(std::min(affordable, static_cast<double>(kLargestBatch)))});
}

absl::Status WarmUp(CollectiveCase& what, int calls) {
  for (int i = 0; i < calls; ++i) {
    MOE_RETURN_IF_ERROR(what.TurnTo(i));
    MOE_RETURN_IF_ERROR(what.Prepare());
    MOE_RETURN_IF_ERROR(what.Call());
  }
  return absl::OkStatus();
}

// The stamps of calls first .. first + n - 1 on every rank, [R][n]: TurnTo, Prepare, Barrier,
// stamp, Call, stamp, check. The barrier keeps the check of one rank out of the time of another.
// Collective; the same result on every rank.
absl::StatusOr<std::vector<CallStamps>> TimeCalls(CollectiveCase& timed, int64_t first,
                                                  int64_t calls, Check check, int64_t& wrong) {
  static_assert(sizeof(CallStamps) == 2 * sizeof(int64_t));
  Communicator& comm = timed.comm();
  std::vector<CallStamps> mine(calls);
  for (CallStamps& call : mine) {
    MOE_RETURN_IF_ERROR(timed.TurnTo(first++));
    MOE_RETURN_IF_ERROR(timed.Prepare());
    MOE_RETURN_IF_ERROR(comm.Barrier());
    call.enter_ns = MonotonicNs();
    MOE_RETURN_IF_ERROR(timed.Call());
    call.leave_ns = MonotonicNs();
    if (check == Check::kNo) continue;
    MOE_ASSIGN_OR_RETURN(const int64_t wrong_here, timed.CountWrong());
    wrong += wrong_here;
  }
  std::vector<CallStamps> all(static_cast<size_t>(calls) * comm.size());
  const absl::Span<const int64_t> send(reinterpret_cast<const int64_t*>(mine.data()),
                                       2 * mine.size());
  const absl::Span<int64_t> received(reinterpret_cast<int64_t*>(all.data()), 2 * all.size());
  const auto stream = MakeInlineStream();
  MOE_RETURN_IF_ERROR(comm.AllGather<int64_t>(send, received, *stream, timed.site()));
  MOE_RETURN_IF_ERROR(stream->Synchronize());
  return all;
}

// Ranks that take part.
std::vector<int> Members(const CaseSpec& spec, int ranks) {
  if (spec.op == Op::kPointToPoint && spec.source == spec.destination) return {spec.source};
  if (spec.op == Op::kPointToPoint) {
    return {std::min(spec.source, spec.destination), std::max(spec.source, spec.destination)};
  }
  std::vector<int> all(ranks);
  std::iota(all.begin(), all.end(), 0);
  return all;
}

// Records the calls of this rank in a batch, [R][n], from number `first` on.
void Record(absl::Span<const CallStamps> stamps, const CollectiveCase& timed, int64_t first,
            TraceRecorder* trace) {
  if (trace == nullptr) return;
  BenchRow row;
  timed.Describe(1, row);
  const Traffic traffic = timed.moved();
  const int rank = timed.comm().rank();
  const int ranks = timed.comm().size();
  const bool known = row.bytes_self >= 0 && traffic.ranks() == ranks &&
                     timed.spec().routing.kind != RoutingSpec::kTrace;  // each call has its own
  const size_t calls = stamps.size() / ranks;
  for (size_t i = 0; i < calls; ++i) {
    TraceEvent* const event = trace->Open();
    if (event == nullptr) continue;
    event->name = NameOf(timed.spec().op);
    event->category = "collective";
    event->begin_ns = stamps[rank * calls + i].enter_ns;
    event->end_ns = stamps[rank * calls + i].leave_ns;
    event->call = static_cast<int32_t>(first + static_cast<int64_t>(i));
    if (!known) continue;
    event->bytes_self = traffic.at(rank, rank) * SizeOf(row.dtype);
    event->bytes = traffic.Sent(rank) * SizeOf(row.dtype) - event->bytes_self;
  }
}

void SetTimes(const TimingSummary& summary, BenchRow& row) {
  row.iterations = summary.calls;
  row.time_us = summary.time_us;
  row.samples_us = summary.samples_us;
  row.wait_pct = summary.wait_pct;
  row.slow_rank = summary.slow_rank;
}

}  // namespace

TimingSummary Summarise(absl::Span<const CallStamps> stamps, int ranks, ClocksShared clocks) {
  MOE_CHECK(ranks > 0 && stamps.size() % static_cast<size_t>(ranks) == 0);
  const auto calls = static_cast<int64_t>(stamps.size()) / ranks;
  TimingSummary summary{.calls = calls};
  if (calls == 0) return summary;
  const auto at = [&](int r, int64_t i) -> const CallStamps& {
    return stamps[r * calls + i];
  };
  const bool shared = clocks == ClocksShared::kYes;
  std::vector<int64_t> time(ranks, 0);       // sum over calls of t[r]
  std::vector<double> blame(stamps.size());  // [R][n]: a[r] + b[r] from the first entry, or t[r]
  std::vector<double> samples;
  int64_t waited = 0;
  for (int64_t i = 0; i < calls; ++i) {
    int64_t first = at(0, i).enter_ns;
    int64_t last = first;
    int64_t longest = 0;
    for (int r = 0; r < ranks; ++r) {
      first = std::min(first, at(r, i).enter_ns);
      last = std::max(last, at(r, i).enter_ns);
      longest = std::max(longest, at(r, i).leave_ns - at(r, i).enter_ns);
    }
    for (int r = 0; r < ranks; ++r) {
      const CallStamps& call = at(r, i);
      time[r] += call.leave_ns - call.enter_ns;
      const int64_t late = (call.enter_ns - first) + (call.leave_ns - first);
      blame[r * calls + i] = static_cast<double>(shared ? late : call.leave_ns - call.enter_ns);
      waited += std::min(last, call.leave_ns) - call.enter_ns;
    }
    samples.push_back(static_cast<double>(longest) * kMicroseconds);
  }
  int64_t total = 0;
  for (const int64_t t : time) total += t;
  summary.slow_rank = LargestBeyondNoise(blame, ranks);
  summary.time_us = static_cast<double>(*std::max_element(time.begin(), time.end())) /
                    static_cast<double>(calls) * kMicroseconds;
  summary.samples_us = Describe(samples);
  summary.wait_pct = total > 0 ? 100 * static_cast<double>(waited) / static_cast<double>(total) : 0;
  if (!shared) summary.wait_pct = kNone;
  return summary;
}

absl::StatusOr<std::unique_ptr<Stream>> StreamOfCalls(Device device) {
  if (device.kind == DeviceKind::kCpu) return MakeInlineStream();
  return MakeStream(device);
}

absl::StatusOr<WorldFacts> FindWorldFacts(Communicator& comm) {
  const auto stream = MakeInlineStream();
  MOE_ASSIGN_OR_RETURN(const auto all, HostsOf(HostId(), comm, *stream));
  WorldFacts facts;
  facts.hosts = static_cast<int>(std::set<uint64_t>(all.begin(), all.end()).size());
  facts.clocks = facts.hosts == 1 ? ClocksShared::kYes : ClocksShared::kNo;
  facts.transport = std::string(comm.backend() == "mpi" ? LinkedMpi() : comm.backend());
  if (comm.backend() == "local") facts.transport = "memory";
  return facts;
}

absl::StatusOr<BenchRow> MeasureCollective(const CaseSpec& spec, const MeasureOptions& options,
                                           const WorldFacts& facts, Communicator& comm,
                                           Stream& stream) {
  MOE_ASSIGN_OR_RETURN(const auto timed, CollectiveCase::Create(spec, comm, stream));
  BenchRow row;
  timed->Describe(options.iterations, row);
  row.hosts =
      spec.node_size > 0 ? (comm.size() + spec.node_size - 1) / spec.node_size : facts.hosts;
  row.transport = facts.transport;
  std::unique_ptr<CollectiveCase> copy;
  const bool moves = spec.op != Op::kAllReduce || comm.size() > 1;
  if (moves && spec.op != Op::kMemcpy && spec.op != Op::kPointToPoint) {
    MOE_ASSIGN_OR_RETURN(copy, CollectiveCase::CopyIn(*timed));
  }
  MOE_RETURN_IF_ERROR(WarmUp(*timed, options.warmup));
  if (copy != nullptr) MOE_RETURN_IF_ERROR(WarmUp(*copy, options.warmup));

  const std::vector<int> members = Members(spec, comm.size());
  StampLog calls(comm.size());
  StampLog copies(comm.size());
  TimingSummary summary;
  int64_t wrong = 0;
  int64_t batch = options.iterations;
  while (batch > 0) {
    MOE_ASSIGN_OR_RETURN(const auto stamps,
                         TimeCalls(*timed, summary.calls, batch, options.check, wrong));
    Record(stamps, *timed, summary.calls, options.trace);
    calls.Append(stamps);
    summary = calls.Summary(members, facts.clocks);
    if (copy != nullptr) {
      MOE_ASSIGN_OR_RETURN(
          const auto copied,
          TimeCalls(*copy, 0, std::min<int64_t>(batch, options.iterations), options.check, wrong));
      Record(copied, *copy, 0, options.trace);
      copies.Append(copied);
    }
    batch = NextBatch(summary, calls.Elapsed(), options);
  }
  const auto host = MakeInlineStream();
  MOE_RETURN_IF_ERROR(comm.AllReduce<int64_t>({&wrong, 1}, ReduceOp::kSum, *host, timed->site()));
  MOE_RETURN_IF_ERROR(host->Synchronize());
  row.wrong = options.check == Check::kYes ? wrong : -1;
  timed->Describe(summary.calls, row);
  SetTimes(summary, row);
  if (spec.op == Op::kMemcpy) row.memcpy_gbytes_per_s = row.algbw();
  if (copy != nullptr) {
    const double fastest_us = copies.Summary(members, facts.clocks).samples_us.min;
    row.memcpy_gbytes_per_s = AlgorithmBandwidth(row.size_bytes, fastest_us);
  }
  return row;
}

absl::StatusOr<std::vector<BenchRow>> MeasureRows(const CaseSpec& spec,
                                                  const MeasureOptions& options,
                                                  const WorldFacts& facts, Communicator& comm,
                                                  Stream& stream) {
  std::vector<BenchRow> rows;
  if (spec.op != Op::kPointToPoint) {
    MOE_ASSIGN_OR_RETURN(rows.emplace_back(),
                         MeasureCollective(spec, options, facts, comm, stream));
    return rows;
  }
  const int ranks = comm.size();
  MeasureOptions of_pair = options;
  of_pair.budget = options.budget / (int64_t{ranks} * ranks);
  for (int source = 0; source < ranks; ++source) {
    for (int destination = 0; destination < ranks; ++destination) {
      CaseSpec pair = spec;
      pair.source = source;
      pair.destination = destination;
      MOE_ASSIGN_OR_RETURN(BenchRow row, MeasureCollective(pair, of_pair, facts, comm, stream));
      row.source = source;
      row.destination = destination;
      rows.push_back(std::move(row));
    }
  }
  // The machine's limit, for a pair: the fastest copy of its source inside itself.
  for (BenchRow& row : rows) {
    const BenchRow& inside = rows[row.source * ranks + row.source];
    row.memcpy_gbytes_per_s = AlgorithmBandwidth(row.size_bytes, inside.samples_us.min);
  }
  return rows;
}

}  // namespace moe::measure
