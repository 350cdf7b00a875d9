# tests of kernels/
moe_test(base_test LABELS unit cpu SOURCES base_test.cc LIBS moe_kernels)
moe_test(grouped_gemm_test LABELS unit cpu SOURCES grouped_gemm_test.cc LIBS moe_kernels)
