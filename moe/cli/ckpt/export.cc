#include "moe/cli/ckpt/export.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <cstdlib>
#include <filesystem>
#include <map>
#include <optional>
#include <system_error>
#include <utility>

#include <absl/strings/numbers.h>
#include <absl/strings/str_cat.h>
#include <absl/strings/str_format.h>
#include <absl/strings/str_replace.h>

#include <nlohmann/json.hpp>

#include "kernels/base/status_macros.h"
#include "kernels/base/storage_type.h"
#include "moe/cli/ckpt/pieces.h"
#include "moe/io/file.h"
#include "moe/io/safetensors_stream.h"

namespace moe::ckpt {
namespace {

namespace fs = std::filesystem;
using Json = nlohmann::ordered_json;

// The settings of the run, by section of the manifest.
class RunTexts {
 public:
  explicit RunTexts(const CheckpointSections& sections)
      : numerics_(Json::parse(sections.numerics, nullptr, false)),
        model_(Json::parse(sections.model, nullptr, false)),
        trainer_(Json::parse(sections.trainer, nullptr, false)) {}

  const Json& numerics() const { return numerics_; }
  const Json& model() const { return model_; }
  const Json& trainer() const { return trainer_; }

 private:
  Json numerics_, model_, trainer_;
};
using Section = const Json& (RunTexts::*)() const;

std::optional<std::string> TextOf(const Json& section, const char* key) {
  const auto member = section.is_object() ? section.find(key) : section.end();
  if (member == section.end() || !member->is_string()) return std::nullopt;
  return member->get<std::string>();
}

absl::Status Absent(const char* key) {
  return absl::InvalidArgumentError(
      absl::StrCat("the checkpoint does not say ", key, ", expected one of moe train"));
}

// What a setting must be for the format. `key` and `texts` are as the manifest has them.
struct Requirement {
  Section section;
  const char* key;
  const char* name;  // for people
  std::vector<std::string> texts;
  const char* expected;
  bool numbered = false;  // the text is the number of a word, which says nothing to people
};

absl::Status Check(const Requirement& requirement, const RunTexts& run, const std::string& format) {
  const auto text = TextOf((run.*requirement.section)(), requirement.key);
  if (!text.has_value()) return Absent(requirement.key);
  const auto& texts = requirement.texts;
  if (std::find(texts.begin(), texts.end(), *text) != texts.end()) return absl::OkStatus();
  double number = 0;
  const bool real = text->find("0x") != std::string::npos && absl::SimpleAtod(*text, &number);
  const std::string shown = requirement.numbered ? "another" : real ? absl::StrCat(number) : *text;
  return absl::InvalidArgumentError(absl::StrCat("--format ", format, ": ", requirement.name,
                                                 " is ", shown, ", expected ",
                                                 requirement.expected));
}

// What any format needs to know of the model.
struct Shape {
  int64_t vocab = 0, hidden = 0, layers = 0, heads = 0, experts = 0, width = 0, top_k = 0;
  int64_t positions = 0;
  double rotary_base = 0, norm_epsilon = 0, init_std = 0;
};

absl::StatusOr<Shape> ShapeOf(const RunTexts& run) {
  Shape shape;
  const struct {
    Section section;
    const char* key;
    int64_t* field;
  } integers[] = {{&RunTexts::model, "vocab_size", &shape.vocab},
                  {&RunTexts::model, "hidden_size", &shape.hidden},
                  {&RunTexts::model, "num_layers", &shape.layers},
                  {&RunTexts::model, "num_attention_heads", &shape.heads},
                  {&RunTexts::model, "num_experts", &shape.experts},
                  {&RunTexts::model, "moe_ffn_hidden_size", &shape.width},
                  {&RunTexts::trainer, "moe_router_topk", &shape.top_k},
                  {&RunTexts::numerics, "seq_length", &shape.positions}};
  for (const auto& [section, key, field] : integers) {
    const auto text = TextOf((run.*section)(), key);
    if (!text.has_value() || !absl::SimpleAtoi(*text, field) || *field < 1) return Absent(key);
  }
  const struct {
    const char* key;
    double* field;
  } reals[] = {{"rotary_base", &shape.rotary_base},
               {"norm_epsilon", &shape.norm_epsilon},
               {"init_std", &shape.init_std}};
  for (const auto& [key, field] : reals) {
    const auto text = TextOf(run.model(), key);
    if (!text.has_value()) return Absent(key);
    *field = std::strtod(text->c_str(), nullptr);
    if (!(*field > 0) || !std::isfinite(*field)) return Absent(key);
  }
  return shape;
}

// The shortest decimal number that is this float: 1e-05, not 9.999999747378752e-06.
double Shortest(double value) {
  char text[64];
  const auto end = std::to_chars(text, text + sizeof(text) - 1, static_cast<float>(value)).ptr;
  *end = '\0';
  return std::strtod(text, nullptr);
}

Json MixtralConfig(const Shape& shape) {
  return {{"architectures", {"MixtralForCausalLM"}},
          {"model_type", "mixtral"},
          {"vocab_size", shape.vocab},
          {"hidden_size", shape.hidden},
          {"intermediate_size", shape.width},
          {"num_hidden_layers", shape.layers},
          {"num_attention_heads", shape.heads},
          {"num_key_value_heads", shape.heads},
          {"head_dim", shape.hidden / shape.heads},
          {"num_local_experts", shape.experts},
          {"num_experts_per_tok", shape.top_k},
          {"max_position_embeddings", shape.positions},
          {"rope_theta", Shortest(shape.rotary_base)},
          {"rms_norm_eps", Shortest(shape.norm_epsilon)},
          {"initializer_range", shape.init_std},
          {"hidden_act", "silu"},
          {"attention_dropout", 0.0},
          {"sliding_window", nullptr},
          {"tie_word_embeddings", false},
          {"bos_token_id", nullptr},
          {"eos_token_id", nullptr}};
}

// A family of models. Tensors are those of moe::lm::Transformer.
struct Format {
  const char* name;
  std::vector<Requirement> requirements;
  std::vector<std::pair<std::string, std::string>> renamed;  // parts of names of tensors
  Json (*config)(const Shape& shape);
};

const std::vector<Format>& Formats() {
  static const auto* const formats = new std::vector<Format>{
      {.name = "mixtral",
       .requirements =
           {{&RunTexts::model,
             "router",
             "--router",
             {"mixtral", "qwen3", "topk"},
             "mixtral, qwen3 or topk"},
            {&RunTexts::model, "moe_layer_freq", "--moe-layer-freq", {"1"}, "1"},
            {&RunTexts::model, "activation", "--activation", {"0"}, "swiglu", true},
            {&RunTexts::model, "moe_projection_biases", "--moe-projection-biases", {"0"}, "0"},
            {&RunTexts::model,
             "moe_shared_expert_intermediate_size",
             "--moe-shared-expert-intermediate-size",
             {"0"},
             "0"},
            {&RunTexts::trainer, "num_zero_experts", "--num-zero-experts", {"0"}, "0"},
            {&RunTexts::trainer,
             "moe_router_score_function",
             "--moe-router-score-function",
             {"0"},
             "softmax",
             true},
            {&RunTexts::trainer, "moe_router_pre_softmax", "--moe-router-pre-softmax", {"0"}, "0"},
            {&RunTexts::trainer, "moe_router_num_groups", "--moe-router-num-groups", {"0"}, "0"},
            {&RunTexts::trainer,
             "moe_router_topk_scaling_factor",
             "--moe-router-topk-scaling-factor",
             {"0x1p+0"},
             "1"},
            {&RunTexts::trainer,
             "moe_router_enable_expert_bias",
             "--moe-router-enable-expert-bias",
             {"0"},
             "0"},
            {&RunTexts::trainer, "norm_topk_prob", "norm_topk_prob", {"-1", "1"}, "1"},
            {&RunTexts::trainer,
             "norm_epsilon",
             "the router's norm_epsilon",
             {"-0x1p+0", "0x0p+0"},
             "0"}},
       .renamed = {{".mlp.", ".block_sparse_moe."},
                   {".gate_proj.", ".w1."},
                   {".down_proj.", ".w2."},
                   {".up_proj.", ".w3."}},
       .config = MixtralConfig}};
  return *formats;
}

struct Tensor {
  const ManifestTensor* source;
  SafetensorsEntry entry;
};

absl::Status Damaged(const CheckpointReader& reader, absl::string_view reason) {
  return WithFileFault(absl::DataLossError(absl::StrCat("STEP: ", reader.path(), ": ", reason)),
                       FileFault::kContent);
}

// Every tensor of the model in its order, under its canonical name.
absl::StatusOr<std::vector<Tensor>> TensorsOf(const CheckpointReader& reader, const Shape& shape) {
  std::map<std::string, const ManifestTensor*> left;
  for (const ManifestTensor& tensor : reader.manifest().tensors) {
    const auto& states = tensor.states;
    if (std::find(states.begin(), states.end(), "master") != states.end()) {
      left[tensor.name] = &tensor;
    }
  }
  std::vector<Tensor> tensors;
  absl::Status status;
  // rows = 0: a vector. False at the first that is not there, which bounds what a manifest can ask.
  const auto add = [&](const std::string& name, int64_t rows, int64_t cols) {
    const auto found = left.find(name);
    const ManifestTensor* const source = found == left.end() ? nullptr : found->second;
    if (source == nullptr || source->type != SafetensorsType::kF32 ||
        source->rows != std::max<int64_t>(rows, 1) || source->cols != cols) {
      status = Damaged(reader, absl::StrCat("no weights '", name, "' of shape [", rows, ", ", cols,
                                            "], which its settings ask for"));
      return false;
    }
    left.erase(found);
    SafetensorsEntry entry = {.name = name, .shape = {rows, cols}};
    if (rows == 0) entry.shape = {cols};
    tensors.push_back({.source = source, .entry = std::move(entry)});
    return true;
  };
  const auto add_layer = [&](const std::string& prefix) {
    if (!add(prefix + "input_layernorm.weight", 0, shape.hidden)) return false;
    for (const char* const name : {"q_proj", "k_proj", "v_proj", "o_proj"}) {
      if (!add(absl::StrCat(prefix, "self_attn.", name, ".weight"), shape.hidden, shape.hidden)) {
        return false;
      }
    }
    if (!add(prefix + "post_attention_layernorm.weight", 0, shape.hidden) ||
        !add(prefix + "mlp.gate.weight", shape.experts, shape.hidden)) {
      return false;
    }
    for (int64_t e = 0; e < shape.experts; ++e) {
      const std::string expert = absl::StrCat(prefix, "mlp.experts.", e, ".");
      if (!add(expert + "gate_proj.weight", shape.width, shape.hidden) ||
          !add(expert + "up_proj.weight", shape.width, shape.hidden) ||
          !add(expert + "down_proj.weight", shape.hidden, shape.width)) {
        return false;
      }
    }
    return true;
  };
  bool complete = add("model.embed_tokens.weight", shape.vocab, shape.hidden);
  for (int64_t l = 0; complete && l < shape.layers; ++l) {
    complete = add_layer(absl::StrCat("model.layers.", l, "."));
  }
  if (!complete || !add("model.norm.weight", 0, shape.hidden) ||
      !add("lm_head.weight", shape.vocab, shape.hidden)) {
    return status;
  }
  if (left.empty()) return tensors;
  return Damaged(reader, absl::StrCat("weights '", left.begin()->first,
                                      "', which its settings do not ask for"));
}

constexpr SafetensorsType TypeOf(DType type) {
  if (type == DType::kBFloat16) return SafetensorsType::kBF16;
  return type == DType::kFloat16 ? SafetensorsType::kF16 : SafetensorsType::kF32;
}

absl::Status Wrote(const absl::Status& status) {
  if (status.ok() || absl::IsResourceExhausted(status)) return status;
  return WithFileFault(absl::Status(status.code(), absl::StrCat("--out: ", status.message())),
                       FileFault::kWrite);
}

template <typename T>
absl::Status AppendTensor(CheckpointReader& reader, const ManifestTensor& tensor,
                          SafetensorsStream& stream) {
  std::vector<float> master;
  std::vector<T> rounded;
  for (const TensorBox& box : PiecesOf(tensor)) {
    master.resize(box.rows() * box.cols());
    const absl::Status read = reader.ReadBox(
        tensor.name, "master", box, MatrixView<float>(master.data(), box.rows(), box.cols()));
    if (!read.ok()) return Damaged(reader, read.message());
    rounded.clear();
    for (const float value : master) {
      rounded.push_back(T(value));
      if (std::isfinite(value) && !std::isfinite(static_cast<float>(rounded.back()))) {
        return absl::InvalidArgumentError(absl::StrCat(
            "'", tensor.name, "' has the weight ", value,
            ", expected --dtype f32: ", NameOf(DTypeOf<T>::value), " has none so large"));
      }
    }
    MOE_RETURN_IF_ERROR(Wrote(stream.Append(BytesOf<T>(rounded))));
  }
  return absl::OkStatus();
}

absl::Status WriteShard(CheckpointReader& reader, absl::Span<const Tensor> tensors,
                        const std::string& path, DType type) {
  std::vector<SafetensorsEntry> entries;
  for (const Tensor& tensor : tensors) entries.push_back(tensor.entry);
  auto stream = SafetensorsStream::Create(path, entries, {{"format", "pt"}});
  MOE_RETURN_IF_ERROR(Wrote(stream.status()));
  for (const Tensor& tensor : tensors) {
    MOE_RETURN_IF_ERROR(WithStorageType(type, [&](auto element) {
      return AppendTensor<decltype(element)>(reader, *tensor.source, *stream);
    }));
  }
  return Wrote(stream->Commit());
}

absl::Status WriteJson(const std::string& path, const Json& document) {
  auto file = WholeFile::Create(path);
  MOE_RETURN_IF_ERROR(Wrote(file.status()));
  MOE_RETURN_IF_ERROR(Wrote(file->Append(document.dump(2) + "\n")));
  return Wrote(file->Commit());
}

// Ends of the shards, as indices of `tensors`.
std::vector<size_t> ShardEnds(absl::Span<const Tensor> tensors, int64_t max_bytes) {
  std::vector<size_t> ends;
  size_t first = 0;
  int64_t bytes = 0;
  for (size_t i = 0; i < tensors.size(); ++i) {
    const int64_t more = tensors[i].entry.size_bytes;
    if (i > first &&
        (bytes + more > max_bytes || static_cast<int64_t>(i - first) == kMaxSafetensorsTensors)) {
      ends.push_back(i);
      first = i;
      bytes = 0;
    }
    bytes += more;
  }
  ends.push_back(tensors.size());
  return ends;
}

// config.json comes last: what has none is no model. Adds every path before it is written.
absl::Status WriteModel(CheckpointReader& reader, const ExportOptions& options, const Json& config,
                        absl::Span<const Tensor> tensors, std::vector<std::string>& paths) {
  const auto path_of = [&](absl::string_view name) {
    return paths.emplace_back(absl::StrCat(options.folder, "/", name));
  };
  const std::vector<size_t> ends = ShardEnds(tensors, options.max_shard_bytes);
  Json map = Json::object();
  int64_t bytes = 0;
  size_t first = 0;
  for (size_t shard = 0; shard < ends.size(); ++shard) {
    const std::string name = ends.size() == 1 ? "model.safetensors"
                                              : absl::StrFormat("model-%05d-of-%05d.safetensors",
                                                                shard + 1, ends.size());
    for (size_t i = first; i < ends[shard]; ++i) {
      map[tensors[i].entry.name] = name;
      bytes += tensors[i].entry.size_bytes;
    }
    MOE_RETURN_IF_ERROR(WriteShard(reader, tensors.subspan(first, ends[shard] - first),
                                   path_of(name), options.type));
    first = ends[shard];
  }
  if (ends.size() > 1) {
    MOE_RETURN_IF_ERROR(WriteJson(path_of("model.safetensors.index.json"),
                                  {{"metadata", {{"total_size", bytes}}}, {"weight_map", map}}));
  }
  MOE_RETURN_IF_ERROR(WriteJson(path_of("generation_config.json"), {{"_from_model_config", true}}));
  return WriteJson(path_of("config.json"), config);
}

absl::Status MakeEmptyFolder(const std::string& folder) {
  std::error_code error;
  if (fs::exists(folder, error) &&
      (!fs::is_directory(folder, error) || !fs::is_empty(folder, error))) {
    return absl::InvalidArgumentError(absl::StrCat(
        "--out is '", folder, "', expected an empty folder, or one that is not there"));
  }
  error.clear();
  fs::create_directories(folder, error);
  if (!error) return absl::OkStatus();
  return Wrote(absl::UnavailableError(absl::StrCat(folder, ": ", error.message())));
}

}  // namespace

std::vector<std::string> ExportFormats() {
  std::vector<std::string> names;
  for (const Format& format : Formats()) names.emplace_back(format.name);
  return names;
}

absl::StatusOr<std::vector<std::string>> Export(CheckpointReader& reader,
                                                const ExportOptions& options) {
  const auto format = std::find_if(Formats().begin(), Formats().end(),
                                   [&](const Format& one) { return one.name == options.format; });
  if (format == Formats().end()) {
    return absl::InvalidArgumentError(absl::StrCat("no format '", options.format, "'"));
  }
  const RunTexts run(reader.manifest().sections);
  for (const Requirement& requirement : format->requirements) {
    MOE_RETURN_IF_ERROR(Check(requirement, run, options.format));
  }
  MOE_ASSIGN_OR_RETURN(const Shape shape, ShapeOf(run));
  MOE_ASSIGN_OR_RETURN(std::vector<Tensor> tensors, TensorsOf(reader, shape));
  for (Tensor& tensor : tensors) {
    SafetensorsEntry& entry = tensor.entry;
    entry.name = absl::StrReplaceAll(entry.name, format->renamed);
    entry.type = TypeOf(options.type);
    entry.size_bytes = tensor.source->rows * tensor.source->cols * SizeOf(options.type);
  }
  Json config = format->config(shape);
  config["dtype"] = options.type == DType::kBFloat16  ? "bfloat16"
                    : options.type == DType::kFloat16 ? "float16"
                                                      : "float32";
  std::vector<std::string> warnings;
  const auto capacity = TextOf(run.trainer(), "moe_expert_capacity_factor");
  if (capacity.has_value() && std::strtod(capacity->c_str(), nullptr) > 0) {
    warnings.push_back(absl::StrCat("the run dropped tokens beyond --moe-expert-capacity-factor ",
                                    std::strtod(capacity->c_str(), nullptr), ", ", options.format,
                                    " drops none"));
  }
  MOE_RETURN_IF_ERROR(MakeEmptyFolder(options.folder));
  std::vector<std::string> paths;
  const absl::Status status = WriteModel(reader, options, config, tensors, paths);
  if (status.ok()) return warnings;
  std::error_code ignored;
  for (const std::string& path : paths) fs::remove(path, ignored);
  return status;
}

}  // namespace moe::ckpt
