"""cmake/ptxas_table.py on logs with known contents. Run: ptxas_table_test.py <ptxas_table.py>"""

import pathlib
import subprocess
import sys
import tempfile
import unittest

SCRIPT = sys.argv.pop(1)
LOG = """ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function '_ZN3moe7permute54_GLOBAL__N__{hash}_15_permute_cuda_cu_c2c19eab_1229512GatherKernelIfEEvNS0_10CudaGatherIT_EE' for 'sm_80'
    16 bytes stack frame, {stores} bytes spill stores, 8 bytes spill loads
ptxas info    : Used {registers} registers, used 1 barriers, 1024 bytes smem, 448 bytes cmem[0]
"""
ROW = "moe::permute::GatherKernel<float>\tsm_80\t40\t1024\t16\t4\t8"


class PtxasTableTest(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.logs = pathlib.Path(folder.name)
        self.table = self.logs / "table.tsv"

    def log(self, stores=4, registers=40, build="5504ba90"):
        text = LOG.format(stores=stores, registers=registers, hash=build)
        (self.logs / "permute.log").write_text(text)

    def run_script(self, *flags):
        return subprocess.run([sys.executable, SCRIPT, *flags, self.logs, self.table],
                              capture_output=True, text=True, check=False)

    def test_update_writes_what_the_log_says_and_then_it_passes(self):
        self.log()
        self.assertEqual(self.run_script("--update").returncode, 0)
        self.assertEqual(self.table.read_text().splitlines()[1:], [ROW])
        self.log(build="c2c19eab")  # another build's hash is no other kernel
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
        self.table.write_text(header + "\n" + ROW + "\n" + ROW.replace("sm_80", "sm_90a") + "\n")
        result = self.run_script()
        self.assertEqual(result.returncode, 1)
        self.assertIn("on sm_90a: in the table, but not compiled", result.stdout)

    def test_no_logs_and_bad_arguments_say_what_to_do(self):
        result = self.run_script()
        self.assertEqual(result.returncode, 1)
        self.assertIn("build the target moe_kernels first", result.stderr)
        self.assertIn("LOG_FOLDER", self.run_script("--no-such-flag").stderr)


unittest.main()
