// Idle time of pipeline schedules: stages that sleep for as long as a pass would take, a thread
// each, beside the closed forms of docs/parallelism.md.
//
//   pipeline_bench [MILLISECONDS of a forward, 4] [REPETITIONS, 5]
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <thread>
#include <utility>
#include <vector>

#include <absl/time/clock.h>
#include <absl/time/time.h>

#include "comm/local/local_world.h"
#include "kernels/base/status_macros.h"
#include "moe/pipeline/runner.h"
#include "moe/run/deferred_gradients.h"
#include "moe/run/session.h"
#include "tests/moe/pipeline/stage_rounds.h"

namespace moe {
namespace {

// A forward takes `pass`; a backward as long, and the gradients of weights as long again.
class Sleeper final : public Module<float> {
 public:
  explicit Sleeper(absl::Duration pass) : pass_(pass) {}
  absl::Span<Parameter* const> parameters() const override { return {}; }
  absl::Status Forward(const Pass&, MatrixView<const float>, MatrixView<float>) override {
    absl::SleepFor(pass_);
    return absl::OkStatus();
  }
  absl::Status Backward(const Pass& pass, MatrixView<const float>, MatrixView<float>,
                        GradientReady) override {
    absl::SleepFor(pass_);
    if (pass.context.later == nullptr) absl::SleepFor(pass_);
    if (pass.context.later != nullptr) {
      pass.context.later->Add([pass = pass_] {
        absl::SleepFor(pass);
        return absl::OkStatus();
      });
    }
    return absl::OkStatus();
  }

 private:
  const absl::Duration pass_;
};

// Seconds of the slowest stage, a run each.
std::vector<double> Seconds(const PipelineShape& shape, int64_t rounds, absl::Duration forward,
                            int repetitions) {
  std::vector<double> seconds(static_cast<size_t>(repetitions));
  const auto run = [&](std::unique_ptr<Communicator> world) -> absl::Status {
    Communicator& ranks = *world;
    MOE_ASSIGN_OR_RETURN(const auto session,
                         Session::Create({.mesh = {.pipeline = shape.stages}}, std::move(world)));
    MOE_ASSIGN_OR_RETURN(const auto runner, PipelineRunner::Create(shape, session->context()));
    std::vector<Sleeper> parts(static_cast<size_t>(shape.chunks), Sleeper(forward / shape.chunks));
    PipelineModel<float> model = {.hidden_size = 1};
    for (Sleeper& part : parts) model.chunks.push_back(&part);
    testing::StageLoop loop;
    testing::StageRounds of_stage = {session->context(), rounds};
    for (double& each : seconds) {
      MOE_RETURN_IF_ERROR(ranks.Barrier());
      const absl::Time begin = absl::Now();
      MOE_RETURN_IF_ERROR(runner->Run(model, loop, of_stage));
      MOE_RETURN_IF_ERROR(ranks.Barrier());
      if (ranks.rank() == 0) each = absl::ToDoubleSeconds(absl::Now() - begin);
    }
    return absl::OkStatus();
  };
  auto worlds = MakeLocalWorld({.ranks = shape.stages});
  std::vector<std::thread> threads;
  for (auto& world : worlds) {
    threads.emplace_back([&run, &world] {
      const absl::Status status = run(std::move(world));
      if (!status.ok()) std::fprintf(stderr, "pipeline_bench: %s\n", status.ToString().c_str());
    });
  }
  for (std::thread& thread : threads) thread.join();
  std::sort(seconds.begin(), seconds.end());
  return seconds;
}

void Print(const PipelineShape& shape, int64_t rounds, absl::Duration forward, int repetitions) {
  const double busy = 3 * static_cast<double>(rounds) * absl::ToDoubleSeconds(forward);
  const double share = shape.schedule == ScheduleKind::kZeroBubbleH1 ? 1.0 / 3 : 1.0 / shape.chunks;
  const double idle = (shape.stages - 1) * share / static_cast<double>(rounds);
  const std::vector<double> seconds = Seconds(shape, rounds, forward, repetitions);
  const auto over = [&](double each) {
    return 100 * (each / busy - 1);
  };
  std::printf("| %s | %d | %d | %lld | %.1f %% | %.1f %% | %.1f to %.1f %% |\n",
              NameOf(shape.schedule, kScheduleWords), shape.stages, shape.chunks,
              static_cast<long long>(rounds), 100 * idle, over(seconds[seconds.size() / 2]),
              over(seconds.front()), over(seconds.back()));
}

}  // namespace
}  // namespace moe

int main(int argc, char** argv) {
  const double milliseconds = argc > 1 ? std::atof(argv[1]) : 4;
  const int repetitions = argc > 2 ? std::atoi(argv[2]) : 5;
  if (milliseconds <= 0 || repetitions < 1) {
    std::fprintf(stderr, "usage: pipeline_bench [MILLISECONDS] [REPETITIONS], both above 0\n");
    return 2;
  }
  std::printf("| schedule | stages | chunks | rounds | idle, formula | median | spread |\n");
  std::printf("|---|---|---|---|---|---|---|\n");
  const absl::Duration forward = absl::Milliseconds(milliseconds);
  for (const int stages : {2, 4}) {
    for (const moe::PipelineShape& shape :
         {moe::PipelineShape{moe::ScheduleKind::kGPipe, stages},
          moe::PipelineShape{moe::ScheduleKind::k1F1B, stages},
          moe::PipelineShape{moe::ScheduleKind::kInterleaved, stages, 2},
          moe::PipelineShape{moe::ScheduleKind::kZeroBubbleH1, stages}}) {
      moe::Print(shape, 2 * stages, forward, repetitions);
    }
  }
  return 0;
}
