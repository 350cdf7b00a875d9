// What a step launches on a simulated GPU does not grow with the number of parameters.
#include <vector>

#include <absl/strings/str_cat.h>
#include <gtest/gtest.h>

#include "moe/train/trainer.h"
#include "tests/comm/local_ranks.h"
#include "tests/cusim/cusim.h"

namespace moe {
namespace {

struct Case {
  Numerics numerics = Numerics::kLayoutInvariant;
  ZeroStage zero = ZeroStage::kNone;
  int ranks = 1;
};

struct Outcome {
  int64_t launches = 0;  // by all ranks, in Trainer::Step after Reduce
  double norm = 0;
  std::vector<std::vector<std::byte>> weights;  // those of rank 0, as layers read them
};

// The second step of a slab of `experts` matrices, each with a vector beside it.
template <typename T>
Outcome StepOf(const Case& c, DeviceKind kind, int experts) {
  Outcome outcome;
  testing::RunLocalRanks(c.ranks, [&](std::unique_ptr<Communicator> world) -> absl::Status {
    const int rank = world->rank();
    MOE_ASSIGN_OR_RETURN(const auto trainer,
                         Trainer::Create({.session = {.device = kind, .numerics = c.numerics},
                                          .dtype = DTypeOf<T>::value,
                                          .micro_batches = c.ranks,
                                          .zero = c.zero},
                                         std::move(world)));
    const Context& context = trainer->context();
    ParameterStore& store = trainer->parameters();
    std::vector<ParameterSpec> specs;
    for (int e = 0; e < experts; ++e) {
      specs.push_back({.name = absl::StrCat("expert", e), .rows = 9, .cols = 33});
      MOE_RETURN_IF_ERROR(
          store.Add({.name = absl::StrCat("norm", e), .cols = 7, .weight_decay = false}).status());
    }
    MOE_RETURN_IF_ERROR(store.AddSlab(specs).status());
    for (int step = 0; step < 2; ++step) {
      MOE_ASSIGN_OR_RETURN(const Round round, trainer->BeginRound());
      for (const auto& p : store.parameters()) {
        std::vector<float> partial(static_cast<size_t>(p->size()));
        for (size_t i = 0; i < partial.size(); ++i) {
          partial[i] = 1e-3f * static_cast<float>(i % 17 + p->index() + 5 * rank + step);
        }
        MOE_ASSIGN_OR_RETURN(const GradAccumulator sum, p->OpenGradient());
        MOE_RETURN_IF_ERROR(sum.Add(
            [&](absl::Span<float> out, Write) {
              return context.compute->Upload(partial.data(), out.data(),
                                             static_cast<int64_t>(out.size() * sizeof(float)));
            },
            *context.workspace, *context.compute));
        MOE_RETURN_IF_ERROR(trainer->MarkReady(round, *p));
      }
      MOE_RETURN_IF_ERROR(trainer->Reduce());
      MOE_RETURN_IF_ERROR(context.mesh->world().Barrier());
      const int64_t before = cusim::Launches();
      MOE_RETURN_IF_ERROR(context.mesh->world().Barrier());
      MOE_ASSIGN_OR_RETURN(const GradientNorm norm, trainer->Step({.learning_rate = 0.1}));
      MOE_RETURN_IF_ERROR(context.mesh->world().Barrier());
      if (rank != 0) continue;
      outcome.launches = cusim::Launches() - before;
      outcome.norm = norm.value;
    }
    for (size_t i = 0; rank == 0 && i < store.parameters().size(); ++i) {
      const Parameter& p = *store.parameters()[i];
      auto& values = outcome.weights.emplace_back(static_cast<size_t>(p.size()) * sizeof(T));
      MOE_RETURN_IF_ERROR(
          context.compute->CopyBytes(p.view<T>().data(), values.data(), std::ssize(values)));
      MOE_RETURN_IF_ERROR(context.compute->Synchronize());
    }
    return absl::OkStatus();
  });
  return outcome;
}

template <typename T>
void ExpectLaunches(const Case& c, int64_t launches) {
  SCOPED_TRACE(absl::StrCat(NameOf(DTypeOf<T>::value), " zero ", static_cast<int>(c.zero)));
  for (const int experts : {4, 40}) {
    const Outcome cuda = StepOf<T>(c, DeviceKind::kCuda, experts);
    EXPECT_EQ(cuda.launches, launches) << experts << " experts";
    const Outcome cpu = StepOf<T>(c, DeviceKind::kCpu, experts);
    EXPECT_EQ(cuda.norm, cpu.norm);
    EXPECT_EQ(cuda.weights, cpu.weights);
  }
}

// Launches of squares, AdamW and, with a 16-bit type, roundings; with ZeRO also of gathered
// vectors.
TEST(StepLaunchesTest, AreAsManyForAnyNumberOfParametersAndHaveTheBitsOfTheCpu) {
  ExpectLaunches<float>({}, 2);
  ExpectLaunches<BFloat16>({}, 3);
  ExpectLaunches<Float16>({.numerics = Numerics::kFast}, 3);
  constexpr int kRanks = 2;
  for (const ZeroStage zero : {ZeroStage::kOptimizer, ZeroStage::kGradients}) {
    ExpectLaunches<BFloat16>({.zero = zero, .ranks = kRanks}, kRanks * 4);
  }
}

}  // namespace
}  // namespace moe
