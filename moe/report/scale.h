// Scales of axes: from values to places, with ticks that people can read.
#ifndef MOE_MOE_REPORT_SCALE_H_
#define MOE_MOE_REPORT_SCALE_H_

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace moe::report {

enum class ScaleKind : uint8_t {
  kLinear,  // ticks at 1, 2 or 5 times a power of ten
  kWhole,   // the same, ticks at whole numbers only
  kLog,     // powers of ten; over less than two of them also 2 and 5 times those
  kBytes,   // logarithmic, ticks at powers of two: "4 KiB"
};

struct Tick {
  double value = 0;
  std::string label;
};

// Covers its data from tick to tick, so that every value stands between two labels.
class Scale {
 public:
  // Of values in [low, high], with about `num_ticks` ticks (at most one and a half times as many).
  // One value alone, or none (low > high), gets a scale around it. Logarithmic scales need low > 0;
  // otherwise the scale is linear. `word` is one more tick, at a value that is no number to the
  // reader; a tick of the data that stands near it is left out.
  static Scale Of(ScaleKind kind, double low, double high, int num_ticks,
                  const std::optional<Tick>& word = std::nullopt);

  // The place of `value` from 0 (low) to 1 (high).
  double Place(double value) const;
  const std::vector<Tick>& ticks() const { return ticks_; }
  double low() const { return low_; }
  double high() const { return high_; }
  bool logarithmic() const { return logarithmic_; }

 private:
  void MakeLinear(double low, double high, int num_ticks, bool whole);
  void MakeLog(double low, double high, int num_ticks);
  void MakeBytes(double low, double high, int num_ticks);
  void Add(const Tick& word);

  bool logarithmic_ = false;
  double low_ = 0, high_ = 1;
  std::vector<Tick> ticks_;
};

}  // namespace moe::report

#endif  // MOE_MOE_REPORT_SCALE_H_
