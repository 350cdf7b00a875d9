// A communicator that hands every call to another one: what communicators with a twist start from.
#ifndef MOE_TESTS_COMM_FORWARDING_COMMUNICATOR_H_
#define MOE_TESTS_COMM_FORWARDING_COMMUNICATOR_H_

#include <memory>
#include <numeric>
#include <optional>
#include <utility>

#include <absl/types/span.h>

#include "comm/communicator.h"
#include "kernels/base/status_macros.h"

namespace moe::testing {

// Without peer memory. Reductions: of f32, f64, i32 and i64.
class ForwardingCommunicator : public Communicator {
 public:
  explicit ForwardingCommunicator(std::unique_ptr<Communicator> inner) : inner_(std::move(inner)) {}

  int rank() const override { return inner_->rank(); }
  int size() const override { return inner_->size(); }
  absl::string_view backend() const override { return inner_->backend(); }
  absl::Duration timeout() const override { return inner_->timeout(); }
  std::optional<Device> device() const override { return inner_->device(); }
  bool moves(DeviceKind kind) const override { return inner_->moves(kind); }
  absl::Status Barrier() override {
    MOE_RETURN_IF_ERROR(BeforeMeeting());
    return inner_->Barrier();
  }
  void Abort(absl::Status reason) override { inner_->Abort(std::move(reason)); }
  absl::StatusOr<std::unique_ptr<Communicator>> Split(int color, int key) override {
    MOE_RETURN_IF_ERROR(BeforeMeeting());
    MOE_ASSIGN_OR_RETURN(auto part, inner_->Split(color, key));
    if (part == nullptr) return part;
    return Wrap(std::move(part));
  }

 protected:
  // The twist. Before a collective in `stream`, of which this rank sends `bytes` to others.
  virtual absl::Status Before(int64_t bytes, Stream& stream) = 0;
  // Before a call that blocks the host.
  virtual absl::Status BeforeMeeting() { return absl::OkStatus(); }
  virtual std::unique_ptr<Communicator> Wrap(std::unique_ptr<Communicator> part) = 0;

  absl::Status DoAllReduce(void* inout, int64_t count, DType type, ReduceOp op,
                           Stream& stream) override {
    MOE_RETURN_IF_ERROR(Prepare(2 * count * SizeOf(type) * (size() - 1) / size(), stream));
    const auto reduce = [&](auto* data) {
      return inner_->AllReduce(absl::MakeSpan(data, static_cast<size_t>(count)), op, stream);
    };
    switch (type) {
      case DType::kFloat32:
        return reduce(static_cast<float*>(inout));
      case DType::kFloat64:
        return reduce(static_cast<double*>(inout));
      case DType::kInt32:
        return reduce(static_cast<int32_t*>(inout));
      case DType::kInt64:
        return reduce(static_cast<int64_t*>(inout));
      default:
        return absl::UnimplementedError("ForwardingCommunicator: AllReduce of this type");
    }
  }
  absl::Status DoReduceScatter(const void*, void*, int64_t, DType, ReduceOp, Stream&) override {
    return absl::UnimplementedError("ForwardingCommunicator: ReduceScatter");
  }
  absl::Status DoAllGather(const void* send, void* recv, int64_t send_bytes,
                           Stream& stream) override {
    MOE_RETURN_IF_ERROR(Prepare(send_bytes * (size() - 1), stream));
    return inner_->AllGather<uint8_t>(Bytes(send, send_bytes),
                                      MutableBytes(recv, send_bytes * size()), stream);
  }
  absl::Status DoAllToAllV(const void* send, absl::Span<const int64_t> send_bytes, void* recv,
                           absl::Span<const int64_t> recv_bytes, Stream& stream) override {
    const auto total = [](absl::Span<const int64_t> counts) {
      return std::accumulate(counts.begin(), counts.end(), int64_t{0});
    };
    const int64_t sent = total(send_bytes);
    MOE_RETURN_IF_ERROR(Prepare(sent - send_bytes[rank()], stream));
    return inner_->AllToAllV<uint8_t>(Bytes(send, sent), send_bytes,
                                      MutableBytes(recv, total(recv_bytes)), recv_bytes, stream);
  }
  absl::Status DoBroadcast(void* inout, int64_t bytes, int root, Stream& stream) override {
    MOE_RETURN_IF_ERROR(Prepare(bytes, stream));
    return inner_->Broadcast<uint8_t>(MutableBytes(inout, bytes), root, stream);
  }
  absl::Status DoSendRecv(SendRecvOps ops, Stream& stream) override {
    int64_t sent = 0;
    for (const SendRecvOp& op : ops) sent += op.send != nullptr ? op.bytes : 0;
    MOE_RETURN_IF_ERROR(Prepare(sent, stream));
    return inner_->SendRecv(ops, stream);
  }
  absl::Status DoFence(Stream& stream) override {
    MOE_RETURN_IF_ERROR(Prepare(0, stream));
    return inner_->Fence(stream);
  }

 private:
  absl::Status Prepare(int64_t bytes, Stream& stream) {
    inner_->SetPhase(phase());
    return Before(bytes, stream);
  }
  static absl::Span<const uint8_t> Bytes(const void* data, int64_t bytes) {
    return {static_cast<const uint8_t*>(data), static_cast<size_t>(bytes)};
  }
  static absl::Span<uint8_t> MutableBytes(void* data, int64_t bytes) {
    return {static_cast<uint8_t*>(data), static_cast<size_t>(bytes)};
  }

  const std::unique_ptr<Communicator> inner_;
};

}  // namespace moe::testing

#endif  // MOE_TESTS_COMM_FORWARDING_COMMUNICATOR_H_
