// ParameterStore of parameter.h.
#include <algorithm>
#include <iterator>
#include <utility>

#include <absl/strings/str_cat.h>

#include "kernels/base/rng.h"
#include "kernels/base/status_macros.h"
#include "kernels/base/xxh3.h"
#include "kernels/elementwise/elementwise.h"
#include "moe/state/boxes.h"
#include "moe/state/parameter.h"

namespace moe {
namespace {

constexpr int64_t kElementsPerTask = int64_t{1} << 16;  // some milliseconds

// A deviation of 0 is for weights that are read from files: no reason to draw numbers.
bool StartsAtZero(const ParameterSpec& spec) {
  return spec.initializer == Initializer::kZeros ||
         (spec.initializer == Initializer::kNormal && spec.init_std == 0);
}

// A parameter's own random sequence: keyed by its name and by the element of the whole parameter,
// so that it does not matter which rank creates it, when, or how much of it.
void Initialize(const Parameter& parameter, uint64_t seed, ThreadPool& threads,
                absl::Span<float> values) {
  const ParameterSpec& spec = parameter.spec();
  if (spec.initializer == Initializer::kOnes) {
    std::fill(values.begin(), values.end(), 1.0f);
    return;
  }
  const auto layer = static_cast<uint32_t>(Xxh3(spec.name.data(), spec.name.size()));
  for (const BoxInMemory& held : BoxesOf(parameter)) {
    const TensorBox& box = held.box;
    int64_t before = 0;  // elements of the whole parameter before those of this tensor
    for (const CanonicalTensor* t = spec.parts.data(); t != held.tensor; ++t) before += t->size();
    const auto draw = [&](int64_t begin, int64_t end) {
      RandomKey key = {.seed = seed, .purpose = RandomPurpose::kInit, .layer = layer};
      for (int64_t i = begin; i < end; ++i) {
        const int64_t row = box.row_begin + i / box.cols(), col = box.col_begin + i % box.cols();
        const int64_t element = before + row * held.tensor->cols + col;
        key.item = static_cast<uint64_t>(element / 2);
        values[static_cast<size_t>(held.first + i)] =
            static_cast<float>(spec.init_std * Normal(key, static_cast<uint32_t>(element % 2)));
      }
    };
    threads.For(box.size(), kElementsPerTask, draw);
  }
}

// Into the compute copy at `out`. Nothing to do for float: there is none.
absl::Status Round(absl::Span<const float> values, DType type, std::byte* out, Stream& stream) {
  switch (type) {
    case DType::kBFloat16:
      return Cast(values, absl::MakeSpan(reinterpret_cast<BFloat16*>(out), values.size()), stream);
    case DType::kFloat16:
      return Cast(values, absl::MakeSpan(reinterpret_cast<Float16*>(out), values.size()), stream);
    default:
      return absl::OkStatus();
  }
}

}  // namespace

absl::StatusOr<Parameter*> ParameterStore::Add(const ParameterSpec& spec) {
  MOE_ASSIGN_OR_RETURN(const auto added, AddSlab({&spec, 1}));
  return added.front();
}

absl::StatusOr<std::vector<Parameter*>> ParameterStore::AddSlab(
    absl::Span<const ParameterSpec> specs) {
  std::vector<std::unique_ptr<Parameter>> slab;
  for (const ParameterSpec& spec : specs) {
    const ParameterSpec& first = specs.front();
    if (spec.rows != first.rows || spec.cols != first.cols || spec.holders != first.holders ||
        spec.trainable != first.trainable || spec.host_state != first.host_state) {
      return absl::InvalidArgumentError(
          absl::StrCat("ParameterStore: ", spec.name, " is of another shape or group than ",
                       first.name, ", expected a slab of equal parameters"));
    }
    MOE_ASSIGN_OR_RETURN(slab.emplace_back(), Make(spec));
    slab.back()->slab_ = static_cast<int>(parameters_.size());
    slab.back()->index_ = static_cast<int>(parameters_.size() + slab.size()) - 1;
  }
  const auto defers = [this](const ParameterSpec& spec) {
    return spec.trainable || (use_ == StoreUse::kInference && !spec.host_state);
  };
  const bool later = defers_ && !slab.empty() && defers(slab.front()->spec_);
  if (!later) MOE_RETURN_IF_ERROR(Allocate(slab));
  std::vector<Parameter*> added;
  for (auto& parameter : slab) {
    parameter->deferred_ = later;
    if (!later) MOE_RETURN_IF_ERROR(Fill(*parameter));
    added.push_back(parameter.get());
  }
  std::move(slab.begin(), slab.end(), std::back_inserter(parameters_));
  return added;
}

absl::Status ParameterStore::Provide(absl::Span<Parameter* const> parameters,
                                     const ParameterMemory& memory) const {
  for (const Parameter* const parameter : parameters) {
    if (!parameter->deferred_) continue;
    const auto first = static_cast<size_t>(parameter->slab());
    size_t end = first + 1;
    while (end < parameters_.size() && parameters_[end]->slab() == parameter->slab()) ++end;
    const auto slab = absl::MakeConstSpan(parameters_).subspan(first, end - first);
    MOE_RETURN_IF_ERROR(Allocate(slab, memory));
    for (const auto& each : slab) each->deferred_ = false;
    for (const auto& each : slab) MOE_RETURN_IF_ERROR(Fill(*each));
  }
  return absl::OkStatus();
}

absl::StatusOr<std::unique_ptr<Parameter>> ParameterStore::Make(const ParameterSpec& spec) const {
  if (spec.rows < 0 || spec.cols < 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("ParameterStore: ", spec.name, " is [", spec.rows, ", ", spec.cols, "]"));
  }
  if (Find(spec.name) != nullptr) {
    return absl::InvalidArgumentError(
        absl::StrCat("ParameterStore: ", spec.name, " was added before"));
  }
  if (spec.host_state && spec.trainable) {
    return absl::InvalidArgumentError(absl::StrCat(
        "ParameterStore: ", spec.name, " is state of the host, expected trainable = false"));
  }
  auto parameter = std::make_unique<Parameter>();
  parameter->spec_ = spec;
  parameter->chunk_ = chunk_;
  if (use_ != StoreUse::kTraining) parameter->spec_.initializer = Initializer::kZeros;
  if (use_ == StoreUse::kInference) parameter->spec_.trainable = false;
  parameter->type_ = compute_;
  std::vector<CanonicalTensor>& parts = parameter->spec_.parts;
  if (parts.empty()) parts = {{.name = spec.name, .rows = spec.rows, .cols = spec.cols}};
  std::vector<TensorBox>& boxes = parameter->spec_.boxes;
  if (boxes.empty()) {
    for (const CanonicalTensor& part : parts) boxes.push_back(part.box());
  }
  const auto is_in = [](const TensorBox& box, const CanonicalTensor& part) {
    const TensorBox common = Common(box, part.box());
    return common.rows() == box.rows() && common.cols() == box.cols();
  };
  if (!std::equal(boxes.begin(), boxes.end(), parts.begin(), parts.end(), is_in)) {
    return absl::InvalidArgumentError(
        absl::StrCat("ParameterStore: ", spec.name, " has ", boxes.size(),
                     " boxes, expected one within each of its ", parts.size(), " parts"));
  }
  int64_t elements = 0;
  for (const TensorBox& box : boxes) elements += box.size();
  if (elements == parameter->size()) return parameter;
  return absl::InvalidArgumentError(absl::StrCat("ParameterStore: the parts of ", spec.name,
                                                 " have ", elements, " elements, expected ",
                                                 parameter->size()));
}

// In the master itself where the host can write it, else by way of memory of the host.
absl::Status ParameterStore::Fill(Parameter& parameter) const {
  const ParameterSpec& spec = parameter.spec_;
  if (StartsAtZero(spec)) {  // as all memory does
    ++parameter.version_;
    return absl::OkStatus();
  }
  const bool on_device = OnDevice(parameter);
  const auto inline_stream = MakeInlineStream(&threads_);
  if (!on_device && parameter.has_master()) {
    Initialize(parameter, seed_, threads_, parameter.master_);
    return RefreshCompute(parameter, *inline_stream);
  }
  MOE_ASSIGN_OR_RETURN(
      const Buffer drawn,
      Buffer::Allocate(parameter.size() * SizeOf(DType::kFloat32), CpuMemory(), spec.name));
  Initialize(parameter, seed_, threads_, drawn.span<float>());
  if (on_device && upload_ == nullptr) {
    MOE_ASSIGN_OR_RETURN(upload_, MakeStream(memory_.device()));
  }
  Stream& stream = on_device ? *upload_ : *inline_stream;
  MOE_RETURN_IF_ERROR(WriteMaster(parameter, drawn.span<float>(), stream));
  return stream.Synchronize();
}

std::vector<Parameter*> ParameterStore::AddedSince(size_t count) const {
  std::vector<Parameter*> added;
  for (size_t i = count; i < parameters_.size(); ++i) added.push_back(parameters_[i].get());
  return added;
}

Parameter* ParameterStore::Find(absl::string_view name) const {
  const auto found = std::find_if(parameters_.begin(), parameters_.end(),
                                  [&](const auto& each) { return each->spec().name == name; });
  return found == parameters_.end() ? nullptr : found->get();
}

bool ParameterStore::EndsSlab(const Parameter& parameter) const {
  const auto next = static_cast<size_t>(parameter.index()) + 1;
  return next == parameters_.size() || parameters_[next]->slab() != parameter.slab();
}

absl::Status ParameterStore::Allocate(absl::Span<const std::unique_ptr<Parameter>> slab,
                                      const ParameterMemory& given) const {
  if (slab.empty()) return absl::OkStatus();
  const Parameter& first = *slab.front();
  MemoryResource& memory = OnDevice(first) ? memory_ : CpuMemory();
  const auto or_given = [&](MemoryResource* other) -> MemoryResource& {
    return other == nullptr || first.is_vector() ? memory : *other;
  };
  const auto size = static_cast<size_t>(first.size());
  const auto allocate = [&](DType type,
                            MemoryResource& from) -> absl::StatusOr<std::shared_ptr<const Buffer>> {
    MOE_ASSIGN_OR_RETURN(
        Buffer buffer,
        Buffer::Allocate(std::ssize(slab) * first.size() * SizeOf(type), from, first.spec_.name));
    return std::make_shared<const Buffer>(std::move(buffer));
  };
  // Biases are read in float32.
  if (compute_ == DType::kFloat32 || !first.frozen() || first.spec_.rows == 1) {
    MOE_ASSIGN_OR_RETURN(
        const auto masters,
        allocate(DType::kFloat32,
                 or_given(compute_ == DType::kFloat32 ? given.values : given.masters)));
    for (size_t i = 0; i < slab.size(); ++i) {
      slab[i]->owned_ = masters;
      slab[i]->master_ = masters->span<float>().subspan(i * size, size);
    }
  }
  if (compute_ == DType::kFloat32) return absl::OkStatus();
  const size_t bytes = size * static_cast<size_t>(SizeOf(compute_));
  const bool may_go = first.spec_.borrowable && first.master_.empty() &&
                      StartsAtZero(first.spec_) && &memory == &CpuMemory() &&
                      given.values == nullptr;
  MOE_ASSIGN_OR_RETURN(const auto copies,
                       allocate(compute_, may_go ? ZeroPages() : or_given(given.values)));
  for (size_t i = 0; i < slab.size(); ++i) {
    slab[i]->owned_compute_ = copies;
    slab[i]->compute_ = copies->span<std::byte>().subspan(i * bytes, bytes);
  }
  return absl::OkStatus();
}

bool ParameterStore::OnDevice(const Parameter& parameter) const {
  return memory_.device().kind == DeviceKind::kCuda && !parameter.spec_.host_state;
}

absl::Status ParameterStore::Adopt(Parameter& parameter, absl::Span<float> values) {
  const ParameterSpec& spec = parameter.spec();
  if (std::ssize(values) != parameter.size()) {
    return absl::InvalidArgumentError(absl::StrCat("ParameterStore::Adopt: ", values.size(),
                                                   " values for ", spec.name, ", expected ",
                                                   spec.rows, " * ", spec.cols));
  }
  if (OnDevice(parameter)) {
    return absl::UnimplementedError(
        absl::StrCat("ParameterStore::Adopt: ", spec.name,
                     " is memory of a CUDA device, expected a store on the CPU"));
  }
  MOE_RETURN_IF_ERROR(parameter.CheckMaster("ParameterStore::Adopt"));
  if (values.data() == parameter.master_.data()) return absl::OkStatus();
  parameter.master_ = values;
  parameter.owned_ = nullptr;
  return RefreshCompute(parameter, *MakeInlineStream(&threads_));
}

absl::StatusOr<std::shared_ptr<float>> ParameterStore::Share(Parameter& parameter) const {
  MOE_RETURN_IF_ERROR(parameter.CheckMaster("ParameterStore::Share"));
  parameter.shared_ = true;
  return std::shared_ptr<float>(parameter.owned_, parameter.master_.data());
}

bool ParameterStore::CanBorrow(const Parameter& parameter) const {
  return parameter.spec().borrowable && compute_ != DType::kFloat32 && !parameter.has_master() &&
         !OnDevice(parameter);
}

absl::Status ParameterStore::Borrow(Parameter& parameter, std::vector<BorrowedRows> rows) const {
  const std::string& name = parameter.spec().name;
  if (!CanBorrow(parameter)) {
    return absl::FailedPreconditionError(
        absl::StrCat("ParameterStore::Borrow: ", name,
                     " is no frozen matrix in 16 bits that its layer reads by rows, on the CPU"));
  }
  bool fits = rows.size() == 1 || rows.size() == parameter.parts().size();
  for (size_t i = 0; fits && i < rows.size(); ++i) {
    const int64_t elements = rows.size() == 1 ? parameter.size() : parameter.box(i).size();
    fits = std::ssize(rows[i].values) == elements * SizeOf(compute_) &&
           reinterpret_cast<uintptr_t>(rows[i].values.data()) % SizeOf(compute_) == 0;
  }
  if (!fits) {
    return absl::InvalidArgumentError(
        absl::StrCat("ParameterStore::Borrow: ", rows.size(), " blocks for ", name, ", expected ",
                     parameter.spec().rows, " * ", parameter.spec().cols,
                     " elements at an even address, in one block or in one for each part"));
  }
  parameter.borrowed_ = std::move(rows);
  parameter.compute_ = {};
  parameter.owned_compute_ = nullptr;
  ++parameter.version_;
  return absl::OkStatus();
}

absl::Status ParameterStore::WriteMaster(Parameter& parameter, absl::Span<const float> values,
                                         Stream& stream, std::optional<int64_t> first) const {
  const int64_t begin = first.value_or(0), count = std::ssize(values);
  if (begin < 0 || begin + count > parameter.size() || (!first && count < parameter.size())) {
    const std::string from = first ? absl::StrCat(" from ", begin, " on") : "";
    return absl::InvalidArgumentError(absl::StrCat(
        "ParameterStore::WriteMaster: ", count, " values", from, " for ", parameter.spec().name,
        ", expected ", parameter.spec().rows, " * ", parameter.spec().cols));
  }
  Parameter* const written = &parameter;
  MOE_RETURN_IF_ERROR(Provide({&written, 1}));
  MOE_RETURN_IF_ERROR(parameter.CheckWhole("WriteMaster"));
  if (!parameter.borrowed_.empty()) {
    return absl::FailedPreconditionError(
        absl::StrCat("ParameterStore::WriteMaster: ", parameter.spec().name,
                     " is borrowed, expected memory of its own"));
  }
  if (!parameter.has_master()) {
    ++parameter.version_;
    MOE_ASSIGN_OR_RETURN(const Buffer rounded, Buffer::Allocate(count * SizeOf(compute_)));
    MOE_RETURN_IF_ERROR(Round(values, compute_, rounded.data(), *MakeInlineStream(&threads_)));
    return stream.Upload(rounded.data(), parameter.compute_.data() + begin * SizeOf(compute_),
                         rounded.bytes());
  }
  const absl::Span<float> master = parameter.master_.subspan(begin, values.size());
  MOE_RETURN_IF_ERROR(
      stream.Upload(values.data(), master.data(), count * static_cast<int64_t>(sizeof(float))));
  return RefreshPart({&parameter, begin, master}, stream);
}

void ParameterStore::SetValues(Parameter& parameter,
                               std::optional<absl::Span<const std::byte>> values) const {
  const DType type = parameter.is_vector() ? DType::kFloat32 : compute_;
  MOE_CHECK(!values.has_value() || values->empty() ||
            std::ssize(*values) == parameter.size() * SizeOf(type));
  parameter.elsewhere_ = values;
}

absl::Status ParameterStore::RefreshCompute(Parameter& parameter, Stream& stream) const {
  if (parameter.has_master()) return RefreshPart({&parameter, 0, parameter.master()}, stream);
  ++parameter.version_;
  return absl::OkStatus();
}

std::byte* ParameterStore::CopyOf(const MasterPart& part) const {
  if (!part.copy.empty()) return part.copy.data();
  return part.parameter->compute_.data() + part.begin * SizeOf(compute_);
}

absl::Status ParameterStore::RefreshPart(const MasterPart& part, Stream& stream) const {
  ++part.parameter->version_;
  if (compute_ == DType::kFloat32) return absl::OkStatus();
  return Round(part.values, compute_, CopyOf(part), stream);
}

absl::Status ParameterStore::RefreshParts(absl::Span<const MasterPart> parts,
                                          const Context& context) const {
  for (const MasterPart& part : parts) ++part.parameter->version_;
  switch (compute_) {
    case DType::kBFloat16:
      return RoundParts<BFloat16>(parts, context);
    case DType::kFloat16:
      return RoundParts<Float16>(parts, context);
    default:
      return absl::OkStatus();
  }
}

template <typename T>
absl::Status ParameterStore::RoundParts(absl::Span<const MasterPart> parts,
                                        const Context& context) const {
  constexpr int64_t kAligned = 16;  // where a slice begins, a thread block begins at whole vectors
  const WorkspaceScope scope(*context.host_workspace);
  MOE_ASSIGN_OR_RETURN(const auto slices,
                       context.host_workspace->Array<CastSlice<T>>(std::ssize(parts)));
  int64_t first = 0;
  for (size_t i = 0; i < parts.size(); ++i) {
    const MasterPart& part = parts[i];
    slices[i] = {first, std::ssize(part.values), part.values.data(),
                 reinterpret_cast<T*>(CopyOf(part))};
    first += (slices[i].size + kAligned - 1) / kAligned * kAligned;
  }
  return CastSlices<T>(slices, *context.workspace, *context.compute);
}

absl::StatusOr<PackedParameters> ParameterStore::Pack(absl::Span<Parameter* const> parameters,
                                                      Stream& stream) {
  PackedParameters packed;
  int64_t bytes = 0;
  int slab = -1;
  for (const Parameter* p : parameters) {
    if (p->owned_ == nullptr || p->shared_) {
      return absl::FailedPreconditionError(absl::StrCat(
          "ParameterStore::Pack: ", p->spec().name,
          " is in memory that was adopted, shared or packed before, expected the store's own"));
    }
    const bool as_float = compute_ == DType::kFloat32 || p->is_vector();
    packed.element_bytes.push_back(SizeOf(as_float ? DType::kFloat32 : compute_));
    if (std::exchange(slab, p->slab()) != p->slab()) {
      bytes = (bytes + kPackedLine - 1) / kPackedLine * kPackedLine;
    }
    packed.first_byte.push_back(bytes);
    bytes += p->size() * packed.element_bytes.back();
  }
  packed.first_byte.push_back(bytes);
  MOE_ASSIGN_OR_RETURN(Buffer block, Buffer::Allocate(bytes, memory_, "packed parameters"));
  packed.block = block.span<uint8_t>();
  for (size_t i = 0; i < parameters.size(); ++i) {
    const absl::Span<const std::byte> from = packed.element_bytes[i] == sizeof(float)
                                                 ? parameters[i]->replica().front()
                                                 : parameters[i]->compute_;
    MOE_RETURN_IF_ERROR(stream.CopyBytes(from.data(), packed.block.data() + packed.first_byte[i],
                                         static_cast<int64_t>(from.size())));
  }
  MOE_RETURN_IF_ERROR(stream.Synchronize());
  for (size_t i = 0; i < parameters.size(); ++i) {
    Parameter& p = *parameters[i];
    std::byte* const now = block.data() + packed.first_byte[i];
    const auto size = static_cast<size_t>(p.size());
    p.owned_ = nullptr;
    if (packed.element_bytes[i] == sizeof(float)) {
      p.master_ = absl::MakeSpan(reinterpret_cast<float*>(now), size);
    } else {
      p.master_ = {};
      p.owned_compute_ = nullptr;
      p.compute_ = absl::MakeSpan(now, size * static_cast<size_t>(packed.element_bytes[i]));
    }
    p.packed_ = true;
    ++p.version_;
  }
  packed_.push_back(std::move(block));
  return packed;
}

void ParameterStore::KeepInParts(absl::Span<Parameter* const> parameters) {
  for (Parameter* const p : parameters) {
    p->master_ = {};
    if (p->owned_compute_ == nullptr) p->compute_ = {};
    p->in_parts_ = true;
    p->elsewhere_.emplace();
  }
  packed_.pop_back();
}

void ParameterStore::DropMaster(Parameter& parameter) const {
  if (compute_ == DType::kFloat32 || parameter.is_vector()) return;
  parameter.master_ = {};
  parameter.owned_ = nullptr;
}

void ParameterStore::DropValues(Parameter& parameter) const {
  parameter.master_ = {};
  parameter.compute_ = {};
  parameter.owned_ = parameter.owned_compute_ = nullptr;
  parameter.packed_ = parameter.in_parts_ = true;
  parameter.elsewhere_.emplace();
}

int64_t ParameterStore::bytes() const {
  int64_t total = 0;
  for (const auto& p : parameters_) {
    if (p->owned_ != nullptr) total += p->size() * SizeOf(DType::kFloat32);
    if (p->owned_compute_ != nullptr) total += p->size() * SizeOf(compute_);
  }
  for (const Buffer& block : packed_) total += block.bytes();
  return total;
}

int64_t ParameterStore::borrowed_bytes() const {
  int64_t total = 0;
  for (const auto& p : parameters_) {
    for (const BorrowedRows& rows : p->borrowed_) total += std::ssize(rows.values);
  }
  return total;
}

int64_t ParameterStore::total_size() const {
  int64_t total = 0;
  for (const auto& parameter : parameters_) total += parameter->size();
  return total;
}

}  // namespace moe
