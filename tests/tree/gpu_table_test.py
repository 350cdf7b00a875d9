#!/usr/bin/env python3
"""scripts/gpu_table.py: ratios, goals, what is missing and failed steps.

Usage: gpu_table_test.py PATH_OF_GPU_TABLE
"""

import json
import pathlib
import subprocess
import sys
import tempfile

SELECT = {"op": "gate", "pass": "forward", "kernel": "select", "dtype": "bf16", "tokens": 65536,
          "experts": 256, "topk": 8, "slots": 524288, "size_bytes": 80_000_000, "time_us": 25.0,
          "memcpy_gbytes_per_s": 4000.0, "status": "ok"}
PLAN = SELECT | {"kernel": "plan", "time_us": 10.0, "memcpy_gbytes_per_s": None}
BACKWARD = SELECT | {"kernel": "gate", "pass": "backward", "dtype": "f32", "time_us": 2000.0}
GEMM = {"op": "gemm", "product": "forward", "experts": 128, "hidden": 4096, "ffn": 1024,
        "rows": 262144, "gflops_per_s": 400_000.0, "peak_gflops_per_s": None, "status": "ok"}
INPUT_GRAD = GEMM | {"product": "input_grad", "peak_gflops_per_s": 1_600_000.0}
PEERS = [
    {"peer": "torch softmax, topk", "op": "gate", "time_us": 100.0, "status": "ok"},
    {"peer": "cuBLAS 8192^3", "op": "gemm", "tflops_per_s": 800.0, "status": "ok"},
    {"peer": "torch._grouped_mm", "op": "gemm", "tflops_per_s": 500.0, "status": "ok"},
    {"peer": "triton forward", "op": "layer", "time_us": 12345.0, "status": "ok"},
    {"peer": "torch.matmul loop", "op": "gemm", "tflops_per_s": 5000.0, "status": "wrong"},
]
# Cells that are apart by two spaces or more.
EXPECTED = [
    ["an H200"],
    ["what", "ours", "against", "reaches", "ratio", "goal", "met"],
    ["gate T 65536 E 256 k 8 bf16", "25 us", "copy of its bytes", "20 us", "80%", "<= 20 us", "NO"],
    ["25 us", "torch softmax, topk", "100 us", "400%"],
    ["plan T 65536 E 256 k 8, 524288 slots", "10 us", "<= 15 us", "yes"],
    ["gate with scores, backward, f32", "2 ms", "copy of its bytes", "20 us", "1%"],
    ["permute", "-", ">= 85%", "NO"],
    ["combine", "-", ">= 85%", "NO"],
    ["grouped GEMM forward E 128 H 4096 F 1024 N 262144", "400 TFLOP/s",
     "cuBLAS, one product", "800 TFLOP/s", "50%", ">= 45%", "yes"],
    ["400 TFLOP/s", "cuBLAS 8192^3", "800 TFLOP/s", "50%"],
    ["400 TFLOP/s", "torch._grouped_mm", "500 TFLOP/s", "80%"],
    ["grouped GEMM input_grad", "400 TFLOP/s", "cuBLAS, one product", "1600 TFLOP/s", "25%"],
    ["layer forward", "-", "triton", "12.3 ms"],
    ["FAILED", "layer: exit code 10 after 2 s: moe: no GPU"],
]


def main():
    with tempfile.TemporaryDirectory() as folder:
        out = pathlib.Path(folder)
        (out / "gate.json").write_text(json.dumps([SELECT, PLAN, BACKWARD]))
        (out / "gemm.json").write_text(json.dumps([GEMM, INPUT_GRAD]))
        (out / "permute.json").write_text("[{")  # cut off
        lines = [json.dumps(line) for line in PEERS]
        (out / "torch.jsonl").write_text("\n".join(lines + ['{"peer": ']))
        (out / "steps.tsv").write_text("device\t0\t1\tan H200\nlayer\t10\t2\tmoe: no GPU\n")
        run = subprocess.run([sys.executable, sys.argv[1], folder], capture_output=True, text=True,
                             check=False)
    got = [[cell.strip() for cell in line.split("  ") if cell.strip()]
           for line in run.stdout.splitlines()]
    last = got.pop()[0]
    assert got == EXPECTED, f"{run.stdout}{run.stderr}"
    assert last.startswith("1 of 2 steps ran, 2 of 5 goals met, 3 s; "), last
    assert run.returncode == 1, run.returncode


if __name__ == "__main__":
    main()
