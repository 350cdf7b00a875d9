// Exchange and computing, and gradient sums and backward, run at the same time. Transfers sleep for
// a known time. A busy machine only ever adds time, so one of a few attempts must show the overlap.
#include <algorithm>
#include <cmath>
#include <functional>
#include <memory>
#include <utility>
#include <vector>

#include <absl/strings/str_cat.h>
#include <absl/time/clock.h>
#include <gtest/gtest.h>

#include "moe/layer/moe_layer.h"
#include "moe/pipeline/runner.h"
#include "moe/run/session.h"
#include "moe/train/gradient_reducer.h"
#include "tests/comm/forwarding_communicator.h"
#include "tests/comm/local_ranks.h"
#include "tests/moe/pipeline/own_rows.h"
#include "tests/moe/pipeline/stage_rounds.h"
#include "tests/sanitizers.h"

namespace moe {
namespace {

constexpr int kAttempts = 6;

// Before each transfer the stream sleeps delay(bytes this rank sends). The thread sleeps, so a
// transfer costs time but no processor.
class DelayCommunicator final : public testing::ForwardingCommunicator {
 public:
  using Delay = std::function<absl::Duration(int64_t bytes)>;

  DelayCommunicator(std::unique_ptr<Communicator> inner, Delay delay)
      : ForwardingCommunicator(std::move(inner)), delay_(std::move(delay)) {}

 private:
  absl::Status Before(int64_t bytes, Stream& stream, const Site& /*site*/) override {
    if (bytes == 0) return absl::OkStatus();
    return stream.Enqueue([time = delay_(bytes)] {
      absl::SleepFor(time);
      return absl::OkStatus();
    });
  }
  std::unique_ptr<Communicator> Wrap(std::unique_ptr<Communicator> part) override {
    return std::make_unique<DelayCommunicator>(std::move(part), delay_);
  }

  const Delay delay_;
};

// Of which transfers sleep us_per_kib, but for small ones.
std::unique_ptr<Communicator> Slowed(std::unique_ptr<Communicator> world, double us_per_kib) {
  return std::make_unique<DelayCommunicator>(std::move(world), [us_per_kib](int64_t bytes) {
    return bytes < 8192 ? absl::ZeroDuration()
                        : absl::Microseconds(static_cast<double>(bytes) / 1024 * us_per_kib);
  });
}

// Best of five forwards on two ranks whose transfers sleep us_per_kib.
absl::Duration TimeForward(int overlap, double us_per_kib) {
  constexpr int64_t kTokens = 2048, kHidden = 256;
  absl::Duration best = absl::InfiniteDuration();
  testing::RunLocalRanks(2, [&](std::unique_ptr<Communicator> inner) -> absl::Status {
    const int rank = inner->rank();
    MOE_ASSIGN_OR_RETURN(const auto session,
                         Session::Create({.mesh = {.expert = 2}, .overlap_exchange = overlap > 1},
                                         Slowed(std::move(inner), us_per_kib)));
    ParameterStore store(DType::kFloat32, 1);
    MOE_ASSIGN_OR_RETURN(
        const auto layer,
        MoeLayer<float>::Create(
            {.router = {.gate = "switch", .num_experts = 16, .top_k = 1, .hidden_size = kHidden},
             .ffn_hidden_size = 512,
             .overlap_degree = overlap},
            "mlp.", store, session->context()));
    std::vector<float> x(kTokens * kHidden), y(x.size());
    for (size_t i = 0; i < x.size(); ++i) {
      x[i] = static_cast<float>(std::sin(static_cast<double>(i * (rank + 1))));
    }
    const int64_t bounds[] = {0, kTokens};
    for (int repeat = 0; repeat < 5; ++repeat) {
      const WorkspaceScope scope(*session->context().workspace);
      MOE_RETURN_IF_ERROR(session->context().mesh->world().Barrier());
      const absl::Time start = absl::Now();
      MOE_RETURN_IF_ERROR(
          layer->Forward({.context = session->context(), .batch = {.sequence_offsets = bounds}},
                         {x.data(), kTokens, kHidden}, {y.data(), kTokens, kHidden}));
      if (rank == 0) best = std::min(best, absl::Now() - start);
    }
    return absl::OkStatus();
  });
  return best;
}

// Best of three steps of six micro-batches through a frozen layer, on such ranks.
absl::Duration TimeStep(ScheduleKind schedule, double us_per_kib) {
  absl::Duration best = absl::InfiniteDuration();
  testing::RunLocalRanks(2, [&](std::unique_ptr<Communicator> inner) -> absl::Status {
    const bool first = inner->rank() == 0;
    MOE_ASSIGN_OR_RETURN(const auto session,
                         Session::Create({.mesh = {.expert = 2}, .overlap_exchange = true},
                                         Slowed(std::move(inner), us_per_kib)));
    const Context& context = session->context();
    ParameterStore store(DType::kFloat32, 1, context);
    MOE_ASSIGN_OR_RETURN(
        const auto layer,
        MoeLayer<float>::Create(
            {.router = {.gate = "switch", .num_experts = 16, .top_k = 1, .hidden_size = 256},
             .ffn_hidden_size = 512,
             .train_router = false,
             .train_experts = false},
            "mlp.", store, context));
    MOE_ASSIGN_OR_RETURN(const auto runner, PipelineRunner::Create({schedule}, context));
    testing::OwnRows module(*layer, /*rows=*/512);
    testing::StageLoop loop;
    testing::StageRounds rounds = {context, 6};
    for (int repeat = 0; repeat < 3; ++repeat) {
      MOE_RETURN_IF_ERROR(context.mesh->world().Barrier());
      const absl::Time start = absl::Now();
      MOE_RETURN_IF_ERROR(runner->Run<float>({{&module}, 256}, loop, rounds));
      if (first) best = std::min(best, absl::Now() - start);
    }
    return absl::OkStatus();
  });
  return best;
}

// alone, beside: times without and with overlap, by us_per_kib.
void ExpectOverlap(const std::function<absl::Duration(double)>& alone,
                   const std::function<absl::Duration(double)>& beside) {
  if (testing::kSanitized) GTEST_SKIP() << "compares durations";
  std::string seen;
  for (int attempt = 0; attempt < kAttempts; ++attempt) {
    const absl::Duration compute = alone(0);
    // Choose the link so that the exchange alone takes about as long as the experts: calibrate with
    // a slow one.
    const absl::Duration slow = alone(10) - compute;
    const double us_per_kib = 10 * absl::FDivDuration(compute, slow);
    const absl::Duration exchange = alone(us_per_kib) - compute;
    const absl::Duration together = beside(us_per_kib);
    if (exchange > 0.5 * compute &&
        together < std::max(compute, exchange) + 0.6 * std::min(compute, exchange)) {
      return;
    }
    absl::StrAppend(&seen, "compute ", absl::FormatDuration(compute), ", exchange ",
                    absl::FormatDuration(exchange), ", together ", absl::FormatDuration(together),
                    "\n");
  }
  ADD_FAILURE() << "no overlap in " << kAttempts << " attempts:\n" << seen;
}

// With one chunk the exchange and the experts add up; with four they overlap, but for the first
// chunk in and the last chunk out.
TEST(OverlapTest, ExchangeRunsWhileExpertsCompute) {
  ExpectOverlap([](double us_per_kib) { return TimeForward(1, us_per_kib); },
                [](double us_per_kib) { return TimeForward(4, us_per_kib); });
}

// But for the first forward and the last backward.
TEST(OverlapTest, ExchangeRunsWhileAnotherMicroBatchComputes) {
  ExpectOverlap([](double us_per_kib) { return TimeStep(ScheduleKind::k1F1B, us_per_kib); },
                [](double us_per_kib) { return TimeStep(ScheduleKind::k1F1BOverlap, us_per_kib); });
}

constexpr int kParameters = 8;
constexpr absl::Duration kEach = absl::Milliseconds(10);

// One backward that takes kEach a parameter, while buckets of kEach each travel.
absl::Duration TimeBackward() {
  absl::Duration took;
  testing::RunLocalRanks(2, [&](std::unique_ptr<Communicator> inner) -> absl::Status {
    const int rank = inner->rank();
    auto world = std::make_unique<DelayCommunicator>(std::move(inner), [](int64_t bytes) {
      return bytes >= 512 ? kEach / 2 : absl::Duration();
    });
    MOE_ASSIGN_OR_RETURN(const auto session, Session::Create({}, std::move(world)));
    const Context& context = session->context();
    ParameterStore store(DType::kFloat32, 1);
    for (int i = 0; i < kParameters; ++i) {
      MOE_RETURN_IF_ERROR(store.Add({.name = absl::StrCat("p", i), .rows = 256}).status());
    }
    MOE_ASSIGN_OR_RETURN(const auto reducer,
                         GradientReducer::Create({.bucket_bytes = 1, .max_terms = 2}, store,
                                                 context, session->gradient_stream()));
    MOE_RETURN_IF_ERROR(reducer->Begin());
    const absl::Time start = absl::Now();
    for (int i = kParameters - 1; i >= 0; --i) {
      absl::SleepFor(kEach);
      MOE_RETURN_IF_ERROR(reducer->MarkReady(*store.parameters()[i]));
    }
    MOE_RETURN_IF_ERROR(reducer->Finish());
    if (rank == 0) took = absl::Now() - start;
    return absl::OkStatus();
  });
  return took;
}

// One after the other that is 160 ms, overlapped about 90 ms.
TEST(OverlapTest, BucketsTravelWhileBackwardRuns) {
  if (testing::kSanitized) GTEST_SKIP() << "compares durations";
  absl::Duration best = absl::InfiniteDuration();
  for (int attempt = 0; attempt < kAttempts && best >= kEach * kParameters * 1.6; ++attempt) {
    best = std::min(best, TimeBackward());
  }
  EXPECT_GT(best, kEach * (kParameters + 1) * 0.95);
  EXPECT_LT(best, kEach * kParameters * 1.6);
}

}  // namespace
}  // namespace moe
