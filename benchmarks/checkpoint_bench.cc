// Saves and loads the training state of one rank beside the limits of the machine, in turns: the
// stall of a step beside one memcpy of the same size, a save beside a file written and flushed, a
// load beside a file read. Prints a JSON row per round, in seconds; the first round is a warm-up
// without a row. Files are in the page cache when they are read.
//
//   checkpoint_bench FOLDER [MIB] [ROUNDS]
//
// FOLDER is removed and created again. MIB: size of the state, 384 by default.
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <memory>
#include <string>
#include <vector>

#include <absl/functional/function_ref.h>
#include <absl/strings/str_cat.h>
#include <fcntl.h>
#include <unistd.h>

#include "kernels/base/status_macros.h"
#include "moe/checkpoint/step_folders.h"
#include "moe/checkpoint/training_state.h"
#include "moe/main.h"
#include "moe/run/session.h"

namespace {

constexpr int64_t kSide = 1024;                                   // rows and columns of a parameter
constexpr int64_t kParameterMib = 3 * kSide * kSide / (1 << 18);  // master, m, v
constexpr size_t kChunk = size_t{1} << 20;                        // the block size of dd bs=1M

struct Args {
  std::string folder;
  int64_t mib = 384;
  int rounds = 7;
};

absl::StatusOr<double> Seconds(absl::FunctionRef<absl::Status()> run) {
  const auto begin = std::chrono::steady_clock::now();
  MOE_RETURN_IF_ERROR(run());
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

// Writes or reads `bytes` bytes of a file, chunk by chunk.
template <typename Call>
absl::Status PlainFile(const std::string& path, int flags, std::vector<char>& bytes, Call call) {
  const int file = ::open(path.c_str(), flags, 0666);
  bool ok = file >= 0;
  for (size_t at = 0; ok && at < bytes.size(); at += kChunk) {
    ok = call(file, bytes.data() + at, kChunk) == static_cast<ssize_t>(kChunk);
  }
  ok = ok && (flags == O_RDONLY || ::fsync(file) == 0);
  ::close(file);
  return ok ? absl::OkStatus() : absl::UnavailableError(absl::StrCat(path, ": ", strerror(errno)));
}

absl::Status Bench(const Args& args, std::unique_ptr<moe::Communicator> world) {
  MOE_ASSIGN_OR_RETURN(const auto session, moe::Session::Create({.threads = 1}, std::move(world)));
  const moe::Context& context = session->context();
  moe::ParameterStore store(moe::DType::kFloat32, 1, context);
  for (int64_t i = 0; i * kParameterMib < args.mib; ++i) {
    MOE_RETURN_IF_ERROR(
        store.Add({.name = absl::StrCat("weight.", i), .rows = kSide, .cols = kSide}).status());
  }
  MOE_ASSIGN_OR_RETURN(
      const auto reducer,
      moe::GradientReducer::Create({.max_terms = 1}, store, context, session->gradient_stream()));
  MOE_ASSIGN_OR_RETURN(const auto optimizer, moe::Optimizer::Create({}, store, *reducer, context));
  moe::TrainingState state(store, *optimizer, {}, context);

  std::filesystem::remove_all(args.folder);
  const std::string steps = args.folder + "/checkpoints", plain = args.folder + "/plain";
  std::filesystem::create_directories(args.folder);
  MOE_ASSIGN_OR_RETURN(
      const auto writer,
      moe::CheckpointWriter::Create({.folder = steps, .keep = 1, .hash_states = true}, 0, 1));
  std::vector<char> from(static_cast<size_t>(3 * store.total_size()) * sizeof(float)), to(from);
  for (int round = 0; round <= args.rounds; ++round) {
    MOE_ASSIGN_OR_RETURN(const double copy, Seconds([&] {
                           std::memcpy(to.data(), from.data(), from.size());
                           return absl::OkStatus();
                         }));
    MOE_ASSIGN_OR_RETURN(const double stall, Seconds([&]() -> absl::Status {
                           MOE_ASSIGN_OR_RETURN(const auto parts, state.PartsToWrite());
                           return writer->Start({.step = round}, parts);
                         }));
    MOE_ASSIGN_OR_RETURN(const double save, Seconds([&] {
                           return writer->Publish(context.mesh->world(), *context.host);
                         }));
    MOE_ASSIGN_OR_RETURN(const double write, Seconds([&] {
                           return PlainFile(plain, O_WRONLY | O_CREAT | O_TRUNC, from, ::write);
                         }));
    const std::string path = absl::StrCat(steps, "/", moe::StepFolderName(round));
    const auto load = [&]() -> absl::Status {
      MOE_ASSIGN_OR_RETURN(moe::CheckpointReader reader, moe::CheckpointReader::Open(path));
      return state.Restore(reader, round);
    };
    const auto read = [&] {
      return PlainFile(plain, O_RDONLY, to, ::read);
    };
    MOE_RETURN_IF_ERROR(load());
    MOE_RETURN_IF_ERROR(read());
    MOE_ASSIGN_OR_RETURN(const double loaded, Seconds(load));
    MOE_ASSIGN_OR_RETURN(const double read_plain, Seconds(read));
    if (round == 0) continue;
    std::printf(
        "{\"bytes\":%zu,\"memcpy\":%.4f,\"stall\":%.4f,\"write\":%.4f,\"save\":%.4f,"
        "\"read\":%.4f,\"load\":%.4f}\n",
        from.size(), copy, stall, write, save, read_plain, loaded);
    std::fflush(stdout);
  }
  return absl::OkStatus();
}

}  // namespace

int main(int argc, char** argv) {
  Args args;
  if (argc > 1) args.folder = argv[1];
  if (argc > 2) args.mib = std::atoll(argv[2]);
  if (argc > 3) args.rounds = std::atoi(argv[3]);
  if (argc < 2 || argc > 4 || args.mib < 1 || args.rounds < 1) {
    std::fprintf(stderr, "usage: checkpoint_bench FOLDER [MIB] [ROUNDS]\n");
    return 2;
  }
  return moe::Main(
      [&](std::unique_ptr<moe::Communicator> world) { return Bench(args, std::move(world)); }, 1);
}
