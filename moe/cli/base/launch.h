// Ranks of a run, from flags and launch environment together; launchers of processes; the cores
// that ranks are bound to.
#ifndef MOE_MOE_CLI_BASE_LAUNCH_H_
#define MOE_MOE_CLI_BASE_LAUNCH_H_

#include <cstdint>
#include <string>

#include <absl/status/status.h>
#include <absl/status/statusor.h>
#include <absl/strings/string_view.h>
#include <absl/types/span.h>

#include "comm/bootstrap.h"
#include "comm/communicator.h"
#include "comm/create.h"
#include "comm/world_plan.h"
#include "kernels/base/stream.h"
#include "moe/cli/base/settings.h"

namespace moe::cli {

// Ranks, cores and backend of a run.
struct World {
  int ranks = 1;
  int local_ranks = 1;  // on this machine
  int cores = 1;        // cores on this machine, shared by its ranks
  // Cores that this process may use: fewer if its launcher has bound it.
  int own_cores = 1;
  Backend backend = Backend::kLocal;
};

struct Launch {
  WorldPlan plan;
  World world;
  Device device;       // what every rank computes on
  std::string secret;  // MOE_NCCL_SECRET, for ranks that meet over TCP
  int rank() const { return plan.rank(); }
};

// Threads of --threads; auto: the cores of this machine divided by its ranks, at most those that
// this process may use.
int ThreadsOf(const Settings& settings, const World& world);

// Launch of this process, from `environment` ("NAME=value"). As DetectLaunch, with messages for
// users, which name --backend local: it reads no launch variables.
absl::StatusOr<LaunchInfo> LaunchOf(absl::Span<const std::string> environment);

// Whether a command has a CUDA path.
enum class ComputesOn : uint8_t { kCpu, kAnyDevice };

// Device of --device. kUnimplemented as for PlanLaunch.
absl::StatusOr<Device> DeviceOf(const Settings& settings,
                                ComputesOn computes_on = ComputesOn::kAnyDevice);

// Plan from --ranks, --backend, --device and `environment` ("NAME=value"). Starts nothing.
//   kInvalidArgument (exit 2): contradictions, by name
//   kUnimplemented (exit 10): a backend or device that this build, this machine or the command does
//     not have, with the remedy
absl::StatusOr<Launch> PlanLaunch(const Settings& settings,
                                  absl::Span<const std::string> environment,
                                  ComputesOn computes_on = ComputesOn::kCpu);

// kInvalidArgument: the backend does not have the algorithm that --all-reduce names.
absl::Status CheckAllReduce(const Settings& settings, Backend backend);

// kInvalidArgument: --dispatch hierarchical on a GPU, where it would run staged.
absl::Status CheckTwoHops(const Settings& settings, Device device);

// kInvalidArgument: --ranks differs from the number that the launcher started, which MPI alone may
// know.
absl::Status CheckWorldSize(const Launch& launch, const Communicator& world);

// Command that starts such a launch, before the program's name: "", "mpirun -n 4 ", with Open MPI
// on fewer cores "mpirun -n 4 --oversubscribe ", "torchrun --no-python --nproc-per-node 4 ".
std::string LauncherText(const Launch& launch);

// For commands that compute on every rank. kInvalidArgument: more ranks on this machine than it has
// GPUs, without --share-device.
absl::Status CheckDevices(const Launch& launch, const Settings& settings);

// Programs in PATH, above all the launcher of the MPI that this build is linked with.

// The value of a variable in `environment` ("NAME=value"); "" if it is not there.
std::string VariableOf(absl::Span<const std::string> environment, absl::string_view name);

// The file that `name` starts: itself if it has a '/', else the first in the folders of `path`, as
// execvp looks. "" if there is none.
std::string FindProgram(const std::string& name, absl::string_view path);

// Where several MPIs are installed, `mpirun` may belong to another one, under which every process
// is a world of its own. So the first found of mpirun.<linked MPI> (Debian's names), mpirun,
// mpiexec; "" if there is none.
std::string FindMpiLauncher(absl::string_view path);

// Binds this thread, and those it starts, to `threads` of the CPUs that the process may use, from
// the (rank * threads)-th on, round robin. On a busy machine the scheduler may put two ranks on one
// core while another idles, which measures the scheduler. kInternal if the system refuses.
absl::Status PinToCores(int rank, int threads);

// PinToCores for a rank of `launch`: processes by their rank on this machine, threads by `world`'s.
absl::Status PinRank(const Launch& launch, const Communicator& world, int threads);

}  // namespace moe::cli

#endif  // MOE_MOE_CLI_BASE_LAUNCH_H_
