// Rows of the layer benchmark for forms and tables.
#include <limits>

#include "moe/bench/layer_bench.h"

namespace moe::bench {

const char* NameOf(DispatchAlgorithm algorithm) {
  if (algorithm == DispatchAlgorithm::kDirect) return "direct";
  return algorithm == DispatchAlgorithm::kHierarchical ? "hierarchical" : "staged";
}

Fields LayerFields(const LayerResult& result, const LayerRow& row) {
  const LayerSpec& s = result.spec;
  const RouterConfig& router = s.layer.router;
  const LayerFigures& f = result.figures;
  Fields fields = {{"schema", "moe.bench.layer/1"},
                   {"op", "layer"},
                   {"pass", row.pass},
                   {"phase", row.phase},
                   {"dtype", moe::NameOf(s.dtype)},
                   {"tokens", s.tokens},
                   {"topk", int64_t{router.top_k}},
                   {"experts", int64_t{router.num_experts}},
                   {"hidden", router.hidden_size},
                   {"ffn", s.layer.ffn_hidden_size},
                   {"router", s.routing.has_value() ? Cell() : Cell(router.gate)},
                   {"routing", s.routing.has_value() ? Cell(s.routing->text) : Cell()},
                   {"capacity_factor",
                    router.capacity_factor.value_or(std::numeric_limits<double>::quiet_NaN())},
                   {"overlap_degree", int64_t{s.layer.overlap_degree}},
                   {"seed", s.seed},
                   {"dispatch", NameOf(s.layer.dispatcher.algorithm)},
                   {"backend", result.backend},
                   {"ranks", int64_t{result.ranks}},
                   {"expert_parallel_size", int64_t{s.expert_parallel_size}},
                   {"device", s.device == DeviceKind::kCuda ? "cuda" : "cpu"},
                   {"threads", int64_t{s.threads}}};
  AddTimes(row.time_us, f.iterations, fields);
  fields.insert(fields.end(), {{"share_pct", row.share_pct},
                               {"gflops_per_s", row.gflops_per_s},
                               {"step_us", f.step_us.p50},
                               {"tokens_per_s", f.tokens_per_s},
                               {"drop_fraction", f.drop_fraction},
                               {"max_vio", f.max_vio},
                               {"dead_experts", int64_t{f.dead_experts}},
                               {"peak_bytes", f.peak_bytes}});
  AddVerdict(row.wrong, "results differ from the first call's", fields);
  return fields;
}

absl::Span<const Column> LayerColumns() {
  static constexpr Column kColumns[] = {{"pass", "pass", "", -9},
                                        {"phase", "phase", "", -9},
                                        {"time_us", "time", "(us)", 9, 1},
                                        {"time_us_min", "i_min", "(us)", 9, 1},
                                        {"time_us_p99", "i_p99", "(us)", 9, 1},
                                        {"time_us_cv_pct", "i_cv%", "(%)", 8, 2},
                                        {"share_pct", "share", "(%)", 8, 1},
                                        {"gflops_per_s", "GFLOP/s", "", 9, 1},
                                        {"nwrong", "#wrong", "", 7}};
  return kColumns;
}

}  // namespace moe::bench
