moe_test(comm_contract_local_test LABELS contract cpu
  SOURCES comm_contract_test.cc comm_env_local.cc LIBS moe_comm)
moe_test(ring_all_reduce_test LABELS unit cpu
  SOURCES ring_all_reduce_test.cc comm_env_local.cc LIBS moe_comm)
moe_test(mesh_test LABELS unit cpu
  SOURCES mesh_test.cc comm_env_local.cc LIBS moe_comm)
