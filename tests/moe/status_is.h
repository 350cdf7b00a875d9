// What tests expect of a call that is refused.
#ifndef MOE_TESTS_MOE_STATUS_IS_H_
#define MOE_TESTS_MOE_STATUS_IS_H_

#include <absl/status/statusor.h>
#include <absl/strings/match.h>
#include <gmock/gmock.h>

namespace moe::testing {

inline const absl::Status& StatusOf(const absl::Status& status) {
  return status;
}
template <typename T>
const absl::Status& StatusOf(const absl::StatusOr<T>& result) {
  return result.status();
}

// A Status, or a StatusOr, of this code with `part` in its message.
MATCHER_P2(StatusIs, code, part, "") {
  const absl::Status& status = StatusOf(arg);
  *result_listener << "whose status is " << status.ToString();
  return status.code() == code && absl::StrContains(status.message(), part);
}

}  // namespace moe::testing

#endif  // MOE_TESTS_MOE_STATUS_IS_H_
