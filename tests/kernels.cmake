# tests of kernels/
moe_test(base_test LABELS unit cpu SOURCES base_test.cc LIBS moe_kernels)
moe_test(grouped_gemm_test LABELS unit cpu SOURCES grouped_gemm_test.cc LIBS moe_kernels)
moe_test(fixed_dot_test LABELS unit cpu SOURCES fixed_dot_test.cc LIBS moe_kernels)
moe_test(permute_test LABELS unit cpu SOURCES permute_test.cc LIBS moe_kernels)
moe_test(combine_test LABELS unit cpu SOURCES combine_test.cc LIBS moe_kernels)
