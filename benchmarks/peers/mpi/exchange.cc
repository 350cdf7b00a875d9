// MPI's own all-to-all and all-reduce, timed like ours by `moe bench`: a peer of
// benchmarks/exchange_table.py.
//
//   mpirun -n R exchange OPERATION CALLS BYTES...     alltoall (MPI_Alltoallv) or allreduce (f32)
//
// One JSON object a size: op, ranks, size_bytes, time_us_p50 (median over calls of the slowest
// rank's time), nwrong. Exit code 1 when a result is wrong.
#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include <mpi.h>

namespace {

struct World {
  int rank = 0, ranks = 0;
};

// Small integers: their float32 sums are exact in every order.
float Term(int rank, int64_t i) {
  return static_cast<float>((7 * rank + i) % 61);
}

class Exchange {
 public:
  Exchange(const World& world, std::string op, int64_t bytes)
      : world_(world),
        op_(std::move(op)),
        block_(bytes / static_cast<int64_t>(sizeof(float)) / world.ranks),
        send_(static_cast<size_t>(block_ * world.ranks)),
        recv_(send_.size()),
        want_(send_.size()),
        counts_(static_cast<size_t>(world.ranks), static_cast<int>(block_)),
        offsets_(counts_.size()) {
    for (int r = 0; r < world.ranks; ++r) offsets_[r] = static_cast<int>(r * block_);
    for (size_t i = 0; i < send_.size(); ++i) {
      const auto index = static_cast<int64_t>(i);
      send_[i] = Term(world.rank, index);
      if (op_ == "alltoall") {
        want_[i] = Term(static_cast<int>(index / block_), world.rank * block_ + index % block_);
        continue;
      }
      for (int r = 0; r < world.ranks; ++r) want_[i] += Term(r, index);
    }
  }

  double CallUs() {
    Prepare();
    MPI_Barrier(MPI_COMM_WORLD);
    const double enter = MPI_Wtime();
    if (op_ == "alltoall") {
      MPI_Alltoallv(send_.data(), counts_.data(), offsets_.data(), MPI_FLOAT, recv_.data(),
                    counts_.data(), offsets_.data(), MPI_FLOAT, MPI_COMM_WORLD);
    } else {
      MPI_Allreduce(MPI_IN_PLACE, recv_.data(), static_cast<int>(recv_.size()), MPI_FLOAT, MPI_SUM,
                    MPI_COMM_WORLD);
    }
    return (MPI_Wtime() - enter) * 1e6;
  }
  int64_t CountWrong() const {
    int64_t wrong = 0;
    for (size_t i = 0; i < recv_.size(); ++i) wrong += recv_[i] != want_[i];
    return wrong;
  }
  int64_t bytes() const { return static_cast<int64_t>(send_.size() * sizeof(float)); }

 private:
  // The state in which `moe bench` leaves buffers: wrong everywhere, written by their own rank.
  void Prepare() {
    if (op_ == "allreduce") {
      std::memcpy(recv_.data(), send_.data(), send_.size() * sizeof(float));
    } else {
      std::memset(recv_.data(), 0xa5, recv_.size() * sizeof(float));
    }
  }

  const World world_;
  const std::string op_;
  const int64_t block_;  // elements
  std::vector<float> send_, recv_, want_;
  std::vector<int> counts_, offsets_;
};

double Median(std::vector<double> x) {
  std::sort(x.begin(), x.end());
  return (x[(x.size() - 1) / 2] + x[x.size() / 2]) / 2;
}

// Number of elements that were wrong on any rank.
int64_t Measure(const World& world, const std::string& op, int calls, int64_t bytes) {
  Exchange exchange(world, op, bytes);
  for (int i = 0; i < 5; ++i) exchange.CallUs();
  std::vector<double> mine(static_cast<size_t>(calls));
  int64_t wrong = 0;
  for (double& us : mine) {
    us = exchange.CallUs();
    wrong += exchange.CountWrong();
  }
  std::vector<double> slowest(mine.size());
  int64_t all_wrong = 0;
  MPI_Allreduce(mine.data(), slowest.data(), calls, MPI_DOUBLE, MPI_MAX, MPI_COMM_WORLD);
  MPI_Allreduce(&wrong, &all_wrong, 1, MPI_INT64_T, MPI_SUM, MPI_COMM_WORLD);
  if (world.rank == 0) {
    std::printf(
        "{\"op\":\"%s\",\"ranks\":%d,\"size_bytes\":%lld,\"time_us_p50\":%.3f,\"nwrong\":%lld}\n",
        op.c_str(), world.ranks, static_cast<long long>(exchange.bytes()), Median(slowest),
        static_cast<long long>(all_wrong));
    std::fflush(stdout);
  }
  return all_wrong;
}

}  // namespace

int main(int argc, char** argv) {
  const std::string op = argc > 1 ? argv[1] : "";
  const int calls = argc > 2 ? std::atoi(argv[2]) : 0;
  if ((op != "alltoall" && op != "allreduce") || calls < 1) {
    std::fprintf(stderr, "usage: exchange alltoall|allreduce CALLS BYTES...\n");
    return 2;
  }
  MPI_Init(&argc, &argv);
  World world;
  MPI_Comm_rank(MPI_COMM_WORLD, &world.rank);
  MPI_Comm_size(MPI_COMM_WORLD, &world.ranks);
  int64_t wrong = 0;
  for (int i = 3; i < argc; ++i) wrong += Measure(world, op, calls, std::atoll(argv[i]));
  MPI_Finalize();
  return wrong > 0 ? 1 : 0;
}
