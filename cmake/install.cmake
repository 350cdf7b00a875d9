# moe::moe, and the installed package: libraries, headers, and find_package(moe).

# Archives, in link order, and the packages that their headers include.
set(moe_layers moe_c moe_moe moe_comm_run)
if(MOE_MPI_FOUND)
  list(APPEND moe_layers moe_comm_mpi)
endif()
if(MOE_NCCL_FOUND)
  list(APPEND moe_layers moe_comm_nccl)
endif()
list(APPEND moe_layers moe_gating moe_dispatch moe_comm moe_kernels)
get_target_property(moe_public_libraries moe_kernels INTERFACE_LINK_LIBRARIES)
list(FILTER moe_public_libraries INCLUDE REGEX "^(absl|Threads)::")

# All layers under one name. The program has the plain name `moe`.
if(MOE_SHARED)
  # Before 1.0 a minor version may change the interface.
  set(moe_soversion ${PROJECT_VERSION_MAJOR}.${PROJECT_VERSION_MINOR})
  list(TRANSFORM moe_layers REPLACE "(.+)" "$<TARGET_OBJECTS:\\1>" OUTPUT_VARIABLE objects)
  add_library(moe_all SHARED ${objects})
  set_target_properties(moe_all PROPERTIES OUTPUT_NAME moe LINKER_LANGUAGE CXX
    VERSION ${PROJECT_VERSION} SOVERSION ${moe_soversion}
    LINK_DEPENDS ${PROJECT_SOURCE_DIR}/cmake/exports.map)
  target_link_options(moe_all PRIVATE -Wl,--version-script=${PROJECT_SOURCE_DIR}/cmake/exports.map)
  target_link_libraries(moe_all PUBLIC moe_flags ${moe_public_libraries} PRIVATE ${moe_layers})
else()
  add_library(moe_all INTERFACE)
  target_link_libraries(moe_all INTERFACE ${moe_layers})
endif()
add_library(moe::moe ALIAS moe_all)
set_target_properties(moe_all PROPERTIES EXPORT_NAME moe)
if(NOT MOE_INSTALL)
  return()
endif()
if(MOE_CUDA_SIMULATED)
  install(CODE "message(FATAL_ERROR \"a build with simulated CUDA devices is for tests alone\")")
endif()
include(CMakePackageConfigHelpers)

# Headers that programs include (the roots: moe/moe.h, comm/create.h, and those in the pages of
# docs/) and the headers that these include. All others are internal; the test `consumer` compiles
# them.
set(moe_public_headers
  moe/moe.h moe/main.h moe/torch.h moe/c/moe.h
  moe/run/context.h moe/run/deferred_gradients.h moe/run/finite.h moe/run/micro_batches.h moe/run/pass.h moe/run/phase_clock.h
  moe/run/round.h moe/run/row_subset.h moe/run/session.h
  moe/run/stash.h moe/run/trace_export.h moe/run/turns.h
  moe/state/boxes.h moe/state/canonical_tensor.h moe/state/module.h moe/state/parameter.h
  moe/state/weight_lease.h
  moe/recompute/recompute.h
  moe/zero/offload.h moe/zero/optimizer_state.h moe/zero/shard_cut.h moe/zero/state_placement.h moe/zero/weight_gather.h
  moe/zero/weight_source.h
  moe/tensor/gathered_rows.h moe/tensor/linear.h moe/tensor/own_rows.h
  moe/tensor/tensor_share.h
  moe/layer/experts.h moe/layer/moe_layer.h moe/layer/shared_expert.h
  moe/pipeline/links.h moe/pipeline/runner.h moe/pipeline/schedule.h
  moe/train/gradient_norm.h moe/train/gradient_reducer.h moe/train/grid_unit.h
  moe/train/loss_scaler.h moe/train/optimizer.h moe/train/trainer.h
  moe/checkpoint/checkpointer.h moe/checkpoint/manifest.h moe/checkpoint/reader.h
  moe/checkpoint/step_folders.h moe/checkpoint/stop_signal.h moe/checkpoint/training_state.h
  moe/checkpoint/writer.h
  moe/hf/hf_config.h moe/hf/hf_model.h moe/hf/hf_save.h moe/hf/hf_weights.h moe/hf/model_rule.h moe/hf/tensor_layout.h moe/hf/tensor_rule.h
  moe/io/checkpoint.h moe/io/file.h moe/io/file_system.h moe/io/file_work.h moe/io/model_files.h moe/io/routing_trace.h moe/io/safetensors.h
  moe/io/safetensors_stream.h moe/io/scratch_file.h
  moe/lm/attention_block.h moe/lm/dense.h moe/lm/feed_forward_block.h moe/lm/key_value_cache.h moe/lm/layer.h moe/lm/model.h
  moe/lm/output_head.h moe/lm/stage.h moe/lm/text_data.h moe/lm/tokens.h moe/lm/train_config.h moe/lm/training_loop.h moe/lm/transformer_config.h
  moe/lm/tree_norms.h
  dispatch/dispatch_plan.h dispatch/dispatcher.h dispatch/placement.h
  gating/capacity.h gating/gate.h gating/router.h gating/router_check.h
  gating/router_config.h gating/router_stats.h gating/routing.h
  gating/token_choice_gate.h gating/token_groups.h
  comm/all_reduce.h comm/bootstrap.h comm/communicator.h comm/create.h comm/descriptor.h comm/host_staging.h comm/hosts.h
  comm/local/local_world.h comm/mesh/group_map.h comm/mesh/mesh.h comm/mesh/mesh_shape.h
  comm/mpi/mpi_world.h comm/nccl/nccl_store.h
  comm/nccl/nccl_world.h comm/patience.h comm/ring_all_reduce.h comm/row_gather.h comm/site.h comm/watch/fault.h
  comm/watch/flight_recorder.h comm/watch/last_places.h comm/watch/process_watch.h comm/watch/rank_watch.h comm/world_plan.h
  kernels/base/buffer.h kernels/base/caught.h kernels/base/choice.h kernels/base/cuda_devices.h
  kernels/base/device_arrays.h
  kernels/base/dtype.h kernels/base/group_offsets.h kernels/base/host_task.h kernels/base/log.h kernels/base/nvtx_range.h
  kernels/base/parallel.h kernels/base/status_macros.h kernels/base/stream.h
  kernels/base/stream_stamps.h kernels/base/tensor_view.h
  kernels/base/trace.h kernels/base/tree_cut.h
  kernels/base/workspace.h
  kernels/exact_sum/exact_sum.h kernels/exact_sum/exact_sum_cpu.h
  kernels/exact_sum/grad_accumulator.h kernels/exact_sum/grid_tally.h kernels/exact_sum/scaled_sum.h
  kernels/exact_sum/square_sum.h kernels/exact_sum/sum_view.h
  kernels/grouped_gemm/gemm_cublas.h kernels/grouped_gemm/gemm_options.h
  kernels/grouped_gemm/gemm_problem.h kernels/grouped_gemm/packed_weights.h
  kernels/activation/activation.h kernels/activation/activation_kind.h kernels/attention/attention.h
  kernels/elementwise/cast_slice.h kernels/elementwise/elementwise.h
  kernels/norm/rms_norm.h kernels/permute/permute.h
  kernels/topk_gate/gate_row.h kernels/topk_gate/gate_rule.h)
# Installed below moe-1/, which is the include path: "moe/moe.h" works for the user as it does here,
# and no folder named kernels/ or comm/ is added to the user's own path.
foreach(header ${moe_public_headers})
  cmake_path(GET header PARENT_PATH folder)
  install(FILES ${PROJECT_SOURCE_DIR}/${header}
    DESTINATION ${CMAKE_INSTALL_INCLUDEDIR}/moe-1/${folder} COMPONENT dev)
endforeach()
install(TARGETS moe_all moe_flags EXPORT moe-targets
  LIBRARY COMPONENT lib NAMELINK_COMPONENT dev)
if(NOT MOE_SHARED)
  install(TARGETS ${moe_layers} moe_mpi EXPORT moe-targets COMPONENT dev)
  # cmake --install --strip is for programs and shared libraries alone.
  install(CODE "if(CMAKE_INSTALL_DO_STRIP)
    file(GLOB archives \"\$ENV{DESTDIR}\${CMAKE_INSTALL_PREFIX}/${CMAKE_INSTALL_LIBDIR}/libmoe_*.a\")
    execute_process(COMMAND ${CMAKE_STRIP} --strip-debug \${archives} COMMAND_ERROR_IS_FATAL ANY)
  endif()" COMPONENT dev)
endif()

set(moe_package_dir ${CMAKE_INSTALL_LIBDIR}/cmake/moe)
install(EXPORT moe-targets NAMESPACE moe:: DESTINATION ${moe_package_dir} COMPONENT dev)
configure_package_config_file(${PROJECT_SOURCE_DIR}/cmake/moe-config.cmake.in
  ${PROJECT_BINARY_DIR}/moe-config.cmake INSTALL_DESTINATION ${moe_package_dir})
write_basic_package_version_file(${PROJECT_BINARY_DIR}/moe-config-version.cmake
  COMPATIBILITY SameMinorVersion)
install(FILES ${PROJECT_BINARY_DIR}/moe-config.cmake ${PROJECT_BINARY_DIR}/moe-config-version.cmake
  ${PROJECT_SOURCE_DIR}/cmake/moe-torch.cmake
  DESTINATION ${moe_package_dir} COMPONENT dev)

# moe.pc, which stays valid if the tree is moved. User code needs Abseil itself; archives also need
# the libraries that they link.
set(pc_dir ${CMAKE_INSTALL_LIBDIR}/pkgconfig)
string(REGEX REPLACE "[^/]+" ".." pc_prefix ${pc_dir})
list(TRANSFORM moe_public_libraries REPLACE "absl::" "absl_" OUTPUT_VARIABLE pc_requires)
list(REMOVE_ITEM pc_requires Threads::Threads)
if(MOE_SHARED)
  set(pc_libs -lmoe)
  set(pc_requires_private "")
  set(pc_libs_private "")
else()
  list(TRANSFORM moe_layers PREPEND -l OUTPUT_VARIABLE pc_libs)
  set(pc_requires_private absl_fixed_array libhwy tbb)
  set(pc_libs_private -pthread)
  if(MOE_MPI_FOUND)
    list(APPEND pc_libs_private ${MPI_CXX_LIBRARIES})
  endif()
  if(MOE_CUDA_FOUND)
    list(APPEND pc_libs_private ${CUDA_cudart_static_LIBRARY} -ldl -lrt)
  endif()
  if(MOE_NCCL_FOUND)
    list(APPEND pc_requires_private libcrypto)
  endif()
endif()
foreach(list requires libs requires_private libs_private)
  list(JOIN pc_${list} " " pc_${list})
endforeach()
configure_file(cmake/moe.pc.in ${PROJECT_BINARY_DIR}/moe.pc @ONLY)
install(FILES ${PROJECT_BINARY_DIR}/moe.pc DESTINATION ${pc_dir} COMPONENT dev)
# Installs the pages that help and manual pages name as docs/*.md; and the examples, beside the
# headers.
set(doc_dir ${CMAKE_INSTALL_DATAROOTDIR}/doc/moe)
set(with_help dev)
if(MOE_BUILD_PROGRAMS)
  set(with_help program)
endif()
install(FILES LICENSE README.md CHANGELOG.md DESTINATION ${doc_dir} COMPONENT ${with_help})
install(DIRECTORY docs DESTINATION ${doc_dir} COMPONENT ${with_help})
install(DIRECTORY examples DESTINATION ${doc_dir} COMPONENT dev
  FILES_MATCHING PATTERN "*.cc" PATTERN "*.c")
