moe_test(topk_gate_test LABELS unit cpu SOURCES topk_gate_test.cc LIBS moe_kernels)
moe_test(router_test LABELS unit cpu SOURCES router_test.cc routing_oracle.cc LIBS moe_gating)
