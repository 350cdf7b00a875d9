#include "moe/cli/launch/engine.h"

#include <csignal>
#include <numeric>

#include <absl/status/status.h>
#include <absl/strings/str_cat.h>
#include <absl/strings/str_join.h>

namespace moe::launch {
namespace {

// "node1:8,node2:8".
std::string HostList(const Job& job) {
  return absl::StrJoin(job.hosts, ",", [](std::string* out, const Host& host) {
    absl::StrAppend(out, host.name, ":", host.slots);
  });
}

std::string RankCount(const Job& job) {
  const int64_t ranks =
      std::accumulate(job.hosts.begin(), job.hosts.end(), int64_t{0},
                      [](int64_t sum, const Host& host) { return sum + host.slots; });
  return absl::StrCat(job.hosts.empty() ? job.ranks_per_node : ranks);
}

using Words = std::vector<std::string>;

// A host that is listed takes as many ranks as it has slots, also if it has fewer cores.
Words Mpirun(const Job& job) {
  const std::string hosts =
      job.hosts.empty() ? absl::StrCat("localhost:", job.ranks_per_node) : HostList(job);
  Words words = {"--host", hosts, "-n", RankCount(job), "--bind-to", "none"};
  if (!job.remote_shell.empty()) {
    words.insert(words.end(), {"--mca", "plm_rsh_agent", job.remote_shell});
  }
  for (const std::string& name : job.variables) words.insert(words.end(), {"-x", name});
  return words;
}

Words Hydra(const Job& job) {
  Words words;
  if (!job.hosts.empty()) words = {"-hosts", HostList(job)};
  words.insert(words.end(), {"-n", RankCount(job)});
  if (!job.remote_shell.empty()) {
    words.insert(words.end(), {"-launcher", "ssh", "-launcher-exec", job.remote_shell});
  }
  return words;
}

Words Srun(const Job& job) {
  Words words;
  if (job.ranks_per_node > 0) words = {absl::StrCat("--ntasks-per-node=", job.ranks_per_node)};
  words.push_back(absl::StrCat("--mpi=", job.pmi));
  return words;
}

Words Torchrun(const Job& job) {
  return {"--standalone", "--no-python", absl::StrCat("--nproc-per-node=", job.ranks_per_node)};
}

}  // namespace

const EngineTraits& TraitsOf(Engine engine) {
  // mpirun kills ranks two seconds after a SIGTERM; SIGUSR1 has no limit. torchrun passes on
  // SIGTERM alone.
  static constexpr EngineTraits kTraits[] = {
      {.rank_variable = "OMPI_COMM_WORLD_RANK", .stop_signal = SIGUSR1, .reaches_hosts = true},
      {.rank_variable = "PMI_RANK", .stop_signal = SIGUSR1, .reaches_hosts = true},
      {.rank_variable = nullptr, .stop_signal = SIGUSR1, .reaches_hosts = false},
      {.rank_variable = "LOCAL_RANK", .stop_signal = SIGTERM, .reaches_hosts = false},
      {.rank_variable = nullptr, .stop_signal = SIGUSR1, .reaches_hosts = false}};
  return kTraits[static_cast<size_t>(engine)];
}

std::vector<std::string> CommandLine(const Job& job) {
  if (job.engine == Engine::kLocal) return job.command;
  using Composer = Words (*)(const Job&);
  static constexpr Composer kComposers[] = {Mpirun, Hydra, Srun, Torchrun};
  Words line = {job.program};
  const Words words = kComposers[static_cast<size_t>(job.engine)](job);
  line.insert(line.end(), words.begin(), words.end());
  line.insert(line.end(), job.command.begin(), job.command.end());
  return line;
}

absl::StatusOr<Engine> EngineFor(absl::string_view word, const EngineFacts& facts) {
  const absl::string_view mpi = facts.linked_mpi;
  const Engine of_mpi = mpi == "mpich" ? Engine::kHydra : Engine::kMpirun;
  if (word == "auto") {
    if (mpi.empty()) return facts.has_nccl ? Engine::kTorchrun : Engine::kLocal;
    return facts.in_allocation ? Engine::kSrun : of_mpi;
  }
  const Engine engine = ValueOf(word, kEngineWords).value_or(of_mpi);
  if (engine == Engine::kTorchrun || engine == Engine::kLocal) return engine;
  if (!mpi.empty() && (engine == Engine::kSrun || engine == of_mpi)) return engine;
  return absl::UnimplementedError(absl::StrCat(
      "--engine ", word, ": ",
      mpi.empty() ? "this build has no MPI: configure with -DMOE_ENABLE_MPI=ON"
                  : absl::StrCat("this build is linked with ", mpi, ", whose launcher is --engine ",
                                 NameOf(of_mpi, kEngineWords))));
}

}  // namespace moe::launch
