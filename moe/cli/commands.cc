#include "moe/cli/commands.h"

namespace moe::cli {

absl::Span<const Command> Commands() {
  static constexpr Command kCommands[] = {
      {"train", "trains a mixture-of-experts language model on text files", TrainCommand,
       TrainHelp},
      {"sweep", "measures every combination of experts, top-k, capacity factor ...", SweepCommand,
       SweepHelp},
      {"bench", "times and checks collectives and layers, even and skewed", BenchCommand,
       BenchHelp},
      {"layer", "runs one MoE layer of a public model, from its own files", LayerCommand,
       LayerHelp},
      {"verify", "compares any layout with one rank, and one rank with float64", VerifyCommand,
       VerifyHelp},
      {"report", "draws what the others measured: one HTML file with charts", ReportCommand,
       ReportHelp},
      {"ckpt", "lists, checks, compares and removes checkpoints", CkptCommand, CkptHelp},
      {"doctor", "tells what this build and machine have, and what will be slow", DoctorCommand,
       DoctorHelp},
      {"completion", "completes commands, flags and their values in a shell", CompletionCommand,
       CompletionHelp},
  };
  return kCommands;
}

}  // namespace moe::cli
