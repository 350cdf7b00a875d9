// How a backend runs one test body on R ranks. Each backend's test binary links its own CommEnv.
#ifndef MOE_TESTS_COMM_COMM_ENV_H_
#define MOE_TESTS_COMM_COMM_ENV_H_

#include <memory>

#include <absl/functional/function_ref.h>
#include <absl/time/time.h>

#include "comm/communicator.h"
#include "kernels/base/stream.h"

namespace moe::testing {

enum class EnvStream : uint8_t { kInline, kQueue };

class CommEnv {
 public:
  virtual ~CommEnv() = default;
  virtual const char* name() const = 0;
  virtual int max_ranks() const = 0;
  // Whether a rank that fails or aborts wakes its peers at once. Else they time out.
  virtual bool wakes_peers() const = 0;
  // Whether a receiver learns that a message of SendRecv has another size than it expects. NCCL
  // promises nothing; its fake here waits for ever.
  virtual bool compares_sizes() const { return true; }
  // Whether a wait that progresses starts its deadline again. NCCL does not say how far it is.
  virtual bool sees_progress() const { return true; }
  // Runs body(world, stream) once per rank: threads for "local", this process for "mpi", where
  // ranks past `ranks` sit out. Returns when all ranks are done.
  virtual void Run(int ranks, absl::Duration timeout, EnvStream stream,
                   absl::FunctionRef<void(Communicator&, Stream&)> body) = 0;
};

CommEnv& Env();  // defined by tests/comm_env_{local,mpi,nccl}.cc

inline std::unique_ptr<Stream> MakeEnvStream(EnvStream kind) {
  return kind == EnvStream::kInline ? MakeInlineStream() : MakeStream({}).value();
}

}  // namespace moe::testing

#endif  // MOE_TESTS_COMM_COMM_ENV_H_
