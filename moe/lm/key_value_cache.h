// The keys and values of the tokens of one sequence so far.
#ifndef MOE_MOE_LM_KEY_VALUE_CACHE_H_
#define MOE_MOE_LM_KEY_VALUE_CACHE_H_

#include <cstdint>

#include <absl/status/statusor.h>

#include "kernels/base/buffer.h"
#include "kernels/base/status_macros.h"
#include "kernels/base/tensor_view.h"
#include "moe/lm/transformer_config.h"
#include "moe/tensor/tensor_share.h"

namespace moe::lm {

// Keys and values of every layer, in the model's storage type, on the CPU: 2 layers kv_heads D
// capacity elements, kv_heads those of this rank. Move-only.
template <typename T>
class KeyValueCache {
 public:
  // Room for `capacity` tokens. kResourceExhausted.
  static absl::StatusOr<KeyValueCache> Create(const TransformerConfig& config, int64_t capacity,
                                              const TensorShare& share = {}) {
    KeyValueCache cache;
    const TreeNode heads = share.ItemsOf(config.key_value_heads());
    cache.width_ = int64_t{heads.last - heads.first} * config.head_dim();
    cache.capacity_ = capacity;
    MOE_ASSIGN_OR_RETURN(cache.memory_,
                         Buffer::Allocate(int64_t{2} * config.num_layers * capacity * cache.width_ *
                                              static_cast<int64_t>(sizeof(T)),
                                          CpuMemory(), "KeyValueCache"));
    return cache;
  }

  int64_t capacity() const { return capacity_; }
  int64_t size() const { return size_; }  // tokens
  void Grow(int64_t tokens) { size_ += tokens; }
  // The first `rows` keys or values of a layer, [rows, kv_heads * D].
  MatrixView<T> keys(int layer, int64_t rows) { return Part(2 * layer, rows); }
  MatrixView<T> values(int layer, int64_t rows) { return Part(2 * layer + 1, rows); }

 private:
  MatrixView<T> Part(int part, int64_t rows) {
    return {memory_.template span<T>().data() + part * capacity_ * width_, rows, width_};
  }

  Buffer memory_;
  int64_t width_ = 0, capacity_ = 0, size_ = 0;
};

}  // namespace moe::lm

#endif  // MOE_MOE_LM_KEY_VALUE_CACHE_H_
