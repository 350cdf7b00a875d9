#include "moe/cli/commands.h"

namespace moe::cli {

absl::Span<const Command> Commands() {
  static constexpr Command kCommands[] = {
      {"train", "train a mixture-of-experts language model on text files", TrainCommand, TrainHelp},
      {"bench", "times and checks collectives, even and skewed", BenchCommand, BenchHelp},
      {"layer", "one MoE layer of a public model, from its own files", LayerCommand, LayerHelp},
      {"verify", "any layout against one rank, and one rank against float64", VerifyCommand,
       VerifyHelp},
      {"report", "one HTML file with charts of what the others measured", ReportCommand,
       ReportHelp},
      {"doctor", "what this build and machine have, and what will be slow", DoctorCommand,
       DoctorHelp},
      {"completion", "completes commands, flags and their values in your shell", CompletionCommand,
       CompletionHelp},
  };
  return kCommands;
}

}  // namespace moe::cli
