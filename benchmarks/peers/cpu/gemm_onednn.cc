// Grouped products by oneDNN's matmul, one expert after the other, for benchmarks/gemm_table.py.
// Weights are packed and primitives created before the measurement.
#include <memory>
#include <unordered_map>

#include <oneapi/dnnl/dnnl.hpp>

#include "benchmarks/peers/cpu/gemm_peer.h"

namespace moe::peers {
namespace {

using dnnl::matmul;
using dnnl::memory;

constexpr auto kPlain = memory::format_tag::ab;
constexpr auto kTransposed = memory::format_tag::ba;

memory::desc Of(int64_t rows, int64_t columns, memory::data_type type, memory::format_tag tag) {
  return {{rows, columns}, type, tag};
}

// `size` elements from expert e on.
void* At(std::vector<float>& f32, std::vector<uint16_t>& bf16, bool is_f32, int64_t at) {
  return is_f32 ? static_cast<void*>(&f32[at]) : &bf16[at];
}

std::function<void()> Products(Problem& p) {
  const dnnl::engine engine(dnnl::engine::kind::cpu, 0);
  dnnl::stream stream(engine);
  const auto type = p.bf16 ? memory::data_type::bf16 : memory::data_type::f32;
  const auto a = Of(p.m, p.k, type, p.a_transposed ? kTransposed : kPlain);
  const auto b = Of(p.k, p.n, type, p.b_transposed ? kTransposed : kPlain);
  const auto c = Of(p.m, p.n, p.c_is_f32 ? memory::data_type::f32 : type, kPlain);
  const auto any = Of(p.k, p.n, type, memory::format_tag::any);
  const matmul::primitive_desc chosen({a, p.b_is_weight ? any : b, c}, engine);
  auto experts = std::make_shared<std::vector<std::unordered_map<int, memory>>>();
  for (int64_t e = 0; e < p.experts; ++e) {
    const memory given(b, engine, At(p.b, p.b16, !p.bf16, e * p.k * p.n));
    memory packed = given;
    if (chosen.weights_desc() != b) {
      packed = memory(chosen.weights_desc(), engine);
      dnnl::reorder(given, packed).execute(stream, const_cast<memory&>(given), packed);
    }
    experts->push_back(
        {{DNNL_ARG_SRC, memory(a, engine, At(p.a, p.a16, !p.bf16, e * p.m * p.k))},
         {DNNL_ARG_WEIGHTS, packed},
         {DNNL_ARG_DST, memory(c, engine, At(p.c, p.c16, p.c_is_f32, e * p.m * p.n))}});
  }
  stream.wait();
  return [product = matmul(chosen), stream, experts]() mutable {
    for (const auto& operands : *experts) product.execute(stream, operands);
    stream.wait();
  };
}

}  // namespace
}  // namespace moe::peers

int main() {
  return moe::peers::Serve(moe::peers::Products);
}
