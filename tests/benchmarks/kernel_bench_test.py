"""kernel_bench: every kernel has its time and its shares of the limits, on all devices of the build,
and what it cannot measure is refused.

Run: kernel_bench_test.py <source tree> <kernel_bench> none|simulated|any"""
import json
import os
import pathlib
import subprocess
import sys
import unittest

TREE, PROGRAM, DEVICES = pathlib.Path(sys.argv.pop(1)), sys.argv.pop(1), sys.argv.pop(1)
sys.path.insert(0, str(TREE / "benchmarks"))
import table_lines

SIZES = ["--tokens", "24", "--num-experts", "4", "--hidden-size", "33", "--moe-ffn-hidden-size", "34"]
ROWS = {"permute": {"gather", "sum"}, "combine": {"combine", "scale", "weight_grad"}}
PRODUCTS = {"forward", "input_grad", "weight_grad", "weight_grad_exact"}
SELECTION = {"select", "plan"}


def call(*flags):
    return subprocess.run([PROGRAM, *flags], capture_output=True, text=True, check=False)


class KernelBenchTest(unittest.TestCase):
    def measure(self, *flags):
        kernels = table_lines.kernels([PROGRAM, *flags, *SIZES], 1, os.environ)
        for name, row in kernels.items():
            self.assertGreater(row["real_time"], 0, name)
            shares = [value for key, value in row.items() if key.endswith("_pct")]
            self.assertTrue(shares and min(shares) > 0, f"{name}: {row}")
        return kernels

    def test_every_kernel_on_the_cpu(self):
        self.assertEqual(self.measure("gate").keys(), {"forward", "backward"})
        self.assertEqual(self.measure("gate", "--router", "switch", "--topk", "1").keys(),
                         {"forward", "backward"})
        for dtype in ("f32", "bf16"):
            for operation, names in ROWS.items():
                kernels = self.measure(operation, "-d", dtype, "--routing", "zipf:1.2")
                self.assertEqual(kernels.keys(), names)
            kernels = self.measure("gemm", "-d", dtype, "--threads", "2")
            self.assertEqual(kernels.keys(), PRODUCTS | {"pack", "packed_forward"})

    def test_bytes_and_operations_by_hand(self):
        # 24 tokens of 33 floats, 48 rows: both ways a token's rows, 4 bytes a slot (and row), and the offsets.
        kernels = self.measure("permute")
        self.assertEqual(kernels["gather"]["work"], (24 + 48) * 33 * 4 + 8 * 48 + 8 * 25)
        self.assertEqual(kernels["sum"]["work"], (24 + 48) * 33 * 4 + 4 * 48 + 8 * 25)
        self.assertEqual(self.measure("gemm")["forward"]["work"], 2 * 48 * 33 * 34)
        self.assertEqual(self.measure("gate")["forward"]["work"],
                         2 * 4 * 24 * 4 + 8 * 48 + 8 * 25 + 4 * 24 + 8 * 4)

    def test_trees_stand_beside_one_chain(self):
        for name, row in self.measure("gemm", "--leaves", "4", "--cpu-clock").items():
            self.assertEqual("chain_pct" in row, name != "pack", name)

    def test_every_kernel_on_a_gpu(self):
        found = call("permute", "--device", "cuda", "--benchmark_list_tests", *SIZES)
        if DEVICES == "none" or (DEVICES == "any" and found.returncode != 0):
            self.assertEqual(found.returncode, 1)
            self.assertIn("CUDA", found.stderr)
            self.skipTest("no GPU")
        cuda = ("--device", "cuda")
        self.assertEqual(self.measure("gate", *cuda).keys(), {"forward", "backward"} | SELECTION)
        self.assertEqual(self.measure("gate", *cuda, "-d", "bf16").keys(), SELECTION)
        for operation, names in ROWS.items():
            self.assertEqual(self.measure(operation, *cuda, "-d", "bf16").keys(), names)
        self.assertEqual(self.measure("gemm", *cuda, "-d", "f16").keys(), PRODUCTS)
        self.assertEqual(call("gate", *cuda, "--router", "sinkhorn", *SIZES).returncode, 1)

    def test_repetitions_have_a_median_and_a_spread(self):
        result = call("permute", *SIZES, "--benchmark_repetitions=3", "--benchmark_min_time=0",
                      "--benchmark_format=json")
        document = json.loads(result.stdout)
        self.assertEqual({row["aggregate_name"] for row in document["benchmarks"]},
                         {"mean", "median", "stddev", "cv", "min"})
        self.assertEqual((document["context"]["op"], document["context"]["tokens"]), ("permute", "24"))

    def test_what_is_refused(self):
        for flags, words in ((["layer"], "the operation is layer"),
                             (["gemm", "-d", "i64"], "--dtype is i64, expected f32, bf16 or f16"),
                             (["gemm", "--topk", "9"], "--topk is 9"),
                             (["gemm", "--device", "foo"], "--device is foo, expected cpu or cuda"),
                             (["gate", "-d", "bf16"], "expected f32"),
                             (["gate", "--router", "none"], "--router is none"),
                             (["permute", "--routing", "ragged"], "expected uniform, zipf:S"),
                             (["permute", "--tokens", "0"], "expected to be positive"),
                             (["gemm", "--cpu-clock", "--threads", "2"], "--cpu-clock"),
                             (["permute", "--tokn", "3"], "tokn")):
            result = call(*flags)
            self.assertEqual(result.returncode, 2, flags)
            self.assertIn(words, result.stderr)


unittest.main()
