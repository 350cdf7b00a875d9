"""The scripts that judge what nvcc made, cmake/ptxas_table.py and cmake/sass_check.py, on logs and
listings with known contents, and scripts/gpu_table.py on results of a GPU.

Run: gpu_scripts_test.py <source tree>"""

import json
import pathlib
import subprocess
import sys
import tempfile
import unittest

TREE = pathlib.Path(sys.argv.pop(1))
GATHER = "_ZN3moe7permute54_GLOBAL__N__{hash}_15_permute_cuda_cu_c2c19eab_1229512GatherKernelI{type}EEvNS0_10CudaGatherIT_EE"


class ScriptTest(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name)

    def call(self, script, *arguments):
        return subprocess.run([sys.executable, TREE / script, *arguments], capture_output=True, text=True, check=False)


LOG = """ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function '{kernel}' for 'sm_80'
    16 bytes stack frame, {stores} bytes spill stores, 8 bytes spill loads
ptxas info    : Used {registers} registers, used 1 barriers, 1024 bytes smem, 448 bytes cmem[0]
"""
ROW = "moe::permute::GatherKernel<float>\tsm_80\t40\t1024\t16\t4\t8"


class PtxasTableTest(ScriptTest):
    def setUp(self):
        super().setUp()
        self.table = self.folder / "table.tsv"

    def log(self, stores=4, registers=40, build="5504ba90"):
        text = LOG.format(stores=stores, registers=registers, kernel=GATHER.format(hash=build, type="f"))
        (self.folder / "permute.log").write_text(text)

    def run_script(self, *flags):
        return self.call("cmake/ptxas_table.py", *flags, self.folder, self.table)

    def test_update_writes_what_the_log_says_and_then_it_passes(self):
        self.log()
        self.assertEqual(self.run_script("--update").returncode, 0)
        self.assertEqual(self.table.read_text().splitlines()[1:], [ROW])
        self.log(build="c2c19eab")  # the hash of another build does not make another kernel
        self.assertEqual(self.run_script().returncode, 0)

    def test_a_new_spill_fails_and_other_changes_are_said(self):
        self.log()
        self.run_script("--update")
        self.log(registers=48)
        result = self.run_script()
        self.assertEqual(result.returncode, 0)
        self.assertIn("GatherKernel<float> on sm_80: registers 40 -> 48", result.stdout)
        self.log(stores=8)
        result = self.run_script()
        self.assertEqual(result.returncode, 1)
        self.assertIn("spill_stores 4 -> 8", result.stdout)
        self.log(stores=0)
        self.assertEqual(self.run_script().returncode, 0)

    def test_kernels_and_rows_must_be_the_same(self):
        self.log()
        self.run_script("--update")
        header = self.table.read_text().splitlines()[0]
        self.table.write_text(header + "\n")
        result = self.run_script()
        self.assertEqual(result.returncode, 1)
        self.assertIn("not in the table", result.stdout)
        self.assertIn("--update", result.stderr)
        self.table.write_text(header + "\n" + ROW + "\n" + ROW.replace("float", "double") + "\n")
        result = self.run_script()
        self.assertEqual(result.returncode, 1)
        self.assertIn("GatherKernel<double> on sm_80: in the table, but not compiled", result.stdout)

    def test_rows_of_a_gpu_that_nothing_was_compiled_for_stay(self):
        self.log()
        self.run_script("--update")
        both = self.table.read_text() + ROW.replace("sm_80", "sm_90a") + "\n"
        self.table.write_text(both)
        self.assertEqual(self.run_script().returncode, 0)
        self.run_script("--update")
        self.assertEqual(self.table.read_text(), both)

    def test_no_logs_and_bad_arguments_say_what_to_do(self):
        result = self.run_script()
        self.assertEqual(result.returncode, 1)
        self.assertIn("build the target moe_kernels first", result.stderr)
        self.assertIn("LOG_FOLDER", self.run_script("--no-such-flag").stderr)


HEADER = "kernel\tloop\tcounter\tat_least\tat_most\twhy\n"
LOAD = "LDG.E.128 R4, desc[UR4][R2.64]"
STORE = "STG.E.128 desc[UR4][R8.64], R4"
NARROW = "STG.E.U16 desc[UR4][R8.64+0x2], R5"
OTHER = GATHER.format(hash="5504ba90", type="i")


class SassCheckTest(ScriptTest):
    def setUp(self):
        super().setUp()
        self.listing = "\tcode for sm_90a\n"
        self.rules()
        tool = self.folder / "cuobjdump"  # prints the file to disassemble
        tool.write_text('#!/bin/sh\nexec cat "$2"\n')
        tool.chmod(0o755)

    def rules(self, *rows):
        (self.folder / "rules.tsv").write_text(HEADER + "".join(f"moe::permute::GatherKernel\t{row}\twhy\n" for row in rows))

    def kernel(self, *code, name=GATHER.format(hash="5504ba90", type="f")):
        """Instructions, 16 bytes each; @n in one is the address of instruction n."""
        self.listing += f"\t\tFunction : {name}\n"
        for i, line in enumerate(code):
            before, at, place = line.rpartition("@")
            if at and place.isdigit():
                line = before + hex(16 * int(place))
            self.listing += f"        /*{16 * i:04x}*/                   {line} ;    /* 0x00000a00ff017b82 */\n"
            self.listing += f"{'':90}/* 0x000fe20000000800 */\n"

    def run_script(self, *options):
        (self.folder / "program").write_text(self.listing)
        return self.call("cmake/sass_check.py", "--cuobjdump", self.folder / "cuobjdump", *options,
                         self.folder / "rules.tsv", self.folder / "program")

    def assert_fails(self, *words):
        result = self.run_script()
        self.assertEqual(result.returncode, 1, result.stdout + result.stderr)
        for word in words:
            self.assertIn(word, result.stdout)

    def assert_passes(self):
        result = self.run_script()
        self.assertEqual(result.returncode, 0, result.stdout + result.stderr)

    def test_a_narrow_store_in_a_loop_of_wide_loads_fails_by_name(self):
        self.kernel(LOAD, STORE, "@P0 BRA @0", "EXIT")
        self.assert_passes()
        self.kernel(LOAD, STORE, NARROW, "@P0 BRA @0", "EXIT", name=OTHER)
        self.assert_fails("moe::permute::GatherKernel<int> on sm_90a", "writes less, 1 times", "2 kernels, 0 rules, 1 failures")
        self.assertNotIn("<float>", self.run_script().stdout)

    def test_a_wide_store_elsewhere_does_not_excuse_the_loop(self):
        self.kernel(STORE, LOAD, NARROW, "@P0 BRA @1", STORE, "EXIT")
        self.assert_fails("writes less, 1 times")

    def test_a_narrow_store_outside_the_loop_or_in_a_loop_around_it_passes(self):
        self.kernel(NARROW, LOAD, STORE, "@P0 BRA @1", NARROW, "EXIT")
        self.assert_passes()
        self.kernel(NARROW, LOAD, STORE, "@P0 BRA @1", "@P1 BRA @0", "EXIT")
        self.assert_passes()

    def test_a_block_at_the_end_that_jumps_back_is_no_loop(self):
        self.kernel("@P0 BRA @4", LOAD, NARROW, "EXIT", "BRA @1")
        self.assert_passes()

    def test_a_block_at_the_end_that_a_loop_goes_through_is_part_of_it(self):
        self.kernel(LOAD, "@P0 BRA @4", "@P1 BRA @0", "EXIT", NARROW, "BRA @2")
        self.assert_fails("writes less, 1 times")

    def test_paths_that_join_are_no_loop(self):
        branch = ("BSSY B0, @4", "@P0 BRA @3", LOAD, "BSYNC B0")
        self.kernel(*branch, "BSSY B0, @8", "@P0 BRA @7", NARROW, "BSYNC B0", "EXIT")
        self.assert_passes()

    def test_spills_in_a_loop_fail_unless_a_rule_bounds_them(self):
        self.kernel("LDL R4, [R1]", "@P0 BRA @0", "EXIT")
        self.assert_fails("a loop uses local memory, 1 times")
        self.rules("slots\tlocal\t\t1")
        self.assert_passes()

    def test_a_rule_bounds_the_loop_that_has_the_most(self):
        mma = "HMMA.16816.F32.BF16 R4, R8, R12, R4"
        self.kernel(mma, mma, "@P0 BRA @0", mma, "@P0 BRA @3", "EXIT")
        self.rules("mma\tmma\t2\t2", "mma\tslots\t\t3")
        self.assert_passes()
        self.rules("mma\tmma\t3\t")
        self.assert_fails("mma 2 in the loop with the most mma, expected 3..: why")
        self.rules("mma\tslots\t\t2")
        self.assert_fails("slots 3")

    def test_multiply_adds_of_a_loop_do_not_count_those_inside(self):
        fma = "FFMA R4, R8, R12, R4"
        self.kernel(fma, fma, fma, "@P0 BRA @2", "@P1 BRA @0", "EXIT")
        self.rules("fma\tfma\t2\t2", "fma\tslots\t\t3")
        self.assert_passes()
        self.rules("fma\tfma\t3\t")
        self.assert_fails("fma 2 in the loop with the most fma")

    def test_a_rule_of_the_kernel_bounds_code_outside_of_loops(self):
        self.kernel("HMMA.16816.F32 R4, R8, R12, R4", "@P0 BRA @0", STORE, STORE, "EXIT")
        self.rules("kernel\tslots\t\t5", "mma\tstore16\t\t0")
        self.assert_passes()
        self.rules("kernel\tstore16\t\t1")
        self.assert_fails("store16 2 in the kernel, expected ..1: why")

    def test_a_kernel_without_loops_has_none_of_anything(self):
        self.kernel("HMMA.16816.F32 R4, R8, R12, R4", "EXIT")
        self.rules("mma\tmma\t1\t")
        self.assert_fails("mma 0")

    def test_loads_are_counted_until_one_is_needed(self):
        loads = [f"LDG.E.128 R{r}, desc[UR4][R2.64+0x{r}0]" for r in (4, 8, 12)]
        uses = [f"FADD R20, R20, R{r}" for r in (4, 9, 15)]
        self.kernel(*loads, *uses, "@P0 BRA @0", "EXIT")
        self.rules("load16\tflight\t3\t3")
        self.assert_passes()
        self.kernel(loads[0], uses[0], loads[1], uses[1], loads[2], uses[2], "@P0 BRA @0", "EXIT",
                    name=OTHER)
        self.assert_fails("GatherKernel<int> on sm_90a: flight 1")

    def test_loads_at_a_loops_end_are_under_way_at_its_beginning(self):
        self.kernel("FADD R20, R20, R4", "LDG.E.128 R8, desc[UR4][R2.64]", LOAD, "@P0 BRA @0", "EXIT")
        self.rules("load16\tflight\t2\t2")
        self.assert_passes()

    def test_a_rule_without_a_kernel_fails(self):
        self.kernel("EXIT", name="_ZN3moe5OtherEv")
        self.rules("mma\tmma\t1\t")
        self.assert_fails("moe::permute::GatherKernel: not there")

    def test_the_table_has_a_row_a_loop(self):
        self.kernel(LOAD, STORE, "@P0 BRA @0", "@P1 BRA @0", LOAD, "@P1 BRA @4", "EXIT")
        rows = self.run_script("--table").stdout.splitlines()
        self.assertEqual(rows[0].split()[:5], ["slots", "load16", "load", "store16", "store"])
        self.assertEqual([row.split()[0] for row in rows[1:]], ["4", "2"])

    def test_bad_arguments_say_what_to_do(self):
        self.kernel("EXIT")
        (self.folder / "rules.tsv").write_text("kernel\n")
        self.assertIn("must begin with", self.run_script().stderr)
        (self.folder / "cuobjdump").write_text("#!/bin/sh\necho no device code >&2\nexit 1\n")
        self.assertIn("no device code", self.run_script().stderr)


def kernels(context, *rows):
    """What kernel_bench writes, of which the medians count."""
    rows = [{"run_name": f"{context['op']}/{name}/manual_time", "aggregate_name": aggregate} | row
            for name, row in rows for aggregate in ("mean", "median")]
    for row in rows:
        if row["aggregate_name"] == "mean":
            row["real_time"] = 1e9
    return json.dumps({"context": context, "benchmarks": rows})


GATE = {"op": "gate", "dtype": "bf16", "tokens": "65536", "experts": "256", "topk": "8"}
SELECT = {"real_time": 25.0, "work": 80_000_000.0, "copy_gbytes_per_s": 4000.0}
PLAN = {"real_time": 10.0, "work": 6_000_000.0}
BACKWARD = {"real_time": 2000.0, "work": 80_000_000.0, "copy_gbytes_per_s": 4000.0}
GEMM = {"op": "gemm", "experts": "128", "hidden": "4096", "ffn": "1024", "tokens": "32768",
        "topk": "8"}
FORWARD = {"real_time": 1.0, "gflops_per_s": 400_000.0}
INPUT_GRAD = FORWARD | {"peak_gflops_per_s": 1_600_000.0}
PEERS = [
    {"peer": "torch softmax, topk", "op": "gate", "time_us": 100.0, "status": "ok"},
    {"peer": "cuBLAS 8192^3", "op": "gemm", "tflops_per_s": 800.0, "status": "ok"},
    {"peer": "torch._grouped_mm", "op": "gemm", "tflops_per_s": 500.0, "status": "ok"},
    {"peer": "triton forward", "op": "layer", "time_us": 12345.0, "status": "ok"},
    {"peer": "torch.matmul loop", "op": "gemm", "tflops_per_s": 5000.0, "status": "wrong"},
]
# Cells are separated by two spaces or more.
EXPECTED = [
    ["an H200"],
    ["what", "ours", "against", "reaches", "ratio", "goal", "met"],
    ["gate T 65536 E 256 k 8 bf16", "25 us", "copy of its bytes", "20 us", "80%", "<= 20 us", "NO"],
    ["25 us", "torch softmax, topk", "100 us", "400%"],
    ["plan T 65536 E 256 k 8", "10 us", "<= 15 us", "yes"],
    ["gate with scores, backward, f32", "2 ms", "copy of its bytes", "20 us", "1%"],
    ["permute", "-", ">= 85%", "NO"],
    ["combine", "-", ">= 85%", "NO"],
    ["grouped GEMM forward E 128 H 4096 F 1024 T 32768 k 8", "400 TFLOP/s",
     "cuBLAS, one product", "800 TFLOP/s", "50%", ">= 45%", "yes"],
    ["400 TFLOP/s", "cuBLAS 8192^3", "800 TFLOP/s", "50%"],
    ["400 TFLOP/s", "torch._grouped_mm", "500 TFLOP/s", "80%"],
    ["grouped GEMM input_grad", "400 TFLOP/s", "cuBLAS, one product", "1600 TFLOP/s", "25%"],
    ["layer forward", "-", "triton", "12.3 ms"],
    ["SM clock just after the steps: 1980 to 1980 MHz"],
    ["FAILED", "layer: exit code 10 after 2 s: moe: no GPU"],
]


class GpuTableTest(ScriptTest):
    def test_ratios_goals_what_is_missing_and_failed_steps(self):
        (self.folder / "gate.json").write_text(kernels(GATE, ("select", SELECT), ("plan", PLAN)))
        (self.folder / "gate_f32.json").write_text(
            kernels(GATE | {"dtype": "f32"}, ("backward", BACKWARD)))
        (self.folder / "gemm.json").write_text(
            kernels(GEMM, ("forward", FORWARD), ("input_grad", INPUT_GRAD)))
        (self.folder / "permute.json").write_text("[{")  # cut off
        lines = [json.dumps(line) for line in PEERS]
        (self.folder / "torch.jsonl").write_text("\n".join(lines + ['{"peer": ']))
        (self.folder / "steps.tsv").write_text("device\t0\t1\t1980\tan H200\nlayer\t10\t2\t\tmoe: no GPU\n")
        result = self.call("scripts/gpu_table.py", self.folder)
        *got, (last,) = [[cell.strip() for cell in line.split("  ") if cell.strip()]
                         for line in result.stdout.splitlines()]
        self.assertEqual(got, EXPECTED, result.stderr)
        self.assertTrue(last.startswith("1 of 2 steps ran, 2 of 5 goals met, 3 s; "), last)
        self.assertEqual(result.returncode, 1)


unittest.main()
