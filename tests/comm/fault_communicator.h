// A communicator that flips a bit of one result: for tests that must notice.
#ifndef MOE_TESTS_COMM_FAULT_COMMUNICATOR_H_
#define MOE_TESTS_COMM_FAULT_COMMUNICATOR_H_

#include <memory>
#include <numeric>
#include <utility>

#include "comm/communicator.h"
#include "kernels/base/status_macros.h"

namespace moe::testing {

// Forwards to `inner`. Once armed, what `victim` receives of every collective of that kind has the
// lowest bit of its first byte flipped. Reductions: of floats alone.
class FaultCommunicator final : public Communicator {
 public:
  enum class Kind : uint8_t { kNone, kAllReduce, kReduceScatter, kAllGather, kAllToAllV };

  FaultCommunicator(Communicator& inner, int victim) : inner_(inner), victim_(victim) {}
  void Arm(Kind kind) { armed_ = kind; }

  int rank() const override { return inner_.rank(); }
  int size() const override { return inner_.size(); }
  absl::string_view backend() const override { return inner_.backend(); }
  absl::Duration timeout() const override { return inner_.timeout(); }
  absl::Status Barrier() override { return inner_.Barrier(); }
  bool has_peer_memory(DeviceKind kind) const override { return inner_.has_peer_memory(kind); }
  void Abort(absl::Status reason) override { inner_.Abort(std::move(reason)); }
  absl::StatusOr<std::unique_ptr<Communicator>> Split(int color, int key) override {
    return inner_.Split(color, key);
  }

 protected:
  absl::Status DoAllReduce(void* inout, int64_t count, DType type, ReduceOp op,
                           Stream& stream) override {
    const auto n = static_cast<size_t>(count);
    if (type == DType::kInt64) {
      return inner_.AllReduce<int64_t>({static_cast<int64_t*>(inout), n}, op, stream);
    }
    MOE_CHECK(type == DType::kFloat32);
    MOE_RETURN_IF_ERROR(inner_.AllReduce<float>({static_cast<float*>(inout), n}, op, stream));
    return Flip(Kind::kAllReduce, inout, count, stream);
  }
  absl::Status DoReduceScatter(const void* send, void* recv, int64_t recv_count, DType type,
                               ReduceOp op, Stream& stream) override {
    MOE_CHECK(type == DType::kFloat32);
    const auto n = static_cast<size_t>(recv_count);
    MOE_RETURN_IF_ERROR(inner_.ReduceScatter<float>(
        {static_cast<const float*>(send), n * static_cast<size_t>(size())},
        {static_cast<float*>(recv), n}, op, stream));
    return Flip(Kind::kReduceScatter, recv, recv_count, stream);
  }
  absl::Status DoAllGather(const void* send, void* recv, int64_t send_bytes,
                           Stream& stream) override {
    const auto n = static_cast<size_t>(send_bytes);
    MOE_RETURN_IF_ERROR(inner_.AllGather<uint8_t>(
        {static_cast<const uint8_t*>(send), n},
        {static_cast<uint8_t*>(recv), n * static_cast<size_t>(size())}, stream));
    return Flip(Kind::kAllGather, recv, send_bytes, stream);
  }
  absl::Status DoAllToAllV(const void* send, absl::Span<const int64_t> send_bytes, void* recv,
                           absl::Span<const int64_t> recv_bytes, Stream& stream) override {
    const auto total = [](absl::Span<const int64_t> counts) {
      return static_cast<size_t>(std::accumulate(counts.begin(), counts.end(), int64_t{0}));
    };
    const size_t received = total(recv_bytes);
    MOE_RETURN_IF_ERROR(inner_.AllToAllV<uint8_t>(
        {static_cast<const uint8_t*>(send), total(send_bytes)}, send_bytes,
        {static_cast<uint8_t*>(recv), received}, recv_bytes, stream));
    return Flip(Kind::kAllToAllV, recv, static_cast<int64_t>(received), stream);
  }
  absl::Status DoBroadcast(void*, int64_t, int, Stream&) override {
    return absl::UnimplementedError("FaultCommunicator: Broadcast");
  }
  absl::Status DoSendRecv(SendRecvOps ops, Stream& stream) override {
    return inner_.SendRecv(ops, stream);
  }
  absl::Status DoFence(Stream& stream) override { return inner_.Fence(stream); }

 private:
  absl::Status Flip(Kind kind, void* recv, int64_t length, Stream& stream) {
    if (kind != armed_ || rank() != victim_ || length == 0) return absl::OkStatus();
    return stream.Enqueue([recv] {
      *static_cast<uint8_t*>(recv) ^= 1;
      return absl::OkStatus();
    });
  }

  Communicator& inner_;
  const int victim_;
  Kind armed_ = Kind::kNone;
};

}  // namespace moe::testing

#endif  // MOE_TESTS_COMM_FAULT_COMMUNICATOR_H_
