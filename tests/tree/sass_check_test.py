"""cmake/sass_check.py on listings with known contents. Run: sass_check_test.py <sass_check.py>"""

import pathlib
import subprocess
import sys
import tempfile
import unittest

SCRIPT = sys.argv.pop(1)
GATHER = "_ZN3moe7permute54_GLOBAL__N__5504ba90_15_permute_cuda_cu_c2c19eab_1229512GatherKernelI{type}EEvNS0_10CudaGatherIT_EE"
HEADER = "kernel\tloop\tcounter\tat_least\tat_most\twhy\n"
LOAD = "LDG.E.128 R4, desc[UR4][R2.64]"
STORE = "STG.E.128 desc[UR4][R8.64], R4"
NARROW = "STG.E.U16 desc[UR4][R8.64+0x2], R5"


class SassCheckTest(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name)
        self.listing = "\tcode for sm_90a\n"
        self.rules()
        tool = self.folder / "cuobjdump"  # prints the file that it is to disassemble
        tool.write_text('#!/bin/sh\nexec cat "$2"\n')
        tool.chmod(0o755)

    def rules(self, *rows):
        (self.folder / "rules.tsv").write_text(HEADER + "".join(f"moe::permute::GatherKernel\t{row}\twhy\n" for row in rows))

    def kernel(self, *code, name=GATHER.format(type="f")):
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
        return subprocess.run([sys.executable, SCRIPT, "--cuobjdump", self.folder / "cuobjdump", *options,
                               self.folder / "rules.tsv", self.folder / "program"],
                              capture_output=True, text=True, check=False)

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
        self.kernel(LOAD, STORE, NARROW, "@P0 BRA @0", "EXIT", name=GATHER.format(type="i"))
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
                    name=GATHER.format(type="i"))
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


unittest.main()
