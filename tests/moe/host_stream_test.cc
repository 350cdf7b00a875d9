// A layer in a program that has CUDA streams, memory and NCCL communicators of its own: steps that
// run in its stream, on rows that it allocated, over ranks that met by its own means.
#include <cstring>
#include <functional>
#include <memory>
#include <utility>
#include <vector>

#include <gtest/gtest.h>

#include "comm/local/local_world.h"
#include "tests/comm/nccl_ranks.h"
#include "tests/moe/layer_harness.h"

namespace moe {
namespace {

using testing::kHidden;
using testing::kTokens;
using Floats = std::vector<float>;

constexpr int64_t kBytes = kTokens * kHidden * static_cast<int64_t>(sizeof(float));

// What the program owns on one device.
struct Program {
  explicit Program(int device) {
    EXPECT_EQ(cudaSetDevice(device), cudaSuccess);
    EXPECT_EQ(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), cudaSuccess);
    for (float** const rows : {&x, &y, &dx}) {
      EXPECT_EQ(cudaMalloc(reinterpret_cast<void**>(rows), kBytes), cudaSuccess);
    }
  }
  ~Program() {
    for (float* const rows : {x, y, dx}) EXPECT_EQ(cudaFree(rows), cudaSuccess);
    EXPECT_EQ(cudaStreamDestroy(stream), cudaSuccess);
  }
  void Copy(const void* from, void* to, size_t bytes = kBytes) const {
    EXPECT_EQ(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, stream), cudaSuccess);
  }

  cudaStream_t stream = nullptr;
  float *x = nullptr, *y = nullptr, *dx = nullptr;
};

// Two steps, each of one round of every rank. y and dx of both, then the weights. In the program's
// stream nothing waits between its copies and the layer's work; dy is y.
absl::StatusOr<Floats> Train(std::unique_ptr<Communicator> world, const Program& program,
                             bool in_its_stream) {
  const int rank = world->rank(), ranks = world->size();
  MOE_ASSIGN_OR_RETURN(
      const auto trainer,
      Trainer::Create({.session = {.device = DeviceKind::kCuda,
                                   .cuda_stream = in_its_stream ? program.stream : nullptr,
                                   .mesh = {.expert = ranks}}},
                      std::move(world)));
  MOE_ASSIGN_OR_RETURN(auto* const layer,
                       trainer->AddMoeLayer<float>("mlp.", testing::LayerConfig()));
  const auto wait = [&]() -> absl::Status {
    if (in_its_stream) return absl::OkStatus();
    EXPECT_EQ(cudaStreamSynchronize(program.stream), cudaSuccess);
    return trainer->context().compute->Synchronize();
  };
  const auto rows = [](float* data) {
    return MatrixView<float>(data, kTokens, kHidden);
  };
  constexpr size_t kElements = kTokens * kHidden;
  const Floats in = testing::RowValues(2 * kTokens, rank);
  Floats out(4 * kElements);
  for (size_t step = 0; step < 2; ++step) {
    MOE_ASSIGN_OR_RETURN(const Round round, trainer->BeginRound());
    program.Copy(in.data() + step * kElements, program.x);
    MOE_RETURN_IF_ERROR(wait());
    MOE_RETURN_IF_ERROR(layer->Forward(round, rows(program.x), rows(program.y)));
    MOE_RETURN_IF_ERROR(wait());
    program.Copy(program.y, out.data() + 2 * step * kElements);
    MOE_RETURN_IF_ERROR(layer->Backward(round, rows(program.y), rows(program.dx)));
    MOE_RETURN_IF_ERROR(wait());
    program.Copy(program.dx, out.data() + (2 * step + 1) * kElements);
    MOE_RETURN_IF_ERROR(trainer->Step({.learning_rate = 0.01}).status());
  }
  EXPECT_EQ(cudaStreamSynchronize(program.stream), cudaSuccess);
  for (const auto& p : trainer->parameters().parameters()) {
    MOE_ASSIGN_OR_RETURN(const Floats values, p->ReadMaster(StreamOf(*p, trainer->context())));
    out.insert(out.end(), values.begin(), values.end());
  }
  return out;
}

TEST(HostStreamTest, WorkInTheProgramsStreamHasTheBitsOfTheSessionsOwn) {
  const Program program(0);
  const auto train = [&](bool in_its_stream) {
    return Train(std::move(MakeLocalWorld({}).front()), program, in_its_stream).value();
  };
  const Floats expected = train(false);
  for (uint32_t seed = 1; seed <= 5; ++seed) {
    cusim::SeedStreams(seed);
    EXPECT_EQ(train(true), expected) << seed;
  }
}

TEST(HostStreamTest, ASessionIsOnTheDeviceOfTheStreamWhichTheCpuRefuses) {
  const Program program(1);
  const auto session = [&](DeviceKind device) {
    return Session::Create({.device = device, .cuda_stream = program.stream},
                           std::move(MakeLocalWorld({}).front()));
  };
  const auto cuda = session(DeviceKind::kCuda).value();
  EXPECT_EQ(cuda->context().compute->device().index, 1);
  EXPECT_EQ(session(DeviceKind::kCpu).status().code(), absl::StatusCode::kInvalidArgument);
}

// The program's own communicator: what any rank of it does with NCCL before there is a world.
class ProgramsNccl {
 public:
  ProgramsNccl(const ncclUniqueId& id, int rank, int size) {
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    config.blocking = 0;
    Wait(ncclCommInitRankConfig(&comm_, size, id, rank, &config));
  }
  ~ProgramsNccl() {
    Wait(ncclCommFinalize(comm_));
    EXPECT_EQ(ncclCommDestroy(comm_), ncclSuccess);
  }
  // Rank 0's id, by way of the device.
  NcclId Share(NcclId id, const Program& program) {
    program.Copy(id.data(), program.x, sizeof(id));
    Wait(ncclBroadcast(program.x, program.x, sizeof(id), ncclChar, 0, comm_, program.stream));
    program.Copy(program.x, id.data(), sizeof(id));
    EXPECT_EQ(cudaStreamSynchronize(program.stream), cudaSuccess);
    return id;
  }

 private:
  void Wait(ncclResult_t result) {
    while (result == ncclInProgress) (void)ncclCommGetAsyncError(comm_, &result);
    EXPECT_EQ(result, ncclSuccess);
  }
  ncclComm_t comm_ = nullptr;
};

// `join(rank, size, program)`: the world's id.
std::vector<Floats> TrainOverNccl(const std::function<NcclId(int, int, const Program&)>& join) {
  constexpr int kRanks = 2;
  std::vector<Floats> results(kRanks);
  std::vector<std::thread> threads;
  for (int r = 0; r < kRanks; ++r) {
    threads.emplace_back([&, r] {
      const Program program(r);
      auto world = MakeNcclCommunicator(
                       {.id = join(r, kRanks, program), .rank = r, .size = kRanks, .device = r})
                       .value();
      results[r] = Train(std::move(world), program, true).value();
    });
  }
  for (std::thread& thread : threads) thread.join();
  return results;
}

TEST(HostStreamTest, AWorldComesOfTheProgramsNcclIdOrOfItsCommunicator) {
  ncclUniqueId made;
  ASSERT_EQ(ncclGetUniqueId(&made), ncclSuccess);
  const std::vector<Floats> by_id = TrainOverNccl([&](int, int, const Program&) {
    NcclId id;
    std::memcpy(id.data(), &made, sizeof(made));
    return id;
  });
  ASSERT_EQ(ncclGetUniqueId(&made), ncclSuccess);
  const std::vector<Floats> by_communicator =
      TrainOverNccl([&](int rank, int size, const Program& program) {
        return ProgramsNccl(made, rank, size)
            .Share(rank == 0 ? MakeNcclId().value() : NcclId(), program);
      });
  EXPECT_FALSE(by_id[0].empty());
  EXPECT_EQ(by_communicator, by_id);
}

}  // namespace
}  // namespace moe
