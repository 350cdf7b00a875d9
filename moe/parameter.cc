#include "moe/parameter.h"

#include <algorithm>

#include <absl/strings/str_cat.h>

#include "kernels/base/rng.h"
#include "kernels/base/status_macros.h"
#include "kernels/base/xxh3.h"
#include "kernels/elementwise/elementwise.h"

namespace moe {
namespace {

constexpr int64_t kElementsPerTask = int64_t{1} << 16;  // some milliseconds

// A parameter's own random sequence: keyed by its name, so that it does not matter which rank
// creates it, or when.
void Initialize(const ParameterSpec& spec, uint64_t seed, ThreadPool& threads,
                absl::Span<float> values) {
  // A deviation of 0 is for weights that are read from files: no reason to draw numbers.
  if (spec.initializer != Initializer::kNormal || spec.init_std == 0) {
    std::fill(values.begin(), values.end(), spec.initializer == Initializer::kOnes ? 1.0f : 0.0f);
    return;
  }
  const auto layer = static_cast<uint32_t>(Xxh3(spec.name.data(), spec.name.size()));
  const auto draw = [&](int64_t begin, int64_t end) {
    RandomKey key = {.seed = seed, .purpose = RandomPurpose::kInit, .layer = layer};
    for (int64_t i = begin; i < end; ++i) {
      key.item = static_cast<uint64_t>(i / 2);
      values[static_cast<size_t>(i)] =
          static_cast<float>(spec.init_std * Normal(key, static_cast<uint32_t>(i % 2)));
    }
  };
  threads.For(static_cast<int64_t>(values.size()), kElementsPerTask, draw);
}

absl::Status CheckSize(const char* function, const ParameterSpec& spec, size_t size) {
  if (static_cast<int64_t>(size) == spec.rows * spec.cols) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat("ParameterStore::", function, ": ", size,
                                                 " values for ", spec.name, ", expected ",
                                                 spec.rows, " * ", spec.cols));
}

}  // namespace

template <>
MatrixView<const float> Parameter::view<float>() const {
  return {master().data(), spec_.rows, spec_.cols};
}

template <typename T>
MatrixView<const T> Parameter::view() const {
  MOE_CHECK(compute_.data() != nullptr || size() == 0);  // the store computes in float
  return {compute_.span<T>().data(), spec_.rows, spec_.cols};
}
template MatrixView<const BFloat16> Parameter::view<BFloat16>() const;
template MatrixView<const Float16> Parameter::view<Float16>() const;

absl::StatusOr<std::vector<float>> Parameter::ReadMaster(Stream& stream) const {
  std::vector<float> values(master().size());
  MOE_RETURN_IF_ERROR(stream.CopyBytes(master().data(), values.data(),
                                       static_cast<int64_t>(values.size() * sizeof(float))));
  MOE_RETURN_IF_ERROR(stream.Synchronize());
  return values;
}

absl::StatusOr<Parameter*> ParameterStore::Add(const ParameterSpec& spec) {
  if (spec.rows < 0 || spec.cols < 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("ParameterStore: ", spec.name, " is [", spec.rows, ", ", spec.cols, "]"));
  }
  if (Find(spec.name) != nullptr) {
    return absl::InvalidArgumentError(
        absl::StrCat("ParameterStore: ", spec.name, " was added before"));
  }
  auto parameter = std::make_unique<Parameter>();
  parameter->spec_ = spec;
  std::vector<CanonicalTensor>& parts = parameter->spec_.parts;
  if (parts.empty()) parts = {{.name = spec.name, .rows = spec.rows, .cols = spec.cols}};
  int64_t elements = 0;
  for (const CanonicalTensor& part : parts) elements += part.size();
  if (elements != parameter->size()) {
    return absl::InvalidArgumentError(absl::StrCat("ParameterStore: the parts of ", spec.name,
                                                   " have ", elements, " elements, expected ",
                                                   parameter->size()));
  }
  parameter->index_ = static_cast<int>(parameters_.size());
  MOE_RETURN_IF_ERROR(Allocate(CpuMemory(), *parameter));
  Initialize(spec, seed_, threads_, parameter->master());
  MOE_RETURN_IF_ERROR(RefreshCompute(*parameter, *MakeInlineStream(&threads_)));
  if (memory_.device().kind == DeviceKind::kCuda && spec.trainable) {
    MOE_RETURN_IF_ERROR(MoveToDevice(*parameter));
  }
  parameters_.push_back(std::move(parameter));
  return parameters_.back().get();
}

Parameter* ParameterStore::Find(absl::string_view name) const {
  const auto found = std::find_if(parameters_.begin(), parameters_.end(),
                                  [&](const auto& each) { return each->spec().name == name; });
  return found == parameters_.end() ? nullptr : found->get();
}

absl::Status ParameterStore::Allocate(MemoryResource& memory, Parameter& parameter) const {
  const std::string& name = parameter.spec_.name;
  MOE_ASSIGN_OR_RETURN(parameter.owned_,
                       Buffer::Allocate(parameter.size() * SizeOf(DType::kFloat32), memory, name));
  parameter.master_ = parameter.owned_.span<float>();
  if (compute_ == DType::kFloat32) return absl::OkStatus();
  MOE_ASSIGN_OR_RETURN(parameter.compute_,
                       Buffer::Allocate(parameter.size() * SizeOf(compute_), memory, name));
  return absl::OkStatus();
}

absl::Status ParameterStore::MoveToDevice(Parameter& parameter) {
  if (upload_ == nullptr) {
    MOE_ASSIGN_OR_RETURN(upload_, MakeStream(memory_.device()));
  }
  const Buffer master = std::move(parameter.owned_), compute = std::move(parameter.compute_);
  MOE_RETURN_IF_ERROR(Allocate(memory_, parameter));
  MOE_RETURN_IF_ERROR(upload_->CopyBytes(master.data(), parameter.owned_.data(), master.bytes()));
  MOE_RETURN_IF_ERROR(
      upload_->CopyBytes(compute.data(), parameter.compute_.data(), compute.bytes()));
  return upload_->Synchronize();
}

absl::Status ParameterStore::Adopt(Parameter& parameter, absl::Span<float> values) {
  const ParameterSpec& spec = parameter.spec();
  MOE_RETURN_IF_ERROR(CheckSize("Adopt", spec, values.size()));
  if (memory_.device().kind == DeviceKind::kCuda && spec.trainable) {
    return absl::UnimplementedError(
        absl::StrCat("ParameterStore::Adopt: ", spec.name,
                     " is memory of a CUDA device, expected a store on the CPU"));
  }
  if (values.data() == parameter.master_.data()) return absl::OkStatus();
  parameter.master_ = values;
  parameter.owned_ = Buffer();
  return RefreshCompute(parameter, *MakeInlineStream(&threads_));
}

absl::Status ParameterStore::WriteMaster(Parameter& parameter, absl::Span<const float> values,
                                         Stream& stream) const {
  MOE_RETURN_IF_ERROR(CheckSize("WriteMaster", parameter.spec(), values.size()));
  MOE_RETURN_IF_ERROR(stream.Upload(values.data(), parameter.master().data(),
                                    static_cast<int64_t>(values.size() * sizeof(float))));
  return RefreshCompute(parameter, stream);
}

absl::Status ParameterStore::RefreshCompute(Parameter& parameter, Stream& stream) const {
  ++parameter.version_;
  const absl::Span<const float> master = parameter.master();
  switch (compute_) {
    case DType::kBFloat16:
      return Cast(master, parameter.compute_.span<BFloat16>(), stream);
    case DType::kFloat16:
      return Cast(master, parameter.compute_.span<Float16>(), stream);
    default:
      return absl::OkStatus();
  }
}

int64_t ParameterStore::total_size() const {
  int64_t total = 0;
  for (const auto& parameter : parameters_) total += parameter->size();
  return total;
}

}  // namespace moe
