# tests of moe/
find_package(nlohmann_json REQUIRED)
add_library(layer_harness STATIC layer_harness.cc layer_oracle.cc routing_oracle.cc)
target_link_libraries(layer_harness PUBLIC moe_moe GTest::gtest PRIVATE moe_private_flags)
moe_test(gradient_reducer_test LABELS unit cpu threads SOURCES gradient_reducer_test.cc LIBS moe_moe)
moe_test(loss_scaler_test LABELS unit cpu SOURCES loss_scaler_test.cc LIBS moe_moe)
moe_test(moe_layer_test LABELS unit cpu threads SOURCES moe_layer_test.cc LIBS layer_harness TIMEOUT 300)
moe_test(moe_layer_gates_test LABELS unit cpu
  SOURCES moe_layer_gates_test.cc LIBS layer_harness TIMEOUT 300)
add_library(transformer_harness STATIC transformer_harness.cc transformer_oracle.cc)
target_link_libraries(transformer_harness PUBLIC layer_harness PRIVATE moe_private_flags)
moe_test(transformer_test LABELS unit cpu SOURCES transformer_test.cc transformer_config_test.cc
  LIBS transformer_harness)
moe_test(transformer_layout_test LABELS unit cpu threads SOURCES transformer_layout_test.cc
  LIBS transformer_harness TIMEOUT 300)
moe_test(trainer_test LABELS unit cpu threads SOURCES trainer_test.cc LIBS layer_harness TIMEOUT 300)
moe_test(layer_trainer_test LABELS unit cpu threads SOURCES layer_trainer_test.cc
  LIBS layer_harness moe_comm_run)
if(MOE_MPI_FOUND)
  add_test(NAME layer_trainer_mpi_test
    COMMAND layer_trainer_test --gtest_filter=LayerTrainerProcessTest.*)
  set_tests_properties(layer_trainer_mpi_test PROPERTIES LABELS mpi TIMEOUT 120 RUN_SERIAL TRUE
    ENVIRONMENT "MOE_TEST_MPIEXEC=${MPIEXEC_EXECUTABLE};OMPI_ALLOW_RUN_AS_ROOT=1;OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1;OMPI_MCA_rmaps_base_oversubscribe=1")
endif()
moe_test(step_allocations_test LABELS unit cpu threads SOURCES step_allocations_test.cc counting_new.cc
  LIBS layer_harness TIMEOUT 300)
moe_test(device_train_test LABELS unit device SOURCES device_train_test.cc LIBS layer_harness TIMEOUT 600)
if(MOE_CUDA_SIMULATED)
  moe_test(peer_dispatch_test LABELS unit device SOURCES peer_dispatch_test.cc
    LIBS layer_harness cusim TIMEOUT 300)
  set_tests_properties(peer_dispatch_test PROPERTIES ENVIRONMENT MOE_TEST_DEVICE=cuda)
endif()
if(MOE_CUDA_SIMULATED AND MOE_NCCL_FOUND)
  moe_test(nccl_train_fault_test LABELS unit device SOURCES nccl_train_fault_test.cc
    LIBS layer_harness moe_comm_nccl cusim_nccl)
endif()
# Alone: it compares durations.
moe_test(overlap_test LABELS unit cpu SOURCES overlap_test.cc LIBS moe_moe TIMEOUT 300)
set_tests_properties(overlap_test PROPERTIES RUN_SERIAL TRUE)
moe_test(trace_test LABELS unit cpu device threads SOURCES trace_test.cc counting_new.cc
  LIBS moe_moe nlohmann_json::nlohmann_json)
moe_test(session_test LABELS unit cpu threads SOURCES session_test.cc LIBS moe_moe)
# File formats
moe_test(io_test LABELS unit SOURCES bounded_json_test.cc checkpoint_test.cc routing_trace_test.cc
  safetensors_test.cc safetensors_write_test.cc LIBS moe_moe nlohmann_json::nlohmann_json)
moe_test(io_memory_test LABELS unit SOURCES io_memory_test.cc counting_new.cc
  LIBS moe_moe nlohmann_json::nlohmann_json)
# Public models
moe_test(hf_test LABELS unit SOURCES hf_config_test.cc hf_weights_test.cc LIBS moe_moe)
moe_test(golden_test LABELS unit cpu threads SOURCES golden_test.cc LIBS layer_harness TIMEOUT 300)
target_compile_definitions(golden_test PRIVATE MOE_GOLDEN_DATA="${CMAKE_CURRENT_SOURCE_DIR}/golden/data")
if(MOE_CUDA_SIMULATED)
  # The layer's own tests and the public models, on the device.
  foreach(test moe_layer_test moe_layer_gates_test golden_test)
    add_test(NAME ${test}_on_device COMMAND ${test})
    set_tests_properties(${test}_on_device PROPERTIES LABELS "unit;device" TIMEOUT 600
      ENVIRONMENT MOE_TEST_DEVICE=cuda)
    add_dependencies(device_tests ${test})
  endforeach()
endif()
# moe verify's library
moe_test(verify_test LABELS unit cpu threads SOURCES verify_test.cc LIBS moe_verify TIMEOUT 300)
moe_test(verify_reference_test LABELS unit SOURCES verify_reference_test.cc verify_compare_test.cc
  LIBS moe_verify)
