# Text data and the program.
if(TARGET moe_moe)
  moe_test(text_data_test LABELS unit SOURCES text_data_test.cc LIBS moe_moe)
  moe_test(sampler_test LABELS unit SOURCES sampler_test.cc LIBS moe_moe)
endif()
if(TARGET moe_cli)
  find_package(nlohmann_json REQUIRED)
  moe_test(options_test LABELS unit SOURCES options_test.cc LIBS moe_cli)
  moe_test(deepspeed_test LABELS unit SOURCES deepspeed_test.cc LIBS moe_cli)
  moe_test(launch_flags_test LABELS unit SOURCES launch_flags_test.cc LIBS moe_cli)
  moe_test(pin_test LABELS unit SOURCES pin_test.cc LIBS moe_cli)
  moe_test(doctor_test LABELS unit SOURCES doctor_test.cc LIBS moe_cli)
  moe_test(metrics_test LABELS unit SOURCES metrics_test.cc
    LIBS moe_cli nlohmann_json::nlohmann_json)
  if(NOT MOE_SANITIZE)  # hundreds of processes
    moe_test(out_of_memory_test LABELS smoke SOURCES out_of_memory_test.cc counting_new.cc
      LIBS moe_cli TIMEOUT 300)
    target_compile_definitions(out_of_memory_test PRIVATE
      MOE_GOLDEN_DATA="${CMAKE_CURRENT_SOURCE_DIR}/golden/data"
      MOE_REPORT_DATA="${CMAKE_CURRENT_SOURCE_DIR}/report/data")
  endif()
endif()

# End to end: the program as users call it.
if(TARGET moe)
  function(moe_cli_test name)
    cmake_parse_arguments(A "" "TIMEOUT" "LABELS;ARGS" ${ARGN})
    add_test(NAME cli_${name}
      COMMAND bash ${CMAKE_CURRENT_SOURCE_DIR}/cli/${name}.sh $<TARGET_FILE:moe> ${A_ARGS})
    set_tests_properties(cli_${name} PROPERTIES LABELS "${A_LABELS}" TIMEOUT ${A_TIMEOUT})
  endfunction()
  moe_cli_test(bad_input LABELS smoke TIMEOUT 120)
  moe_cli_test(train LABELS smoke TIMEOUT 300)
  if(NOT MOE_SANITIZE) # a program that ends in _exit says nothing of leaks, and starts slowly
    moe_cli_test(stuck LABELS smoke TIMEOUT 120)
    set_tests_properties(cli_stuck PROPERTIES RUN_SERIAL TRUE) # it measures time
  endif()
  find_package(Python3 COMPONENTS Interpreter)
  if(Python3_FOUND)
    add_test(NAME cli_trace COMMAND ${Python3_EXECUTABLE} ${CMAKE_CURRENT_SOURCE_DIR}/cli/trace.py
      $<TARGET_FILE:moe> ${CMAKE_CURRENT_SOURCE_DIR}/golden/data
      $<$<BOOL:${MOE_MPI_FOUND}>:${MPIEXEC_EXECUTABLE}>)
    add_test(NAME cli_record_routing
      COMMAND ${Python3_EXECUTABLE} ${CMAKE_CURRENT_SOURCE_DIR}/cli/record_routing.py
      $<TARGET_FILE:moe> $<$<BOOL:${MOE_MPI_FOUND}>:${MPIEXEC_EXECUTABLE}>)
    set_tests_properties(cli_trace cli_record_routing PROPERTIES LABELS smoke TIMEOUT 300)
  endif()
  moe_cli_test(bench LABELS smoke TIMEOUT 300 ARGS
    $<$<BOOL:${MOE_MPI_FOUND}>:${MPIEXEC_EXECUTABLE}>)
  if(MOE_CUDA_SIMULATED)
    moe_cli_test(bench_device LABELS device TIMEOUT 300 ARGS simulated)
    moe_cli_test(train_device LABELS device TIMEOUT 300 ARGS simulated)
    moe_cli_test(verify_device LABELS device TIMEOUT 300 ARGS simulated)
    moe_cli_test(nccl LABELS device TIMEOUT 300 ARGS simulated ${CMAKE_CURRENT_SOURCE_DIR}/golden/data)
    add_dependencies(device_tests moe)
  elseif(MOE_CUDA_FOUND)
    moe_cli_test(bench_device LABELS smoke TIMEOUT 300 ARGS any)
    moe_cli_test(train_device LABELS smoke TIMEOUT 300 ARGS any)
    moe_cli_test(verify_device LABELS smoke TIMEOUT 300 ARGS any)
    moe_cli_test(nccl LABELS smoke TIMEOUT 300 ARGS any ${CMAKE_CURRENT_SOURCE_DIR}/golden/data)
  else()
    moe_cli_test(bench_device LABELS smoke TIMEOUT 300 ARGS none)
    moe_cli_test(train_device LABELS smoke TIMEOUT 300 ARGS none)
    moe_cli_test(verify_device LABELS smoke TIMEOUT 300 ARGS none)
    moe_cli_test(nccl LABELS smoke TIMEOUT 300 ARGS none ${CMAKE_CURRENT_SOURCE_DIR}/golden/data)
  endif()
  # Under a sanitizer fewer layouts: 484 of them repeat what 60 do to memory.
  set(verify_layouts default)
  if(MOE_SANITIZE)
    set(verify_layouts "ranks=1,8 transport=local")
  endif()
  moe_cli_test(verify LABELS smoke TIMEOUT 600 ARGS "${verify_layouts}"
    $<$<BOOL:${MOE_MPI_FOUND}>:${MPIEXEC_EXECUTABLE}>)
  set_tests_properties(cli_verify PROPERTIES RUN_SERIAL TRUE) # it measures time
  moe_cli_test(layer LABELS smoke TIMEOUT 120 ARGS ${CMAKE_CURRENT_SOURCE_DIR}/golden/data
    $<$<BOOL:${MOE_MPI_FOUND}>:${MPIEXEC_EXECUTABLE}>)
  foreach(shell bash zsh fish)
    moe_cli_test(completion_${shell} LABELS smoke TIMEOUT 120)
  endforeach()
  moe_cli_test(manual LABELS smoke TIMEOUT 60 ARGS ${CMAKE_BINARY_DIR}/moe/cli/man1)
  set_tests_properties(cli_completion_bash cli_completion_zsh cli_completion_fish cli_manual
    PROPERTIES SKIP_RETURN_CODE 77)
  if(MOE_MPI_FOUND)
    moe_cli_test(mpi LABELS mpi TIMEOUT 120 ARGS ${MPIEXEC_EXECUTABLE} ${MOE_MPI})
    set_tests_properties(cli_mpi PROPERTIES RUN_SERIAL TRUE) # it measures time
    moe_cli_test(mpi_commands LABELS mpi TIMEOUT 300
      ARGS ${MPIEXEC_EXECUTABLE} ${CMAKE_CURRENT_SOURCE_DIR}/golden/data)
  endif()
endif()
