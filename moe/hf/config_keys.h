// Typed and checked reading of the keys of an untrusted config.json.
// Not installed: users of the package need no nlohmann-json.
#ifndef MOE_MOE_HF_CONFIG_KEYS_H_
#define MOE_MOE_HF_CONFIG_KEYS_H_

#include <cstdint>
#include <functional>
#include <optional>
#include <set>
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

// A key, and an alternative spelling that takes precedence if both are present: transformers'
// configuration classes set fields first, then the names that alias them (attribute_map). Without a
// name there is no such key.
struct Key {
  constexpr Key() = default;
  // NOLINTNEXTLINE(google-explicit-constructor): most keys have one spelling
  constexpr Key(const char* field, const char* other = nullptr) : name(field), alias(other) {}
  const char* name = nullptr;
  const char* alias = nullptr;
  bool per_layer = false;  // may also be a list with one value for each layer
};

// Reads the object of a config.json. The first error is kept in status() and later calls return
// some valid value, so that callers read all keys and check the status once. Wrong values are
// kDataLoss, settings that this library does not implement are kUnimplemented; both name file, key,
// value and what was expected.
class ConfigKeys {
 public:
  // `object` must outlive this. `path` precedes names of keys in messages: "", "text_config.".
  ConfigKeys(std::string file, std::string path, const nlohmann::json& object)
      : file_(std::move(file)), path_(std::move(path)), object_(object) {}

  // The value; `fallback` if the key is absent, an error if there is no fallback. A list with one
  // value for each layer must repeat one number, which is returned; kUnimplemented for different
  // ones.
  int64_t Integer(Key key, std::optional<int64_t> fallback, IntegerRange range);
  int32_t Integer32(Key key, std::optional<int64_t> fallback, IntegerRange range) {
    return static_cast<int32_t>(Integer(key, fallback, range));
  }
  bool Bool(Key key, bool fallback);
  double Real(Key key, double fallback);  // finite
  std::string Text(const char* key, absl::string_view fallback);
  // nullopt if the key is absent or null.
  std::optional<std::vector<int64_t>> Integers(const char* key, IntegerRange range);
  // The number, or the numbers of a list; empty if the key is null, `fallback` if it is absent.
  std::vector<int32_t> OneOrMore(const char* key, std::vector<int32_t> fallback);
  // As Integers, for texts that must each be one of `words`.
  std::optional<std::vector<std::string>> Texts(const char* key,
                                                absl::Span<const absl::string_view> words);
  bool IsNull(const char* key) const;  // absent counts as null
  // Keys of the object that no call has asked for, in the order of their names.
  std::vector<std::string> Unread() const;
  bool empty() const;
  // the one that is present and takes precedence; if none is, the name
  const char* Spelling(Key key) const;
  // The keys of a nested object, which must be present; Take adopts its first error.
  ConfigKeys Object(const char* key);
  void Take(const ConfigKeys& inner) { Fail(inner.status()); }

  // kUnimplemented: `key` is `value`, which is valid but not implemented here.
  void Unsupported(const char* key, absl::string_view value, absl::string_view expected);
  // The same if the key is present and neither null nor false.
  void RefuseIfSet(const char* key, absl::string_view expected);

  const absl::Status& status() const { return status_; }

 private:
  const nlohmann::json* Find(const char* key) const;  // nullptr: absent
  // The number that all elements of a list equal; the list itself if they differ.
  const nlohmann::json* OneOf(const char* key, const nlohmann::json& list);
  void Wrong(const char* key, const nlohmann::json& value, absl::string_view expected);
  void Fail(absl::Status status);

  const std::string file_, path_;
  const nlohmann::json& object_;
  absl::Status status_;
  mutable std::set<std::string, std::less<>> asked_;
};

}  // namespace moe::hf

#endif  // MOE_MOE_HF_CONFIG_KEYS_H_
