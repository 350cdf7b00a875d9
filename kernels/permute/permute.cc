#include "kernels/permute/permute.h"

#include <algorithm>
#include <cstring>

#include <absl/container/inlined_vector.h>
#include <absl/strings/string_view.h>

#include "kernels/base/highway_targets.h"
#include "kernels/base/parallel.h"
#include "kernels/base/run_op.h"
#include "kernels/base/status_macros.h"
#include "kernels/permute/permute_op.h"
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/permute/permute.cc"
#include <hwy/foreach_target.h>
// After foreach_target.h.
#include "kernels/base/simd-inl.h"

HWY_BEFORE_NAMESPACE();
namespace moe::permute {
namespace HWY_NAMESPACE {
namespace {

using namespace moe::HWY_NAMESPACE;  // NOLINT(google-build-using-namespace): this target's lanes

// to[h] = T(scale * from[h]) for h in [0, n).
template <typename T>
void ScaleRow(const T* from, float scale, T* to, int64_t n) {
  const FloatLanes factor = hn::Set(FloatTag(), scale);
  ForLanes(n, [&](int64_t h, auto lanes)
                  MOE_LANES { lanes.Store(hn::Mul(factor, lanes.Load(from + h)), to + h); });
}

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace moe::permute
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace moe::permute {
namespace {

// Rows a range, about 64 KiB: long enough to hide the hand-off, short enough to balance.
int64_t Grain(size_t row_bytes) {
  return std::max<int64_t>(1, (int64_t{64} << 10) / static_cast<int64_t>(row_bytes));
}

// scale: one factor, or nullptr.
template <typename T>
void CopyRow(const T* from, const float* scale, T* to, int64_t n) {
  if (scale == nullptr) {
    std::memcpy(to, from, n * sizeof(T));
  } else {
    MOE_SIMD(ScaleRow<T>)(from, *scale, to, n);
  }
}

// Calls source(i), row i of the gathered rows, for the rows that are not zero.
template <typename T, typename Source>
void GatherEach(const int32_t* source_row, const float* scale, MatrixView<T> out,
                ThreadPool& threads, Source source) {
  const int64_t hidden = out.cols();
  if (hidden == 0) return;
  threads.For(out.rows(), Grain(hidden * sizeof(T)), [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      if (source_row[i] < 0) {
        std::fill_n(out.row(i), hidden, T(0.0f));
      } else {
        CopyRow(source(i), scale == nullptr ? nullptr : scale + i, out.row(i), hidden);
      }
    }
  });
}

}  // namespace

template <typename T>
void Run(const Gather<T>& gather, ThreadPool& threads) {
  GatherEach(gather.source_row, gather.scale, gather.out, threads,
             [&](int64_t i) { return gather.in.row(gather.source_row[i]); });
}

template <typename T>
void Run(const Copy<T>& copy, ThreadPool& threads) {
  const int64_t cols = copy.out.cols();
  if (cols == 0) return;
  threads.For(copy.out.rows(), Grain(cols * sizeof(T)), [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      CopyRow(copy.in.row(i), nullptr, copy.out.row(i), cols);
    }
  });
}

template <typename T>
void Run(const TokenGather<T>& gather, ThreadPool& threads) {
  const int64_t hidden = gather.out.cols(), tokens = gather.in.rows(), rows = gather.out.rows();
  if (hidden == 0) return;
  const int64_t grain = Grain(hidden * sizeof(T));
  const int64_t slots_each = std::max<int64_t>(1, rows / std::max<int64_t>(1, tokens));
  threads.For(tokens, std::max<int64_t>(1, grain / slots_each), [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      for (int64_t s = gather.slot_offset[t]; s < gather.slot_offset[t + 1]; ++s) {
        const int64_t row = gather.RowOf(s);
        if (!gather.Has(row)) continue;
        CopyRow(gather.in.row(t), gather.weight == nullptr ? nullptr : gather.weight + s,
                gather.out.row(row), hidden);
      }
    }
  });
  threads.For(rows, grain, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      if (gather.token_of_row[i] < 0) std::fill_n(gather.out.row(i), hidden, T(0.0f));
    }
  });
}

template <typename T>
void Run(const GatherOfMany<T>& gather, ThreadPool& threads) {
  GatherEach(gather.source_row, gather.scale, gather.out, threads, [&](int64_t i) {
    return gather.views[gather.source_view[i]].row(gather.source_row[i]);
  });
}

template <typename T>
void Reference(const GatherOfMany<T>& gather) {
  for (int64_t i = 0; i < gather.out.rows(); ++i) {
    const int32_t row = gather.source_row[i];
    for (int64_t h = 0; h < gather.out.cols(); ++h) {
      T value = T(0.0f);
      if (row >= 0) value = gather.views[gather.source_view[i]](row, h);
      if (row >= 0 && gather.scale != nullptr) {
        value = T(gather.scale[i] * static_cast<float>(value));
      }
      gather.out(i, h) = value;
    }
  }
}

}  // namespace moe::permute

namespace moe {
namespace {

template <typename T>
absl::Status CheckGather(absl::string_view function, MatrixView<const T> in,
                         absl::Span<const int32_t> source_row, MatrixView<T> out) {
  MOE_RETURN_IF_ERROR(CheckShape(function, "in", in, in.rows(), out.cols()));
  MOE_RETURN_IF_ERROR(CheckShape(function, "out", out, out.rows(), out.cols()));
  return CheckLength(function, "source_row", source_row.size(), out.rows());
}

}  // namespace

template <typename T>
absl::Status GatherRows(MatrixView<const T> in, absl::Span<const int32_t> source_row,
                        MatrixView<T> out, Stream& stream) {
  constexpr char kName[] = "GatherRows";
  MOE_RETURN_IF_ERROR(CheckGather(kName, in, source_row, out));
  return RunOp(kName, permute::Gather<T>{.in = in, .source_row = source_row.data(), .out = out},
               stream);
}

template <typename T>
absl::Status GatherScaledRows(MatrixView<const T> in, absl::Span<const int32_t> source_row,
                              absl::Span<const float> scale, MatrixView<T> out, Stream& stream) {
  constexpr char kName[] = "GatherScaledRows";
  MOE_RETURN_IF_ERROR(CheckGather(kName, in, source_row, out));
  MOE_RETURN_IF_ERROR(CheckLength(kName, "scale", scale.size(), out.rows()));
  return RunOp(kName, permute::Gather<T>{in, source_row.data(), scale.data(), out}, stream);
}

template <typename T>
absl::Status CopyRows(MatrixView<const T> in, MatrixView<T> out, Stream& stream) {
  MOE_RETURN_IF_ERROR(CheckShape("CopyRows", "in", in, out.rows(), out.cols()));
  MOE_RETURN_IF_ERROR(CheckShape("CopyRows", "out", out, out.rows(), out.cols()));
  return RunOp("CopyRows", permute::Copy<T>{.in = in, .out = out}, stream);
}

template <typename T>
absl::Status GatherTokens(MatrixView<const T> in, const TokenRows& rows,
                          absl::Span<const float> weight, MatrixView<T> out, Stream& stream) {
  constexpr char kName[] = "GatherTokens";
  MOE_RETURN_IF_ERROR(CheckGather(kName, in, rows.token_of_row, out));
  if (in.rows() > 0 || !rows.slot_offset.empty()) {  // without tokens they may be empty
    MOE_RETURN_IF_ERROR(CheckLength(kName, "slot_offset", rows.slot_offset.size(), in.rows() + 1));
  }
  const auto slots = static_cast<int64_t>(rows.row_of_slot.size());
  if (!IsCuda(stream) && !rows.slot_offset.empty()) {
    MOE_RETURN_IF_ERROR(CheckLength(kName, "row_of_slot", slots, rows.slot_offset.back()));
  }
  if (!weight.empty()) MOE_RETURN_IF_ERROR(CheckLength(kName, "weight", weight.size(), slots));
  return RunOp(kName,
               permute::TokenGather<T>{.in = in,
                                       .slot_offset = rows.slot_offset.data(),
                                       .row_of_slot = rows.row_of_slot.data(),
                                       .token_of_row = rows.token_of_row.data(),
                                       .first_row = rows.first_row,
                                       .weight = weight.empty() ? nullptr : weight.data(),
                                       .out = out},
               stream);
}

template <typename T>
absl::Status GatherRowsOfMany(absl::Span<const MatrixView<const T>> in,
                              absl::Span<const int32_t> source_view,
                              absl::Span<const int32_t> source_row, absl::Span<const float> scale,
                              MatrixView<T> out, Stream& stream) {
  constexpr char kName[] = "GatherRowsOfMany";
  if (in.empty()) return absl::InvalidArgumentError("GatherRowsOfMany: no source, expected >= 1");
  for (const MatrixView<const T>& view : in) {
    MOE_RETURN_IF_ERROR(CheckGather(kName, view, source_row, out));
  }
  MOE_RETURN_IF_ERROR(CheckLength(kName, "source_view", source_view.size(), out.rows()));
  if (!scale.empty()) MOE_RETURN_IF_ERROR(CheckLength(kName, "scale", scale.size(), out.rows()));
  const permute::GatherOfMany<T> gather = {.views = in.data(),
                                           .view_count = static_cast<int64_t>(in.size()),
                                           .source_view = source_view.data(),
                                           .source_row = source_row.data(),
                                           .scale = scale.empty() ? nullptr : scale.data(),
                                           .out = out};
  if (IsCuda(stream)) {
    return LaunchOn(kName, stream, [&](auto cuda) { return permute::Run(gather, cuda); });
  }
  // The task holds copies of the views, since the span may be gone when it runs.
  const absl::InlinedVector<MatrixView<const T>, 8> views(in.begin(), in.end());
  return stream.Enqueue([views, gather, &threads = stream.threads()] {
    permute::GatherOfMany<T> kept = gather;
    kept.views = views.data();
    permute::Run(kept, threads);
    return absl::OkStatus();
  });
}

MOE_INSTANTIATE_FOR_STORAGE(permute::Reference)
MOE_INSTANTIATE_FOR_STORAGE(GatherRows)
MOE_INSTANTIATE_FOR_STORAGE(GatherScaledRows)
MOE_INSTANTIATE_FOR_STORAGE(CopyRows)
MOE_INSTANTIATE_FOR_STORAGE(GatherTokens)
MOE_INSTANTIATE_FOR_STORAGE(GatherRowsOfMany)

}  // namespace moe
#endif  // HWY_ONCE
