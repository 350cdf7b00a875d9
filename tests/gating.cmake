moe_test(topk_gate_test LABELS unit cpu SOURCES topk_gate_test.cc LIBS moe_kernels)
