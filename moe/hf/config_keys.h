// Typed and checked reading of the keys of an untrusted config.json.
// Not installed: users of the package need no nlohmann-json.
#ifndef MOE_MOE_HF_CONFIG_KEYS_H_
#define MOE_MOE_HF_CONFIG_KEYS_H_

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include <absl/status/status.h>
#include <absl/strings/string_view.h>
#include <absl/types/span.h>

#include <nlohmann/json_fwd.hpp>

namespace moe::hf {

struct IntegerRange {
  int64_t least = 0;
  int64_t most = 0;
};
// Far above every published model, and small enough that products of four of them fit in int64.
inline constexpr IntegerRange kWidths = {1, int64_t{1} << 20};   // H, F
inline constexpr IntegerRange kExperts = {1, int64_t{1} << 12};  // E, K, groups, shared experts
inline constexpr IntegerRange kLayers = {1, int64_t{1} << 16};

// A key, and another spelling of it, which counts where both are there: the fields of transformers'
// configuration classes are set first, then what stands for one (attribute_map). No name: no such
// key.
struct Key {
  constexpr Key() = default;
  // NOLINTNEXTLINE(google-explicit-constructor): most keys have one spelling
  constexpr Key(const char* field, const char* other = nullptr) : name(field), alias(other) {}
  const char* name = nullptr;
  const char* alias = nullptr;
  bool per_layer = false;  // also a list, one for each layer
};

// The object of a config.json. The first error stays in status() and later calls return something
// valid, so that a reader takes all keys and looks at the status once. Wrong values are kDataLoss,
// settings that this library does not compute are kUnimplemented; both name file, key, value and
// what was expected.
class ConfigKeys {
 public:
  // `object` must outlive this. `path` goes before names of keys in messages: "", "text_config.".
  ConfigKeys(std::string file, std::string path, const nlohmann::json& object)
      : file_(std::move(file)), path_(std::move(path)), object_(object) {}

  // The value; `fallback` if the key is absent, an error if it is absent without a fallback. Of a
  // list, one for each layer, the one number in it; kUnimplemented where there are several.
  int64_t Integer(Key key, std::optional<int64_t> fallback, IntegerRange range);
  int32_t Integer32(Key key, std::optional<int64_t> fallback, IntegerRange range) {
    return static_cast<int32_t>(Integer(key, fallback, range));
  }
  bool Bool(Key key, bool fallback);
  double Real(Key key, double fallback);  // finite
  std::string Text(const char* key, absl::string_view fallback);
  // Nothing if the key is absent or null.
  std::optional<std::vector<int64_t>> Integers(const char* key, IntegerRange range);
  // The number, or the numbers of a list; none if the key is null, `fallback` if it is absent.
  std::vector<int32_t> OneOrMore(const char* key, std::vector<int32_t> fallback);
  // As Integers, of texts that are each one of `words`.
  std::optional<std::vector<std::string>> Texts(const char* key,
                                                absl::Span<const absl::string_view> words);
  bool IsNull(const char* key) const;  // absent counts as null
  bool empty() const;
  const char* Spelling(Key key) const;  // the one that counts; none is there: the name
  // The keys of an object within, which is there; Take brings its first error here.
  ConfigKeys Object(const char* key);
  void Take(const ConfigKeys& inner) { Fail(inner.status()); }

  // kUnimplemented: `key` is `value`, which is valid but nothing that is computed here.
  void Unsupported(const char* key, absl::string_view value, absl::string_view expected);
  // The same if the key is there and is neither null nor false.
  void RefuseIfSet(const char* key, absl::string_view expected);

  const absl::Status& status() const { return status_; }

 private:
  const nlohmann::json* Find(const char* key) const;  // nullptr: absent
  // The number that all elements of a list are; the list itself where there is none.
  const nlohmann::json* OneOf(const char* key, const nlohmann::json& list);
  void Wrong(const char* key, const nlohmann::json& value, absl::string_view expected);
  void Fail(absl::Status status);

  const std::string file_, path_;
  const nlohmann::json& object_;
  absl::Status status_;
};

}  // namespace moe::hf

#endif  // MOE_MOE_HF_CONFIG_KEYS_H_
