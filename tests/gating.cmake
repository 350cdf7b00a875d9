moe_test(topk_gate_test LABELS unit cpu SOURCES topk_gate_test.cc LIBS moe_kernels)
moe_test(device_gate_test LABELS unit cpu device SOURCES device_gate_test.cc LIBS moe_kernels)
moe_test(router_test LABELS unit cpu SOURCES router_test.cc routing_oracle.cc LIBS moe_gating)
moe_test(router_contract_test LABELS unit cpu threads
  SOURCES router_contract_test.cc routing_oracle.cc LIBS moe_gating)
moe_test(router_config_test LABELS unit cpu SOURCES router_config_test.cc LIBS moe_gating)
moe_test(gate_test LABELS unit cpu SOURCES gate_test.cc routing_oracle.cc LIBS moe_gating)
moe_test(capacity_test LABELS unit cpu SOURCES capacity_test.cc LIBS moe_gating)
moe_test(router_loss_test LABELS unit cpu device SOURCES router_loss_test.cc LIBS moe_kernels)
