// Rows of padding in micro-batches that tensor-parallel ranks divide.
#include <cstdint>
#include <functional>
#include <limits>
#include <mutex>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "kernels/base/status_macros.h"
#include "moe/recompute/recompute.h"
#include "moe/run/deferred_gradients.h"
#include "moe/state/boxes.h"
#include "moe/tensor/own_rows.h"
#include "tests/moe/layer_harness.h"
#include "tests/moe/status_is.h"
#include "tests/sanitizers.h"

namespace moe {
namespace {

using testing::DeviceRows;
using testing::kHidden;
using testing::LayerDevice;
using testing::Layout;
using testing::StatusIs;
using testing::Tensors;

constexpr int64_t kPaddedRows = 13;     // of a micro-batch, in two sequences
constexpr int64_t kSecondSequence = 6;  // where the second begins

// The layer alone, made again for its backward, and with weight gradients that wait (zb-h1).
enum class PaddedWay : uint8_t { kPlain, kRecomputed, kLater };

// A micro-batch in which no rank has tokens alone and one of four has none; one without padding;
// one of padding alone.
std::vector<uint8_t> MaskOf(int64_t micro_batch) {
  switch (micro_batch) {
    case 0:
      return {0, 1, 0, 0, 0, 1, 1, 1, 1, 1, 0, 1, 0};
    case 1:
      return std::vector<uint8_t>(kPaddedRows, 0);
    default:
      return std::vector<uint8_t>(kPaddedRows, 1);
  }
}

// Its rows, NaN where they are padding.
std::vector<float> PaddedRows(int64_t micro_batch, int64_t seed) {
  std::vector<float> rows = testing::RowValues(kPaddedRows, 7 * micro_batch + seed);
  const std::vector<uint8_t> mask = MaskOf(micro_batch);
  for (size_t i = 0; i < rows.size(); ++i) {
    if (mask[i / kHidden] != 0) rows[i] = std::numeric_limits<float>::quiet_NaN();
  }
  return rows;
}

MoeLayerConfig SharedConfig() {
  return {.router = {.num_experts = 6, .top_k = 2, .hidden_size = kHidden},
          .ffn_hidden_size = 40,
          .shared_expert_ffn_hidden_size = 128,
          .gated_shared_expert = true};
}

struct PaddedCase {
  MoeLayerConfig layer = SharedConfig();
  PaddedWay way = PaddedWay::kPlain;
};

// One step of `work` in `layout`: y and dx of all rows, losses, and gradients as whole tensors.
class PaddedStep {
 public:
  PaddedStep(const PaddedCase& work, const Layout& layout) : work_(work) {
    TrainerOptions options = {.micro_batches = 3};
    options.session.tensor_leaves = 8;
    testing::RunTrainers(layout, options, [&](Trainer& trainer) { return Run(trainer); });
  }
  const Tensors& results() const { return results_; }

 private:
  absl::Status Run(Trainer& trainer) {
    MOE_ASSIGN_OR_RETURN(auto* const layer, trainer.AddMoeLayer<float>("mlp.", work_.layer));
    MOE_RETURN_IF_ERROR(trainer.BeginStep());
    for (int64_t r = 0; r < trainer.rounds(); ++r) {
      MOE_ASSIGN_OR_RETURN(const Round round, trainer.BeginRound());
      MOE_RETURN_IF_ERROR(RunRound(trainer, *layer, round));
    }
    std::vector<int64_t> counts(static_cast<size_t>(layer->count_size()));
    MOE_RETURN_IF_ERROR(layer->TakeCounts(absl::MakeSpan(counts)));
    AddCounts(counts);
    MOE_RETURN_IF_ERROR(trainer.Reduce());
    for (const auto& p : trainer.parameters().parameters()) {
      if (!p->spec().trainable) continue;
      MOE_ASSIGN_OR_RETURN(const auto gradient,
                           testing::GradientOf(*p, trainer.reducer(), trainer.context()));
      for (const BoxInMemory& held : BoxesOf(*p)) PutBox(held, gradient);
    }
    return trainer.EndStep();
  }

  absl::Status RunRound(Trainer& trainer, TrainedLayer<float>& layer, const Round& round) {
    const Context& context = trainer.context();
    const int64_t micro_batch = round.empty() ? -1 : round.micro_batch();
    const int64_t all = round.empty() ? 0 : kPaddedRows;
    const std::vector<int64_t> sequences =
        round.empty() ? std::vector<int64_t>{0}
                      : std::vector<int64_t>{0, kSecondSequence, kPaddedRows};
    const std::vector<uint8_t> mask = round.empty() ? std::vector<uint8_t>() : MaskOf(micro_batch);
    const OwnRows own = OwnRowsOf(context, all);
    const auto rows_of = [&](int64_t seed) {
      std::vector<float> rows;
      if (!round.empty()) rows = PaddedRows(micro_batch, seed);
      return std::vector<float>(rows.begin() + own.begin() * kHidden,
                                rows.begin() + own.end() * kHidden);
    };
    std::vector<DeviceRows> rows;
    for (int i = 0; i < 4; ++i) {
      MOE_ASSIGN_OR_RETURN(rows.emplace_back(), DeviceRows::Create(own.count(), context));
    }
    auto &x = rows[0], &y = rows[1], &dy = rows[2], &dx = rows[3];
    MOE_RETURN_IF_ERROR(x.Write(rows_of(1), context));
    MOE_RETURN_IF_ERROR(dy.Write(rows_of(2), context));
    const Batch batch = {.sequence_offsets = sequences, .padding_mask = mask};
    if (work_.way == PaddedWay::kPlain) {
      MOE_RETURN_IF_ERROR(layer.Forward(round, x.view(), y.view(), batch));
      MOE_RETURN_IF_ERROR(layer.stats().Wait());
      if (!round.empty()) {
        Put("loss", micro_batch, {static_cast<float>(layer.stats().loss())});
      }
      MOE_RETURN_IF_ERROR(layer.Backward(round, dy.view(), dx.view()));
    } else {
      MOE_RETURN_IF_ERROR(OtherWay(trainer, layer, round, batch, {&x, &y, &dy, &dx}));
    }
    MOE_RETURN_IF_ERROR(context.compute->Synchronize());
    std::vector<float> on_host(static_cast<size_t>(own.count() * kHidden));
    MOE_RETURN_IF_ERROR(y.Read(on_host, context));
    Put("y", micro_batch * kPaddedRows * kHidden + own.begin() * kHidden, on_host);
    MOE_RETURN_IF_ERROR(dx.Read(on_host, context));
    Put("dx", micro_batch * kPaddedRows * kHidden + own.begin() * kHidden, on_host);
    return absl::OkStatus();
  }

  struct Io {
    DeviceRows *x, *y, *dy, *dx;
  };
  absl::Status OtherWay(Trainer& trainer, TrainedLayer<float>& layer, const Round& round,
                        const Batch& batch, const Io& io) {
    const Pass pass = trainer.PassOf(round, batch);
    const auto none = [](Parameter&) {
      return absl::OkStatus();
    };
    Recomputed<float> again(layer.layer());
    const bool later = work_.way == PaddedWay::kLater;
    Module<float>& module = later ? static_cast<Module<float>&>(layer.layer()) : again;
    MOE_RETURN_IF_ERROR(module.Forward(pass, io.x->view(), io.y->view()));
    DeferredGradients waiting;
    Context context = pass.context;
    if (later) {
      waiting.Begin(pass.context, *pass.stash);
      context.later = &waiting;
    }
    const Pass backward = {.context = context,
                           .batch = pass.batch,
                           .stash = pass.stash,
                           .site = pass.site,
                           .weights = pass.weights,
                           .d_loss = pass.d_loss};
    MOE_RETURN_IF_ERROR(module.Backward(backward, io.dy->view(), io.dx->view(), none));
    MOE_RETURN_IF_ERROR(waiting.Run());
    for (Parameter* const p : layer.parameters()) {
      if (p->spec().trainable) MOE_RETURN_IF_ERROR(trainer.MarkReady(round, *p));
    }
    return absl::OkStatus();
  }

  void Put(const std::string& name, int64_t first, const std::vector<float>& values) {
    const std::lock_guard<std::mutex> lock(mu_);
    for (size_t i = 0; i < values.size(); ++i)
      PutOne(name, first + static_cast<int64_t>(i), values[i]);
  }
  void PutBox(const BoxInMemory& held, const std::vector<float>& memory) {
    const std::lock_guard<std::mutex> lock(mu_);
    const TensorBox& box = held.box;
    for (int64_t i = 0; i < box.size(); ++i) {
      const int64_t row = box.row_begin + i / box.cols(), col = box.col_begin + i % box.cols();
      PutOne(held.tensor->name, row * held.tensor->cols + col,
             memory[static_cast<size_t>(held.first + i)]);
    }
  }
  // The slots of all ranks, each counted once.
  void AddCounts(const std::vector<int64_t>& counts) {
    const std::lock_guard<std::mutex> lock(mu_);
    std::vector<float>& sum = results_["counts"];
    sum.resize(counts.size());
    for (size_t e = 0; e < counts.size(); ++e) sum[e] += static_cast<float>(counts[e]);
  }
  // Ranks that have an element agree about it.
  void PutOne(const std::string& name, int64_t at, float value) {
    std::vector<float>& values = results_[name];
    constexpr float kNone = std::numeric_limits<float>::infinity();
    if (std::ssize(values) <= at) values.resize(static_cast<size_t>(at) + 1, kNone);
    float& here = values[static_cast<size_t>(at)];
    if (here != kNone) testing::ExpectSameBits(name + " of two ranks", {&value, 1}, {&here, 1});
    here = value;
  }

  const PaddedCase work_;
  std::mutex mu_;
  Tensors results_;
};

// Routers that decide about a micro-batch, a sequence or a token, by capacity, noise or experts at
// home; each in one of the ways.
std::vector<PaddedCase> PaddedCases() {
  const auto with = [](PaddedWay way, const std::function<void(MoeLayerConfig&)>& change) {
    PaddedCase work = {.way = way};
    change(work.layer);
    return work;
  };
  return {with(PaddedWay::kPlain,
               [](MoeLayerConfig& layer) {
                 layer.router.gate = "switch";
                 layer.router.top_k = 1;
                 layer.router.input_jitter = 0.2f;
                 layer.router.capacity_factor = 0.75;
                 layer.router.aux_loss_coeff = 0.02f;
                 layer.router.z_loss_coeff = 0.003f;
               }),
          with(PaddedWay::kPlain,
               [](MoeLayerConfig& layer) {
                 layer.router.gate = "gpt-oss";
                 layer.router.num_zero_experts = 2;
                 layer.router.load_balancing = LoadBalancing::kSeqAuxLoss;
                 layer.router.aux_loss_coeff = 0.02f;
               }),
          with(PaddedWay::kRecomputed,
               [](MoeLayerConfig& layer) {
                 layer.router.gate = "expert-choice";
                 layer.router.token_group.tokens = TokenGroup::kSequence;
               }),
          with(PaddedWay::kLater, [](MoeLayerConfig& layer) {
            layer.router.gate = "llama4";
            layer.router.top_k = 1;
            layer.gated_shared_expert = false;
          })};
}

std::vector<Layout> PaddedLayouts() {
  const Layout two = {.ranks = 4, .expert_parallel = 2, .tensor = 2};
  const Layout experts = {.ranks = 4, .expert_parallel = 2, .tensor = 2, .expert_tensor = 2};
  const Layout three = {.ranks = 3, .expert_parallel = 3, .tensor = 3};
  if (testing::kSanitized || LayerDevice() == DeviceKind::kCuda) return {two, three};
  return {two, experts, three, {.ranks = 4, .expert_parallel = 4, .tensor = 4}};
}

// Nothing else has rows of padding on ranks that share a micro-batch: TP 1, 2, 3 and 4, with ETP,
// and ranks all of whose rows are padding. About 0.5 s.
TEST(TensorPaddingTest, RowsOfPaddingHaveTheBitsOfOneRank) {
  for (const PaddedCase& work : PaddedCases()) {
    const PaddedStep one(work, {});
    for (const Layout& layout : PaddedLayouts()) {
      SCOPED_TRACE(::testing::Message() << work.layer.router.gate << ", TP " << layout.tensor
                                        << ", ETP " << layout.expert_tensor);
      const PaddedStep step(work, layout);
      testing::ExpectSameBits(step.results(), one.results());
    }
  }
}

TEST(TensorPaddingTest, AMaskThatIsNotOfAllRowsIsRefused) {
  const Layout layout = {.ranks = 2, .expert_parallel = 2, .tensor = 2};
  TrainerOptions options = {.micro_batches = 1};
  options.session.tensor_leaves = 8;
  testing::RunTrainers(layout, options, [&](Trainer& trainer) -> absl::Status {
    MOE_ASSIGN_OR_RETURN(auto* const layer, trainer.AddMoeLayer<float>("mlp.", SharedConfig()));
    const Context& context = trainer.context();
    const OwnRows own = OwnRowsOf(context, kPaddedRows);
    MOE_ASSIGN_OR_RETURN(DeviceRows x, DeviceRows::Create(own.count(), context));
    MOE_ASSIGN_OR_RETURN(DeviceRows y, DeviceRows::Create(own.count(), context));
    MOE_RETURN_IF_ERROR(trainer.BeginEvaluation(1));
    MOE_ASSIGN_OR_RETURN(const Round round, trainer.BeginRound());
    const std::vector<int64_t> all = {0, kPaddedRows};
    const std::vector<uint8_t> mask(static_cast<size_t>(own.count()), 1);
    EXPECT_THAT(
        layer->Forward(round, x.view(), y.view(), {.sequence_offsets = all, .padding_mask = mask}),
        StatusIs(absl::StatusCode::kInvalidArgument,
                 "expected [13], as rows of the batch, those of all tensor-parallel ranks"));
    EXPECT_THAT(layer->ForwardRows(x.view().data(), own.count(), mask.data(), y.view().data()),
                StatusIs(absl::StatusCode::kUnimplemented,
                         "rows without a batch on 2 tensor-parallel ranks"));
    EXPECT_THAT(layer->ForwardInGraph({.x = x.view().data(),
                                       .rows = own.count(),
                                       .cols = kHidden,
                                       .y = y.view().data(),
                                       .padding_mask = mask.data()}),
                StatusIs(absl::StatusCode::kUnimplemented,
                         "rows without a batch on 2 tensor-parallel ranks"));
    return trainer.EndStep();
  });
}

}  // namespace
}  // namespace moe
