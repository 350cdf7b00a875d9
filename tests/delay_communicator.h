// A communicator whose transfers take a known time: for tests that show overlap.
#ifndef MOE_TESTS_DELAY_COMMUNICATOR_H_
#define MOE_TESTS_DELAY_COMMUNICATOR_H_

#include <functional>
#include <memory>
#include <thread>
#include <utility>
#include <vector>

#include <absl/time/clock.h>
#include <absl/time/time.h>

#include "comm/communicator.h"
#include "kernels/base/status_macros.h"

namespace moe::testing {

// Forwards to `inner`; before each transfer the stream sleeps delay(bytes this rank sends). The
// thread sleeps, so a transfer costs time but no processor.
class DelayCommunicator final : public Communicator {
 public:
  using Delay = std::function<absl::Duration(int64_t bytes)>;

  DelayCommunicator(std::unique_ptr<Communicator> inner, Delay delay)
      : inner_(std::move(inner)), delay_(std::move(delay)) {}

  int rank() const override { return inner_->rank(); }
  int size() const override { return inner_->size(); }
  absl::string_view backend() const override { return inner_->backend(); }
  absl::Duration timeout() const override { return inner_->timeout(); }
  absl::Status Barrier() override { return inner_->Barrier(); }
  void Abort(absl::Status reason) override { inner_->Abort(std::move(reason)); }
  absl::StatusOr<std::unique_ptr<Communicator>> Split(int color, int key) override {
    MOE_ASSIGN_OR_RETURN(auto part, inner_->Split(color, key));
    if (part == nullptr) return part;
    return std::make_unique<DelayCommunicator>(std::move(part), delay_);
  }

 protected:
  absl::Status DoAllReduce(void* inout, int64_t count, DType type, ReduceOp op,
                           Stream& stream) override {
    MOE_RETURN_IF_ERROR(Sleep(2 * count * SizeOf(type) * (size() - 1) / size(), stream));
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
        return absl::UnimplementedError("DelayCommunicator: AllReduce of this type");
    }
  }
  absl::Status DoReduceScatter(const void*, void*, int64_t, DType, ReduceOp, Stream&) override {
    return absl::UnimplementedError("DelayCommunicator: ReduceScatter");
  }
  absl::Status DoAllGather(const void* send, void* recv, int64_t send_bytes,
                           Stream& stream) override {
    MOE_RETURN_IF_ERROR(Sleep(send_bytes * (size() - 1), stream));
    return inner_->AllGather<uint8_t>(Bytes(send, send_bytes),
                                      MutableBytes(recv, send_bytes * size()), stream);
  }
  absl::Status DoAllToAllV(const void* send, absl::Span<const int64_t> send_bytes, void* recv,
                           absl::Span<const int64_t> recv_bytes, Stream& stream) override {
    const auto total = [](absl::Span<const int64_t> counts) {
      int64_t sum = 0;
      for (const int64_t c : counts) sum += c;
      return sum;
    };
    const int64_t sent = total(send_bytes);
    MOE_RETURN_IF_ERROR(Sleep(sent - send_bytes[rank()], stream));
    return inner_->AllToAllV<uint8_t>(Bytes(send, sent), send_bytes,
                                      MutableBytes(recv, total(recv_bytes)), recv_bytes, stream);
  }
  absl::Status DoBroadcast(void* inout, int64_t bytes, int root, Stream& stream) override {
    MOE_RETURN_IF_ERROR(Sleep(bytes, stream));
    return inner_->Broadcast<uint8_t>(MutableBytes(inout, bytes), root, stream);
  }
  absl::Status DoSendRecv(std::vector<SendRecvOp> ops, Stream& stream) override {
    int64_t sent = 0;
    for (const SendRecvOp& op : ops) sent += op.send != nullptr ? op.bytes : 0;
    MOE_RETURN_IF_ERROR(Sleep(sent, stream));
    return inner_->SendRecv(ops, stream);
  }
  absl::Status DoFence(Stream& stream) override { return inner_->Fence(stream); }

 private:
  static absl::Span<const uint8_t> Bytes(const void* data, int64_t bytes) {
    return {static_cast<const uint8_t*>(data), static_cast<size_t>(bytes)};
  }
  static absl::Span<uint8_t> MutableBytes(void* data, int64_t bytes) {
    return {static_cast<uint8_t*>(data), static_cast<size_t>(bytes)};
  }
  absl::Status Sleep(int64_t bytes, Stream& stream) {
    return stream.Enqueue([time = delay_(bytes)] {
      absl::SleepFor(time);
      return absl::OkStatus();
    });
  }

  const std::unique_ptr<Communicator> inner_;
  const Delay delay_;
};

}  // namespace moe::testing

#endif  // MOE_TESTS_DELAY_COMMUNICATOR_H_
