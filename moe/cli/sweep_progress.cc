#include "moe/cli/sweep_progress.h"

#include <algorithm>

#include <fmt/format.h>

#include "moe/io/bounded_json.h"

namespace moe::cli {

std::string SweepProgressText(int64_t number, int64_t points, const std::string& label,
                              std::optional<double> eta_seconds) {
  return fmt::format("[{:>{}}/{}] {} eta {}", number, std::to_string(points).size(), points, label,
                     eta_seconds.has_value() ? ClockText(*eta_seconds) : "--:--:--");
}

void SweepProgress::Show(const std::string& suffix) {
  std::optional<double> eta;
  if (finished_ > 0) {
    eta = seconds_ / static_cast<double>(finished_) *
          static_cast<double>(std::max<int64_t>(1, options_.to_run - finished_));
  }
  std::string line = SweepProgressText(number_, options_.points, label_ + suffix, eta);
  if (!terminal_.present) {
    Say(out_, "{}\n", line);
    std::fflush(out_);
    return;
  }
  line.resize(std::min(line.size(), terminal_.columns - 1));
  Say(out_, "\r{}{}{}\033[K", terminal_.color ? "\033[36m" : "", line,
      terminal_.color ? "\033[0m" : "");
  std::fflush(out_);
  line_is_open_ = true;
}

void SweepProgress::Start(int64_t number, const std::string& label) {
  number_ = number;
  label_ = label;
  if (!options_.quiet) Show("");
}

void SweepProgress::Step(int64_t done, int64_t total) {
  if (!options_.quiet && terminal_.present) Show(fmt::format(" step {}/{}", done, total));
}

void SweepProgress::Finish(double seconds) {
  seconds_ += seconds;
  ++finished_;
}

void SweepProgress::Error(int64_t number, const std::string& label, const std::string& error) {
  if (options_.quiet) return;
  End();
  Say(out_, "[{:>{}}/{}] {} error: {}\n", number, std::to_string(options_.points).size(),
      options_.points, label, Shown(error, 400));
  std::fflush(out_);
}

void SweepProgress::End() {
  if (!line_is_open_) return;
  std::fputs("\n", out_);
  line_is_open_ = false;
}

}  // namespace moe::cli
