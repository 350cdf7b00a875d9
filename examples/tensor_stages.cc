// A dense model of the program's own: two pipeline stages of two tensor-parallel ranks each, whose
// y = x + W2 relu(W1 x) learns to be 0.
//
//   tensor_stages              four ranks, which are threads
//   mpirun -n 8 tensor_stages  each two ranks for the same part have half of the micro-batches
#include <cmath>
#include <cstdio>
#include <tuple>
#include <vector>

#include <absl/strings/str_cat.h>
#include <moe/moe.h>

using moe::AllRows, moe::MatrixView, moe::Pass, moe::TensorAxis;
constexpr int64_t kTokens = 64, kHidden = 32, kWidth = 128;  // of a micro-batch, a token, a stage

// Ranks of a stage divide the rows of x and y, and the columns of relu(W1 x).
struct Stage final : moe::Module<float> {
  bool first = false;
  std::vector<moe::Linear<float>> w;  // W1, W2
  std::vector<moe::Parameter*> all;
  using Saved = std::tuple<MatrixView<const float>, MatrixView<float>, MatrixView<float>>;
  moe::PerStash<Saved> saved;  // x, relu(W1 x), y of a forward until its backward
  double loss = 0;             // sum of this rank's y^2 in this step

  absl::Span<moe::Parameter* const> parameters() const override { return all; }

  absl::Status Forward(const Pass& pass, MatrixView<const float> x, MatrixView<float> y) override {
    const moe::Context& on = pass.context;
    const moe::WorkspaceScope scope(*on.workspace);
    const moe::OwnRows own = OwnRowsOf(on, RowsOf(pass.batch));
    MOE_ASSIGN_OR_RETURN(const auto made, pass.kept().Matrix<float>(own.count(), kHidden));
    (first ? x = made : y = made);  // the first stage makes its tokens, the last keeps its outputs
    const int64_t begin = (pass.batch.first_global_token + own.begin()) * kHidden;
    for (int64_t i = 0; first && i < own.count() * kHidden; ++i) {
      made.data()[i] = std::sin(float((begin + i) % 1009 * (begin + i)));
    }
    MOE_ASSIGN_OR_RETURN(const auto rows, AllRows<float>(on, own, x, pass.site));
    MOE_ASSIGN_OR_RETURN(const auto a, pass.kept().Matrix<float>(own.all(), w[0].out_features()));
    saved.Begin(pass.stash) = {x, a, y};
    MOE_RETURN_IF_ERROR(w[0].Forward<float>(on, {.site = pass.site}, rows, a));
    for (int64_t i = 0; i < a.rows() * a.cols(); ++i) a.data()[i] = std::fmax(a.data()[i], 0.0f);
    MOE_RETURN_IF_ERROR(w[1].Forward<float>(on, {.site = pass.site}, a, y));
    return moe::AddRows<float>(x, y, y, *on.compute);
  }

  absl::Status Backward(const Pass& pass, MatrixView<const float> dy, MatrixView<float> dx,
                        moe::GradientReady ready) override {
    const moe::Context& on = pass.context;
    const moe::WorkspaceScope scope(*on.workspace);
    const moe::OwnRows own = OwnRowsOf(on, RowsOf(pass.batch));
    const auto [x, a, y] = *saved.Find(pass.stash);
    if (!first) dy = y;
    for (int64_t i = 0; !first && i < own.count() * kHidden; ++i) loss += y.data()[i] * y.data()[i];
    MOE_ASSIGN_OR_RETURN(const auto d_rows, AllRows<float>(on, own, dy, pass.site));
    MOE_ASSIGN_OR_RETURN(const auto rows, AllRows<float>(on, own, x, pass.site));
    MOE_ASSIGN_OR_RETURN(const auto d_a, on.workspace->Matrix<float>(a.rows(), a.cols()));
    MOE_RETURN_IF_ERROR(w[1].InputGradient(on, {.site = pass.site}, d_rows, d_a));
    MOE_RETURN_IF_ERROR(w[1].WeightGradient(on, {}, d_rows, a, ready));
    for (int64_t i = 0; i < a.rows() * a.cols(); ++i) d_a.data()[i] *= a.data()[i] > 0;
    MOE_RETURN_IF_ERROR(w[0].InputGradient(on, {.site = pass.site}, d_a, dx));
    MOE_RETURN_IF_ERROR(w[0].WeightGradient(on, {}, d_a, rows, ready));
    return moe::AddRows<float>(dy, dx, dx, *on.compute);
  }
};

struct Loop final : moe::RoundHost {
  const int64_t none[2] = {0, 0}, whole[2] = {0, kTokens};
  int64_t RowsOf(const moe::Round& round) const override { return round.empty() ? 0 : kTokens; }
  absl::Status BeginRound(const moe::Round& round, int, Pass& pass) override {
    pass.batch.micro_batch_offsets = round.empty() ? none : whole;
    pass.batch.first_global_token = round.micro_batch() * kTokens;
    return absl::OkStatus();
  }
};

absl::Status Train(std::unique_ptr<moe::Communicator> world) {
  const bool speaks = world->rank() == world->size() - 1;
  const moe::TrainerOptions options = {
      .session = {.mesh = {.tensor = 2, .pipeline = 2, .expert = 2}, .tensor_leaves = 2},
      .micro_batches = 8};
  MOE_ASSIGN_OR_RETURN(const auto trainer, moe::Trainer::Create(options, std::move(world)));
  Stage stage;
  stage.first = trainer->context().mesh->index(moe::MeshGroup::kPipeline) == 0;
  for (const TensorAxis cut : {TensorAxis::kRows, TensorAxis::kColumns}) {
    const bool up = cut == TensorAxis::kRows;
    const moe::ParameterSpec whole = {.name = absl::StrCat(stage.first ? "0.w" : "1.w", up ? 1 : 2),
                                      .rows = up ? kWidth : kHidden,
                                      .cols = up ? kHidden : kWidth};
    MOE_ASSIGN_OR_RETURN(
        auto linear, moe::Linear<float>::Create(
                         {.weights = {CutAlong(cut, whole)}, .share = ShareOf(trainer->context())},
                         trainer->parameters()));
    stage.all.push_back(linear.weights()[0]);
    stage.w.push_back(std::move(linear));
  }
  Loop loop;
  for (int step = 1; step <= 200; ++step) {
    stage.loss = 0;
    MOE_RETURN_IF_ERROR(trainer->RunRounds<float>({{&stage}, kHidden}, loop));
    MOE_RETURN_IF_ERROR(trainer->Step({.learning_rate = 0.003}).status());
    if (speaks && step % 50 == 0) std::printf("step %3d  loss %.4f\n", step, stage.loss);
  }
  return absl::OkStatus();
}

int main() {
  return moe::Main(Train);
}
