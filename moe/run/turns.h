// Two passes of a rank at a time: each computes while what the other exchanges is on its way.
#ifndef MOE_MOE_RUN_TURNS_H_
#define MOE_MOE_RUN_TURNS_H_

#include <condition_variable>
#include <memory>
#include <mutex>

#include <absl/functional/function_ref.h>
#include <absl/status/status.h>
#include <absl/status/statusor.h>

#include "kernels/base/status_macros.h"
#include "kernels/base/stream.h"
#include "moe/run/context.h"

namespace moe {

// Runs two bodies in turns, on a thread each, never both at once: what they share needs no locks.
// Whose turn it is follows from their calls alone, never from time, so that ranks whose bodies are
// alike enqueue what they exchange in one order.
class Turns {
 public:
  static absl::StatusOr<std::unique_ptr<Turns>> Create();

  // Runs `first` on this thread and `second` on the other one; `first` begins. Returns when both
  // have ended, with the error of the one that failed first: `failed` is told of it before the
  // other one goes on.
  absl::Status Run(absl::FunctionRef<absl::Status()> first,
                   absl::FunctionRef<absl::Status()> second,
                   absl::FunctionRef<void(const absl::Status&)> failed);
  // Called by the body whose turn it is: the other one runs until it calls this, too, or ends. No
  // effect once the other has ended, and outside of Run. Costs two hand-offs between threads.
  void Yield();

 private:
  void Start(bool runs);
  void Await(int body);
  void End(int body);

  std::mutex mu_;
  std::condition_variable changed_;
  int turn_ = 0;                    // guarded by mu_
  bool ended_[2] = {true, true};    // guarded by mu_
  std::unique_ptr<Stream> second_;  // the other thread
};

// Makes the compute stream wait for `exchanged`, an event of context.exchange. Another pass, if one
// takes turns with this one, has its turn meanwhile.
inline absl::Status WaitForExchange(const Context& context, const Event& exchanged) {
  if (context.turns != nullptr) context.turns->Yield();
  return context.compute->WaitFor(exchanged);
}

// The same for all that is in context.exchange before the turn of another pass.
inline absl::Status JoinExchange(const Context& context) {
  if (context.exchange == context.compute) return absl::OkStatus();
  MOE_ASSIGN_OR_RETURN(const Event exchanged, context.exchange->Record());
  return WaitForExchange(context, exchanged);
}

}  // namespace moe

#endif  // MOE_MOE_RUN_TURNS_H_
