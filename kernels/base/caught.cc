#include "kernels/base/caught.h"

#include <exception>
#include <new>
#include <system_error>

#include <absl/status/statusor.h>
#include <absl/strings/str_cat.h>

namespace moe {
namespace {

// Made before it is needed: making a status allocates, copying it does not.
const absl::Status& OutOfMemory() {
  static const auto* const status = new absl::Status(absl::ResourceExhaustedError("out of memory"));
  return *status;
}
[[maybe_unused]] const absl::Status& made_before_main = OutOfMemory();

// The status of the handled exception; throws if there is no memory for its message.
absl::Status Described() {
  try {
    throw;
  } catch (const std::bad_alloc&) {
    return OutOfMemory();
  } catch (const absl::BadStatusOrAccess& e) {
    return e.status();
  } catch (const std::system_error& e) {
    if (e.code() == std::errc::not_enough_memory) return OutOfMemory();
    if (e.code() == std::errc::resource_unavailable_try_again) {
      return absl::ResourceExhaustedError(absl::StrCat("a thread does not start: ", e.what()));
    }
    return absl::InternalError(absl::StrCat("exception: ", e.what()));
  } catch (const std::exception& e) {
    return absl::InternalError(absl::StrCat("exception: ", e.what()));
  } catch (...) {
    return absl::InternalError("an exception that is no std::exception");
  }
}

}  // namespace

absl::Status StatusOfException() noexcept {
  try {
    return Described();
  } catch (...) {
    return OutOfMemory();
  }
}

}  // namespace moe
