// What calls gave the first time, with which later ones are compared.
#ifndef MOE_MOE_BENCH_FIRST_RESULTS_H_
#define MOE_MOE_BENCH_FIRST_RESULTS_H_

#include <array>
#include <cstdint>
#include <cstring>
#include <map>
#include <vector>

#include <absl/types/span.h>

namespace moe::bench {

// Two results a call, y and dx; calls of a record must agree.
template <typename T>
class FirstResults {
 public:
  // Keeps results of so many bytes; those of the first record however many they are.
  explicit FirstResults(int64_t most_bytes) : most_bytes_(most_bytes) {}

  // Adds to `wrong` the elements of each result that differ from the record's first ones, bit for
  // bit. Of a record that comes for the first time, or was not kept: none.
  void Compare(int64_t record, absl::Span<const T> y, absl::Span<const T> dx,
               std::array<int64_t, 2>& wrong) {
    const auto kept = first_.find(record);
    if (kept != first_.end()) {
      wrong[0] += Differ(y, kept->second[0]);
      wrong[1] += Differ(dx, kept->second[1]);
      return;
    }
    const auto bytes = static_cast<int64_t>((y.size() + dx.size()) * sizeof(T));
    if (!first_.empty() && kept_bytes_ + bytes > most_bytes_) return;
    kept_bytes_ += bytes;
    first_[record] = {std::vector<T>(y.begin(), y.end()), std::vector<T>(dx.begin(), dx.end())};
  }

 private:
  static int64_t Differ(absl::Span<const T> now, const std::vector<T>& first) {
    int64_t count = 0;
    for (size_t i = 0; i < first.size(); ++i) {
      count += std::memcmp(&now[i], &first[i], sizeof(T)) != 0;
    }
    return count;
  }

  const int64_t most_bytes_;
  int64_t kept_bytes_ = 0;
  std::map<int64_t, std::array<std::vector<T>, 2>> first_;  // by record
};

}  // namespace moe::bench

#endif  // MOE_MOE_BENCH_FIRST_RESULTS_H_
