#include "comm/copy.h"

#include <cstddef>
#include <cstring>

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

namespace moe {
namespace {

#if defined(__SSE2__)
// Writes whole cache lines without reading them first, which saves a third of the memory traffic.
void StreamLines(std::byte* to, const std::byte* from, int64_t lines) {
  for (int64_t i = 0; i < lines; ++i, to += 64, from += 64) {
    const auto* in = reinterpret_cast<const __m128i*>(from);
    auto* out = reinterpret_cast<__m128i*>(to);
    const __m128i a = _mm_loadu_si128(in);
    const __m128i b = _mm_loadu_si128(in + 1);
    const __m128i c = _mm_loadu_si128(in + 2);
    const __m128i d = _mm_loadu_si128(in + 3);
    _mm_stream_si128(out, a);
    _mm_stream_si128(out + 1, b);
    _mm_stream_si128(out + 2, c);
    _mm_stream_si128(out + 3, d);
  }
  _mm_sfence();  // streaming stores are not ordered by the release that follows
}
#endif

}  // namespace

void CopyBytes(void* to, const void* from, int64_t n, CopyHint hint) {
  if (n == 0 || to == from) return;
  auto* out = static_cast<std::byte*>(to);
  const auto* in = static_cast<const std::byte*>(from);
#if defined(__SSE2__)
  if (hint == CopyHint::kStreamed && n >= 4096) {
    const auto head = static_cast<int64_t>(-reinterpret_cast<uintptr_t>(out) % 64);
    std::memcpy(out, in, static_cast<size_t>(head));
    const int64_t lines = (n - head) / 64;
    StreamLines(out + head, in + head, lines);
    const int64_t done = head + lines * 64;
    std::memcpy(out + done, in + done, static_cast<size_t>(n - done));
    return;
  }
#else
  (void)hint;
#endif
  std::memcpy(out, in, static_cast<size_t>(n));
}

}  // namespace moe
