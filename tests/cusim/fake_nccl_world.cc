#include "tests/cusim/fake_nccl_world.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "kernels/base/dtype.h"
#include "tests/cusim/fake_memory.h"

namespace cusim {
namespace {

constexpr unsigned char kNotReceived = 0xff;

bool IsClear(const char* data, size_t bytes) {
  return bytes == 0 || (static_cast<unsigned char>(data[0]) == kNotReceived &&
                        std::memcmp(data, data + 1, bytes - 1) == 0);
}

bool Overlap(const char* a, size_t n, const char* b, size_t m) {
  return n > 0 && m > 0 && a < b + m && b < a + n;
}

void CheckBuffer(const NcclCallRecord& call, const void* data, size_t bytes) {
  if (bytes == 0) return;
  if (DeviceOfMemory(data) != call.comm->device) {
    NcclMisuse(call.name(), "buffers must be memory of the communicator's device");
  }
  CheckDeviceRange(call.name(), data, bytes);
}

// Between its begin and this moment only the kernel may access its buffers.
void CheckUnchanged(const NcclCallRecord& call) {
  CheckBuffer(call, call.send, call.send_bytes);
  CheckBuffer(call, call.recv, call.recv_bytes);
  if (call.send_bytes > 0 && std::memcmp(call.send, call.sent.data(), call.send_bytes) != 0) {
    NcclMisuse(call.name(),
               "the send buffer was changed while the kernel used it: an event is missing");
  }
  if (call.clears && !IsClear(call.recv, call.recv_bytes)) {
    NcclMisuse(call.name(),
               "the receive buffer was written while the kernel used it: an event is missing");
  }
}

template <typename T, typename Sum>
void ReduceInto(const std::vector<const char*>& in, char* out, size_t n, ncclRedOp_t op,
                size_t first) {
  for (size_t i = 0; i < n; ++i) {
    // A ring begins at another rank for every range; here, at a rank other than 0.
    const auto value = [&](size_t r) {
      T stored;
      std::memcpy(&stored, in[(first + r) % in.size()] + i * sizeof(T), sizeof(T));
      return static_cast<Sum>(stored);
    };
    Sum sum = value(0);
    for (size_t r = 1; r < in.size(); ++r) {
      sum = op == ncclMax ? std::max(sum, value(r)) : static_cast<Sum>(sum + value(r));
      sum = static_cast<Sum>(static_cast<T>(sum));  // rounded on every rank
    }
    const T stored = static_cast<T>(sum);
    std::memcpy(out + i * sizeof(T), &stored, sizeof(T));
  }
}

void Reduce(const std::vector<const char*>& in, char* out, size_t n, ncclDataType_t type,
            ncclRedOp_t op) {
  const size_t first = 1 % in.size();
  switch (type) {
    case ncclFloat32:
      return ReduceInto<float, float>(in, out, n, op, first);
    case ncclFloat64:
      return ReduceInto<double, double>(in, out, n, op, first);
    case ncclBfloat16:
      return ReduceInto<moe::BFloat16, float>(in, out, n, op, first);
    case ncclInt32:  // sums wrap around; the maximum is of signed values
      return op == ncclMax ? ReduceInto<int32_t, int32_t>(in, out, n, op, first)
                           : ReduceInto<uint32_t, uint32_t>(in, out, n, op, first);
    case ncclInt64:
      return op == ncclMax ? ReduceInto<int64_t, int64_t>(in, out, n, op, first)
                           : ReduceInto<uint64_t, uint64_t>(in, out, n, op, first);
    default:
      NcclMisuse("reduction", "the fake reduces f32, f64, bf16, i32 and i64");
  }
}

}  // namespace

NcclGlobals& NcclGlobals::Get() {
  static NcclGlobals* const globals = new NcclGlobals;
  return *globals;
}

void NcclMisuse(const char* function, const std::string& rule) {
  std::fprintf(stderr, "cusim: misuse of NCCL: %s: %s\n", function, rule.c_str());
  std::abort();
}

size_t NcclSizeOf(ncclDataType_t type) {
  switch (type) {
    case ncclInt8:
    case ncclUint8:
      return 1;
    case ncclFloat16:
    case ncclBfloat16:
      return 2;
    case ncclInt32:
    case ncclUint32:
    case ncclFloat32:
      return 4;
    case ncclInt64:
    case ncclUint64:
    case ncclFloat64:
      return 8;
    default:
      NcclMisuse("ncclDataType_t", "a type that the fake does not know");
  }
}

const char* NcclCallRecord::name() const {
  constexpr const char* kNames[] = {"ncclAllReduce", "ncclReduce",    "ncclReduceScatter",
                                    "ncclAllGather", "ncclBroadcast", "ncclSend",
                                    "ncclRecv",      "ncclCommSplit"};
  return kNames[static_cast<size_t>(kind)];
}

std::string NcclCallRecord::Text() const {
  return std::string(name()) + " of " + std::to_string(count) + " elements of type " +
         std::to_string(type) + ", operation " + std::to_string(op) + ", root " +
         std::to_string(peer);
}

bool NcclCallRecord::Matches(const NcclCallRecord& other) const {
  return kind == other.kind && count == other.count && type == other.type && op == other.op &&
         peer == other.peer;
}

bool NcclWorld::complete() const {
  return std::none_of(ranks.begin(), ranks.end(), [](const ncclComm* c) { return c == nullptr; });
}

void NcclWorld::Begin(const NcclCallPointer& call) {
  if (call->IsTransfer()) {
    const bool is_send = call->kind == NcclCallRecord::Kind::kSend;
    const int own = call->comm->rank;
    const auto way = is_send ? std::make_pair(own, call->peer) : std::make_pair(call->peer, own);
    (is_send ? sends : receives)[way].push_back(call);
    return MoveTransfers(way);
  }
  std::vector<NcclCallPointer>& calls = begun[call->sequence];
  calls.resize(static_cast<size_t>(size));
  calls[static_cast<size_t>(call->comm->rank)] = call;
  MoveCollective(call->sequence);
}

void NcclWorld::MoveTransfers(std::pair<int, int> way) {
  auto& from = sends[way];
  auto& to = receives[way];
  while (!from.empty() && !to.empty()) {
    NcclCallRecord& send = *from.front();
    NcclCallRecord& recv = *to.front();
    if (send.comm->gone() || recv.comm->gone()) return;
    if (send.send_bytes != recv.recv_bytes) {
      if (NcclGlobals::Get().faults.mismatch_hangs) return;
      NcclMisuse("ncclRecv",
                 "sender and receiver must give the same count: rank " + std::to_string(way.first) +
                     " sends " + std::to_string(send.send_bytes) + " bytes, rank " +
                     std::to_string(way.second) + " expects " + std::to_string(recv.recv_bytes));
    }
    CheckUnchanged(send);
    CheckUnchanged(recv);
    std::memcpy(recv.recv, send.send, send.send_bytes);
    send.done = recv.done = true;
    from.pop_front();
    to.pop_front();
  }
}

void NcclWorld::MoveCollective(int64_t sequence) {
  const std::vector<NcclCallPointer>& calls = begun[sequence];
  std::vector<const char*> in;
  for (const NcclCallPointer& call : calls) {
    if (call == nullptr || call->comm->gone() || !call->Matches(*calls[0])) return;
    in.push_back(call->send);
  }
  for (const NcclCallPointer& call : calls) CheckUnchanged(*call);
  // All results are computed before any is written: some are in place.
  std::vector<std::string> results;
  for (const NcclCallPointer& call : calls) {
    std::string result(call->recv_bytes, '\0');
    const auto rank = static_cast<size_t>(call->comm->rank);
    switch (call->kind) {
      case NcclCallRecord::Kind::kAllReduce:
        Reduce(in, result.data(), call->count, call->type, call->op);
        break;
      case NcclCallRecord::Kind::kReduce:
        if (call->comm->rank == call->peer) {
          Reduce(in, result.data(), call->count, call->type, call->op);
        }
        break;
      case NcclCallRecord::Kind::kReduceScatter: {
        std::vector<const char*> parts = in;
        for (const char*& part : parts) part += rank * call->recv_bytes;
        Reduce(parts, result.data(), call->count, call->type, call->op);
        break;
      }
      case NcclCallRecord::Kind::kAllGather:
        for (size_t r = 0; r < in.size(); ++r) {
          std::memcpy(result.data() + r * call->send_bytes, in[r], call->send_bytes);
        }
        break;
      default:
        std::memcpy(result.data(), in[static_cast<size_t>(call->peer)], call->recv_bytes);
    }
    results.push_back(std::move(result));
  }
  for (size_t r = 0; r < calls.size(); ++r) {
    std::memcpy(calls[r]->recv, results[r].data(), results[r].size());
    calls[r]->done = true;
  }
  begun.erase(sequence);
}

NcclKernel::NcclKernel(ncclComm* comm, std::vector<NcclCallPointer> calls)
    : comm_(comm), calls_(std::move(calls)) {}

void NcclKernel::EnterStream() {
  number_ = comm_->kernels_made++;
}

GridBlocks NcclKernel::blocks() const {
  return {.needs = kNcclBlock, .waiting = comm_->kernel_blocks};
}

bool NcclKernel::Ready() {
  const std::lock_guard<std::mutex> lock(NcclGlobals::Get().mu);
  if (comm_->gone()) return true;
  if (comm_->dead) return false;
  if (!begun_) return comm_->kernels_ended == number_;
  return std::all_of(calls_.begin(), calls_.end(), [](const auto& call) { return call->done; });
}

// Called when Ready.
bool NcclKernel::Step() {
  const std::lock_guard<std::mutex> lock(NcclGlobals::Get().mu);
  if (!comm_->gone() && !begun_) {
    Begin();
    return false;
  }
  ++comm_->kernels_ended;
  return true;
}

void NcclKernel::Begin() {
  begun_ = true;
  for (const NcclCallPointer& call : calls_) {
    CheckBuffer(*call, call->send, call->send_bytes);
    CheckBuffer(*call, call->recv, call->recv_bytes);
    call->clears = call->recv_bytes > 0 &&
                   !Overlap(call->send, call->send_bytes, call->recv, call->recv_bytes);
    if (call->clears) std::memset(call->recv, kNotReceived, call->recv_bytes);
  }
  NcclFaults& faults = NcclGlobals::Get().faults;
  size_t moving = calls_.size();
  if (faults.dies_in_group == comm_->root_rank && calls_.size() > 1) {
    faults.dies_in_group = -1;
    comm_->dead = true;
    moving /= 2;
  }
  for (size_t i = 0; i < moving; ++i) {
    if (calls_[i]->send_bytes > 0) calls_[i]->sent.assign(calls_[i]->send, calls_[i]->send_bytes);
    comm_->world->Begin(calls_[i]);
  }
}

}  // namespace cusim
