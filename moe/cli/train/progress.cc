#include "moe/cli/train/progress.h"

#include <algorithm>
#include <cmath>
#include <numbers>

#include <absl/strings/str_cat.h>
#include <absl/strings/str_join.h>
#include <fmt/format.h>

namespace moe::cli {
namespace {

double Percent(double part, double whole) {
  return whole > 0 ? 100 * part / whole : 0;
}

// "[########--------------]" for done / total.
std::string BarText(double done, double total, size_t width) {
  const double share = total > 0 ? std::clamp(done / total, 0.0, 1.0) : 0;
  const auto full = static_cast<size_t>(share * static_cast<double>(width));
  return absl::StrCat("[", std::string(full, '#'), std::string(width - full, '-'), "]");
}

}  // namespace

std::string ProgressText(const lm::StepMetrics& m, int64_t steps, double eta_seconds,
                         size_t columns) {
  const auto ms = [&](Phase phase) {
    return m.phase_seconds[static_cast<int>(phase)] * 1e3;
  };
  const double step_ms = m.step_seconds * 1e3;
  const double exchange_ms = ms(Phase::kDispatch) + ms(Phase::kCombine);
  const double all_reduce_ms = ms(Phase::kAllReduce);
  std::string scaling;
  if (m.loss_scale > 0)
    scaling = fmt::format(" | scale {:.17g}{}", m.loss_scale, m.skipped ? " skipped" : "");
  const std::string fields[] = {
      fmt::format("step {:>5}/{}", m.step, steps),
      fmt::format("loss {:.4f}", m.loss),
      fmt::format("lr {:.2e}", m.learning_rate),
      fmt::format("gnorm {:.3f}{}", m.grad_norm, scaling),
      fmt::format("{:.1f} ms", step_ms),
      fmt::format("{} tok/s", WithCommas(std::llround(m.tokens_per_second))),
      fmt::format("moe: a2a {:.1f} ms {:.0f}% expert {:.1f} ms drop {:.2f}% maxvio {:.2f} dead {} "
                  "aux {:.2e}",
                  exchange_ms, Percent(exchange_ms, step_ms), ms(Phase::kExpert),
                  100 * m.drop_fraction, m.max_violation, m.dead_experts, m.aux_loss),
      fmt::format("ar {:.1f} ms {:.0f}%", all_reduce_ms, Percent(all_reduce_ms, step_ms)),
      fmt::format("{:.0f} MiB", static_cast<double>(m.peak_bytes) / 0x1p20),
      fmt::format("eta {}", ClockText(eta_seconds))};
  const std::string whole = absl::StrJoin(fields, " | ");
  if (whole.size() <= columns) return whole;
  std::string text = fields[0].substr(0, columns);
  for (const int next : {9, 5, 1, 4, 2, 3, 6, 7, 8}) {
    if (text.size() + 3 + fields[next].size() > columns) break;
    absl::StrAppend(&text, " | ", fields[next]);
  }
  return text;
}

void Progress::Show(const lm::StepMetrics& metrics) {
  seconds_ += metrics.step_seconds;
  if (options_.quiet) return;
  const double eta = seconds_ / static_cast<double>(metrics.step) *
                     static_cast<double>(options_.steps - metrics.step);
  const bool due = metrics.step == 1 || metrics.step == options_.steps ||
                   metrics.step % options_.log_interval == 0;
  if (const Terminal& terminal = line_.terminal(); terminal.present) {
    std::string line;
    if (terminal.columns >= 80) {
      line =
          BarText(static_cast<double>(metrics.step), static_cast<double>(options_.steps), 12) + " ";
    }
    const size_t room = terminal.columns - 1 - line.size();  // a column is left free
    line_.Show(line + ProgressText(metrics, options_.steps, eta, room));
  } else if (due) {
    line_.Show(ProgressText(metrics, options_.steps, eta));
  }
  if (metrics.has_validation) {
    line_.End();
    Say(out_, "step {:>5}/{} | held-out loss {:.4f} nats, {:.4f} bits per {}\n", metrics.step,
        options_.steps, metrics.validation_loss, metrics.validation_loss / std::numbers::ln2,
        options_.unit);
    std::fflush(out_);
  }
}

}  // namespace moe::cli
