#!/usr/bin/env python3
"""Runs `moe layer` on cases of generate.py, over several layouts of ranks, and compares with transformers' results.

Ids must be equal; rows of y, dx, expert_weights and router_logits within 2e-6 of the expected row's norm; gradients
within 2e-6 of the longest row of their tensor (README.md says why); all layouts must give the same bytes. Exits 1 if
anything does not hold. Needs numpy and safetensors, with --seed also what generate.py needs.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file

HERE = Path(__file__).parent
BOUND = 2e-6
LAYOUTS = ((1, 1), (2, 2), (3, 3), (4, 4), (4, 2), (8, 4))  # ranks, expert-parallel size


def run_layer(program: Path, case: Path, out: Path, ranks: int, expert_parallel: int) -> tuple[bytes, bytes]:
    """Outputs of one run: the bytes of the files it wrote, y.safetensors and g.safetensors in `out`."""
    io = case / "io.safetensors"
    command = [program, "layer", "--hf-config", case / "config.json", "--weights", case, "--input", io,
               "--output", out / "y.safetensors", "--grad-output", io, "--grads", out / "g.safetensors",
               "--ranks", str(ranks), "--ep", str(expert_parallel), "--quiet"]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError(f"exit code {done.returncode}: {done.stderr.strip()}")
    return (out / "y.safetensors").read_bytes(), (out / "g.safetensors").read_bytes()


def rows(values: np.ndarray) -> np.ndarray:
    return values.reshape(-1, values.shape[-1]).astype(np.float64)


def row_error(got: np.ndarray, expected: np.ndarray, longest_row: bool) -> float:
    """Largest distance of a row, relative to the norm of the expected row or of the longest one."""
    if got.shape != expected.shape:
        return np.inf
    if expected.size == 0:
        return 0.0
    distance = np.linalg.norm(rows(got) - rows(expected), axis=1)
    norm = np.linalg.norm(rows(expected), axis=1)
    if longest_row:
        norm = np.full_like(norm, norm.max())
    relative = np.divide(distance, norm, out=np.zeros_like(norm), where=norm > 0)
    relative[(norm == 0) & (distance > 0)] = np.inf
    return float(np.nan_to_num(relative, nan=np.inf).max())


def compare(case: Path, out: Path) -> tuple[dict[str, float], list[str]]:
    """Errors by kind of tensor, and what does not hold."""
    expected, got = load_file(case / "io.safetensors"), load_file(out / "y.safetensors")
    problems = [] if np.array_equal(got["expert_ids"], expected["expert_ids"]) else ["expert_ids differ"]
    errors = {name: row_error(got[name], expected[name], longest_row=False)
              for name in ("y", "dx", "expert_weights", "router_logits")}
    expected, got = load_file(case / "grads.safetensors"), load_file(out / "g.safetensors")
    if got.keys() != expected.keys():
        problems.append(f"gradients of other names: {sorted(got.keys() ^ expected.keys())}")
    errors["grads"] = max(row_error(got[name], expected[name], longest_row=True)
                          for name in got.keys() & expected.keys())
    problems += [f"{name}: {error:.1e}" for name, error in errors.items() if not error <= BOUND]
    return errors, problems


def check(program: Path, case: Path) -> list[str]:
    """What does not hold for a case; prints its largest errors."""
    problems: list[str] = []
    first: tuple[bytes, bytes] | None = None
    with tempfile.TemporaryDirectory() as folder:
        for ranks, expert_parallel in LAYOUTS:
            where = f"ranks {ranks} ep {expert_parallel}"
            try:
                files = run_layer(program, case, Path(folder), ranks, expert_parallel)
            except RuntimeError as error:
                problems.append(f"{where}: {error}")
                continue
            if first is None:
                first = files
                errors, wrong = compare(case, Path(folder))
                problems += [f"{where}: {problem}" for problem in wrong]
                print(f"{case.name:16}", " ".join(f"{name} {error:.1e}" for name, error in errors.items()))
            elif files != first:
                problems.append(f"{where}: other bytes than the first layout's")
    return problems


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("program", type=Path, help="the program moe")
    parser.add_argument("cases", type=Path, nargs="*", help="folders of cases (default: all of data/)")
    parser.add_argument("--seed", type=int, help="make fresh cases of all models from this seed instead")
    parser.add_argument("--count", type=int, default=2, metavar="N", help="fresh cases per model (default 2)")
    options = parser.parse_args()
    if options.seed is not None and options.cases:
        parser.error("--seed makes its own cases")
    with tempfile.TemporaryDirectory() as fresh:
        folders = options.cases or [HERE / "data"]
        if options.seed is not None:
            subprocess.run([sys.executable, HERE / "generate.py", "--out", fresh, "--seed", str(options.seed),
                            "--cases", str(options.count)], check=True, stderr=subprocess.DEVNULL)
            folders = [Path(fresh)]
        cases = sorted(config.parent for folder in folders for config in folder.glob("**/config.json"))
        failed = {case.name: problems for case in cases if (problems := check(options.program.resolve(), case))}
    for name, problems in failed.items():
        print(f"FAILED {name}: {'; '.join(problems)}")
    print(f"{len(cases) - len(failed)} of {len(cases)} cases hold")
    return 0 if cases and not failed else 1


if __name__ == "__main__":
    sys.exit(main())
