# tests of dispatch
moe_test(placement_test LABELS unit cpu SOURCES placement_test.cc LIBS moe_dispatch)
moe_test(device_plan_test LABELS unit device
  SOURCES device_plan_test.cc dispatch_world.cc LIBS moe_dispatch)
moe_test(dispatch_plan_test LABELS unit cpu threads
  SOURCES dispatch_plan_test.cc dispatch_world.cc comm_env_local.cc LIBS moe_dispatch)
moe_test(dispatcher_test LABELS unit cpu threads
  SOURCES dispatcher_test.cc dispatcher_create_test.cc dispatch_world.cc comm_env_local.cc LIBS moe_dispatch)
if(MOE_MPI_FOUND)
  moe_test(dispatch_plan_mpi_test LABELS mpi NPROC 2 3
    SOURCES dispatch_plan_test.cc dispatch_world.cc comm_env_mpi.cc LIBS moe_dispatch moe_comm_mpi)
  moe_test(dispatcher_mpi_test LABELS mpi NPROC 2 3 4
    SOURCES dispatcher_test.cc dispatcher_create_test.cc dispatch_world.cc comm_env_mpi.cc LIBS moe_dispatch moe_comm_mpi)
endif()
