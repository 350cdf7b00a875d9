"""cmake/ptx_check.py on PTX with known contents. Run: ptx_check_test.py <ptx_check.py>"""

import pathlib
import subprocess
import sys
import tempfile
import unittest

SCRIPT = sys.argv.pop(1)
GATHER = "_ZN3moe7permute54_GLOBAL__N__5504ba90_15_permute_cuda_cu_c2c19eab_1229512GatherKernelI{type}EEvNS0_10CudaGatherIT_EE"
KERNEL = """.visible .entry {name}(
	.param .align 8 .b8 param_0[64]
)
.maxntid 256
{{
	.reg .b32 	%r<9>;
	@%p1 bra 	$L1;
{body}	ret;
}}
"""
WIDE = "	ld.global.nc.v4.b32 	{%r1, %r2, %r3, %r4}, [%rd1];\n"
HEADER = "kernel\tinstruction\tat_least\twhy\n"
RULE = "moe::permute::GatherKernel\tld\\.global(\\.nc)?\\.v4\\.\t1\t16 bytes\n"


class PtxCheckTest(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name)
        (self.folder / "rules.tsv").write_text(HEADER + RULE)

    def ptx(self, file, **body_of_type):
        text = "".join(KERNEL.format(name=GATHER.format(type=t), body=b) for t, b in body_of_type.items())
        (self.folder / file).write_text(text)

    def run_script(self, *files):
        return subprocess.run([sys.executable, SCRIPT, self.folder / "rules.tsv"] + [self.folder / f for f in files],
                              capture_output=True, text=True, check=False)

    def test_passes_where_every_instance_has_the_instruction(self):
        self.ptx("a.ptx", f=WIDE, i="	mov.b32 	%r1, 0;\n	@%p2 " + WIDE.lstrip())
        result = self.run_script("a.ptx")
        self.assertEqual(result.returncode, 0, result.stdout)
        self.assertIn("2 kernels, 1 rules, 0 failures", result.stdout)

    def test_an_instance_without_it_fails_by_name(self):
        self.ptx("a.ptx", f=WIDE, i="	ld.global.b32 	%r1, [%rd1];\n")
        result = self.run_script("a.ptx")
        self.assertEqual(result.returncode, 1)
        self.assertIn("moe::permute::GatherKernel<int>: 0 of", result.stdout)
        self.assertIn("16 bytes", result.stdout)
        self.assertNotIn("<float>", result.stdout)

    def test_a_comment_or_another_kernels_instruction_does_not_count(self):
        self.ptx("a.ptx", f="	// ld.global.v4.b32\n")
        (self.folder / "b.ptx").write_text(KERNEL.format(name="_ZN3moe5OtherEv", body=WIDE))
        self.assertEqual(self.run_script("a.ptx", "b.ptx").returncode, 1)

    def test_a_rule_may_name_the_first_template_argument(self):
        (self.folder / "rules.tsv").write_text(HEADER + RULE.replace("Kernel", "Kernel<int"))
        self.ptx("a.ptx", f="", i=WIDE)
        self.assertEqual(self.run_script("a.ptx").returncode, 0)
        self.ptx("a.ptx", f=WIDE, i="")
        self.assertEqual(self.run_script("a.ptx").returncode, 1)

    def test_fewer_than_wanted_fail(self):
        (self.folder / "rules.tsv").write_text(HEADER + RULE.replace("\t1\t", "\t2\t"))
        self.ptx("a.ptx", f=WIDE)
        self.assertEqual(self.run_script("a.ptx").returncode, 1)
        self.ptx("a.ptx", f=WIDE + WIDE)
        self.assertEqual(self.run_script("a.ptx").returncode, 0)

    def test_a_rule_without_a_kernel_fails(self):
        (self.folder / "a.ptx").write_text(KERNEL.format(name="_ZN3moe5OtherEv", body=WIDE))
        result = self.run_script("a.ptx")
        self.assertEqual(result.returncode, 1)
        self.assertIn("moe::permute::GatherKernel: in none of the files", result.stdout)

    def test_bad_arguments_say_what_to_do(self):
        self.assertIn("RULES PTX", self.run_script().stderr)
        (self.folder / "rules.tsv").write_text(RULE)
        self.ptx("a.ptx", f=WIDE)
        self.assertIn("must begin with", self.run_script("a.ptx").stderr)


unittest.main()
