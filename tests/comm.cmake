moe_test(comm_contract_local_test LABELS contract cpu
  SOURCES comm_contract_test.cc comm_env_local.cc LIBS moe_comm)
moe_test(ring_all_reduce_test LABELS unit cpu
  SOURCES ring_all_reduce_test.cc comm_env_local.cc LIBS moe_comm)
moe_test(mesh_test LABELS unit cpu
  SOURCES mesh_test.cc comm_env_local.cc LIBS moe_comm)
if(MOE_MPI_FOUND)
  moe_test(comm_contract_mpi_test LABELS contract mpi NPROC 1 2 3 4
    SOURCES comm_contract_test.cc comm_env_mpi.cc LIBS moe_comm_mpi)
endif()
