// The pipe through which a launcher reads what this process prints.
#ifndef MOE_COMM_LAUNCHER_PIPE_H_
#define MOE_COMM_LAUNCHER_PIPE_H_

#include <absl/time/time.h>

namespace moe {

// Waits until the reader of the pipe behind `fd` has taken all that was written, `longest` at most;
// whether it has. True at once for a file or a terminal. A launcher that ends a job closes its
// pipes: what it has not read by then (Hydra: about one report in a hundred) nobody sees.
bool AwaitReader(int fd, absl::Duration longest);

}  // namespace moe

#endif  // MOE_COMM_LAUNCHER_PIPE_H_
