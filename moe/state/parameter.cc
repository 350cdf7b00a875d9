#include "moe/state/parameter.h"

#include <iterator>

#include <absl/strings/str_cat.h>

#include "kernels/base/status_macros.h"
#include "kernels/elementwise/elementwise.h"

namespace moe {
namespace {

absl::Span<const std::byte> BytesOf(absl::Span<const float> values) {
  return {reinterpret_cast<const std::byte*>(values.data()), values.size() * sizeof(float)};
}

}  // namespace

ParameterSpec CutAlong(TensorAxis axis, ParameterSpec spec, int64_t item) {
  spec.parts = {
      {.name = spec.name, .rows = spec.rows, .cols = spec.cols, .axis = axis, .item = item}};
  if (spec.holders == MeshGroup::kStage) spec.holders = MeshGroup::kData;
  return spec;
}

absl::Span<const std::byte> Parameter::values() const {
  // Elsewhere a vector is float32, whatever the type.
  const bool is_here = type_ != DType::kFloat32 && is_vector() && !compute_.empty();
  if (elsewhere_.has_value() && (elsewhere_->empty() || !is_here)) return *elsewhere_;
  if (type_ == DType::kFloat32) return BytesOf(master_);
  return borrowed_.empty() ? compute_ : borrowed_.front().values;
}

template <typename T>
MatrixView<const T> Parameter::view() const {
  MOE_CHECK(contiguous() && type_ == DTypeOf<T>::value);
  const std::byte* const first = values().data();
  MOE_CHECK(first != nullptr || size() == 0);  // else they are hidden: a lease is missing
  return {reinterpret_cast<const T*>(first), spec_.rows, spec_.cols};
}
template MatrixView<const float> Parameter::view<float>() const;
template MatrixView<const BFloat16> Parameter::view<BFloat16>() const;
template MatrixView<const Float16> Parameter::view<Float16>() const;

absl::Span<const float> Parameter::vector() const {
  if (!elsewhere_.has_value()) {
    MOE_CHECK(has_master());
    return master_;
  }
  MOE_CHECK(!elsewhere_->empty() && is_vector());  // else it is hidden: a lease is missing
  return {reinterpret_cast<const float*>(elsewhere_->data()), static_cast<size_t>(size())};
}

template <typename T>
MatrixView<const T> Parameter::part(size_t i) const {
  const TensorBox part = box(i);
  if (!contiguous()) {
    MOE_CHECK(!elsewhere_.has_value());
    return {reinterpret_cast<const T*>(borrowed_[i].values.data()), part.rows(), part.cols()};
  }
  int64_t begin = 0;
  for (size_t before = 0; before < i; ++before) begin += box(before).rows();
  return RowRange(view<T>(), begin, begin + part.rows());
}
template MatrixView<const float> Parameter::part<float>(size_t) const;
template MatrixView<const BFloat16> Parameter::part<BFloat16>(size_t) const;
template MatrixView<const Float16> Parameter::part<Float16>(size_t) const;

std::vector<absl::Span<const std::byte>> Parameter::replica() const {
  if (in_parts_) return {};
  if (has_master()) return {BytesOf(master_)};
  if (borrowed_.empty()) return {compute_};
  std::vector<absl::Span<const std::byte>> pieces;
  for (const BorrowedRows& rows : borrowed_) pieces.push_back(rows.values);
  return pieces;
}

absl::StatusOr<Buffer> Parameter::ReadReplica(Stream& stream) const {
  const auto pieces = replica();
  int64_t bytes = 0;
  for (const auto piece : pieces) bytes += std::ssize(piece);
  MOE_ASSIGN_OR_RETURN(Buffer copy, Buffer::Allocate(bytes));
  std::byte* to = copy.data();
  for (const auto piece : pieces) {
    MOE_RETURN_IF_ERROR(stream.CopyBytes(piece.data(), to, std::ssize(piece)));
    to += piece.size();
  }
  MOE_RETURN_IF_ERROR(stream.Synchronize());
  return copy;
}

absl::StatusOr<GradAccumulator> Parameter::OpenGradient() const {
  if (has_sum()) return open_sum_();
  return absl::FailedPreconditionError(
      absl::StrCat("Parameter::OpenGradient: ", spec_.name,
                   " has no sum of gradients, expected a step of a GradientReducer before"));
}

absl::Status Parameter::CheckWhole(const char* function) const {
  if (deferred_) {
    return absl::FailedPreconditionError(
        absl::StrCat(function, ": ", spec_.name,
                     " has no values yet and will be in parts (ZeRO-3), expected a whole master"));
  }
  if (!packed_) return absl::OkStatus();
  return absl::FailedPreconditionError(
      absl::StrCat(function, ": ", spec_.name,
                   " is in parts on several ranks (ZeRO) or in a file, expected a whole master"));
}

absl::Status Parameter::CheckMaster(const char* function) const {
  MOE_RETURN_IF_ERROR(CheckWhole(function));
  if (has_master()) return absl::OkStatus();
  return absl::FailedPreconditionError(
      absl::StrCat(function, ": ", spec_.name,
                   " is frozen in 16 bits and has no master, expected a trained one"));
}

absl::StatusOr<std::vector<float>> Parameter::ReadMaster(Stream& stream) const {
  MOE_RETURN_IF_ERROR(CheckWhole("ReadMaster"));
  std::vector<float> values(static_cast<size_t>(size()));
  if (has_master()) {
    MOE_RETURN_IF_ERROR(stream.CopyBytes(master().data(), values.data(),
                                         static_cast<int64_t>(values.size() * sizeof(float))));
    MOE_RETURN_IF_ERROR(stream.Synchronize());
    return values;
  }
  MOE_ASSIGN_OR_RETURN(const Buffer copy, ReadReplica(stream));
  const auto host = MakeInlineStream();
  const auto out = absl::MakeSpan(values);
  if (type_ == DType::kBFloat16) {
    MOE_RETURN_IF_ERROR(Cast(absl::Span<const BFloat16>(copy.span<BFloat16>()), out, *host));
  } else {
    MOE_RETURN_IF_ERROR(Cast(absl::Span<const Float16>(copy.span<Float16>()), out, *host));
  }
  return values;
}

}  // namespace moe
