"""Injects faults into runs of `moe train` and checks how they end.

  python3 fault_matrix.py MOE [--mpi openmpi|mpich --mpiexec FILE] [--launchers threads,mpi]
                          [--all] [--jobs N] [--timeout SECONDS] [--table]

A case is a phase, a kind, a launcher and the first or last of two ranks. Without --all the cases
cover every pair of these values for eight of the phases. After the fault a run must end in
--timeout + 2 s, with the exit code of its kind and one line that names rank, host, phase and step,
and leave no process and no file. A run with a slow rank must complete, and `moe debug flight` must
name the rank. Prints a line for each case that fails, then the counts; with --table rows for
docs/reliability.md. Exit code 1 if one fails.
"""

import argparse
import collections
import concurrent.futures
import itertools
import json
import os
import random
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time

KINDS = ["throw", "exit", "kill", "segv", "hang", "slow"]
COVERED = ["data", "gate", "dispatch", "combine backward", "all-reduce", "optimiser",
           "ckpt-commit", "finalize"]
# Phases that come once or so in a run: its flight need not name a slow rank.
RARE = {"start", "ckpt-write", "ckpt-commit", "end report", "finalize"}
RANKS = 2
STEP = 2

Case = collections.namedtuple("Case", "phase kind launcher victim")
# failed: what is wrong, "" for nothing; seconds: from the fault to the end; None: no fault seen.
Result = collections.namedtuple("Result", "failed seconds code")


def pairs_of(case):
    return set(itertools.combinations(enumerate(case), 2))


def covering(cases):
    """Some of `cases`, in which every pair of values of one occurs."""
    cases = random.Random(1).sample(cases, len(cases))  # else ties favour the first launcher
    missing = set().union(*map(pairs_of, cases))
    chosen = []
    while missing:
        best = max(cases, key=lambda case: len(pairs_of(case) & missing))
        missing -= pairs_of(best)
        chosen.append(best)
    return chosen


class Matrix:
    def __init__(self, options, work):
        self.options = options
        self.work = work
        self.text = os.path.join(work, "text")
        words = "the router sends every token to two experts and each answers in turn\n"
        with open(self.text, "w", encoding="ascii") as file:
            file.write((words * 1000)[:40000])

    def command(self, case, folder):
        step = "" if case.phase == "start" else f"step={STEP},"
        train = [
            self.options.moe, "train", "--data", self.text, "--num-layers", "1", "--hidden-size",
            "32", "--num-attention-heads", "2", "--num-experts", "4", "--moe-ffn-hidden-size", "32",
            "--seq-length", "32", "--micro-batch-size", "2", "--micro-batches", "4",
            "--eval-sequences", "4", "--threads", "1", "--steps", "3", "--ep", str(RANKS),
            "--save", folder + "/save", "--save-interval", "2", "--flight-dir", folder + "/flight",
            "--comm-timeout", str(self.options.timeout), "-q", "--fault",
            f"rank={case.victim},{step}phase={case.phase},kind={case.kind}"]
        if case.launcher == "threads":
            return train + ["--ranks", str(RANKS)]
        return [self.options.mpiexec, "-n", str(RANKS)] + train

    def run(self, case):
        folder = os.path.join(self.work, "-".join(map(str, case)).replace(" ", "_"))
        os.makedirs(folder + "/tmp")
        environment = {
            name: value for name, value in os.environ.items()
            if not re.match(r"MOE_|OMPI_COMM_|PMI_|PMIX_|SLURM_|RANK$|WORLD_SIZE$|LOCAL_RANK$", name)}
        environment.update(TMPDIR=folder + "/tmp", NO_COLOR="1", OMPI_ALLOW_RUN_AS_ROOT="1",
                           OMPI_ALLOW_RUN_AS_ROOT_CONFIRM="1",
                           OMPI_MCA_rmaps_base_oversubscribe="1")
        lines, fault_at = [], []
        process = subprocess.Popen(
            self.command(case, folder), stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE, text=True, errors="replace", env=environment,
            start_new_session=True)

        def read():
            for line in process.stderr:
                if "injected fault" in line and not fault_at:
                    fault_at.append(time.monotonic())
                lines.append(line.rstrip("\n"))

        reader = threading.Thread(target=read, daemon=True)
        reader.start()
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            pass
        ended = time.monotonic()
        late = process.poll() is None
        if late:
            os.killpg(process.pid, 9)
            process.wait()
        reader.join(5)
        code = process.returncode if process.returncode >= 0 else 128 - process.returncode
        seconds = ended - fault_at[0] if fault_at else None
        wrong = ["did not end"] if late else self.check(case, folder, code, lines, seconds)
        wrong += self.left_behind(folder)
        if wrong and self.options.verbose:
            wrong += ["stderr: " + " | ".join(lines[-12:])]
        shutil.rmtree(folder, ignore_errors=True)
        return Result("; ".join(wrong), seconds, code)

    def check(self, case, folder, code, lines, seconds):
        wrong = []
        codes = self.codes(case)
        if code not in codes:
            wrong.append(f"exit code {code}, expected one of {codes}")
        if case.kind == "slow":
            return wrong + self.check_slow(case, folder)
        if seconds is None:
            return wrong + ["no fault came"]
        if seconds > self.options.timeout + 2:
            wrong.append(f"ended {seconds:.1f} s after the fault")
        own = [line for line in lines if line.startswith("moe train: ")]
        pattern = self.pattern(case)
        if pattern and (len(own) != 1 or not re.search(pattern, own[0])):
            wrong.append(f"not one line with {pattern}: {own}")
        return wrong

    def codes(self, case):
        own = {"throw": [1], "exit": [70], "kill": [137], "segv": [139], "hang": [8], "slow": [0]}
        codes = own[case.kind]
        # A launcher that sees a rank die ends the others, with a code of its own, unless one of
        # them notices first.
        if case.launcher == "mpi" and case.kind in ("exit", "kill", "segv"):
            codes = codes + [7, 8, 9, 11, 15]
        return codes

    def pattern(self, case):
        """Of the one line; empty where no process is left that could print it."""
        place = r"on host [^ ]+ in "
        if case.kind == "throw":
            return (rf"rank {case.victim} {place}{re.escape(case.phase)}( \(.*step \d+\))?: "
                    "injected fault: throw")
        if case.kind == "hang":
            other = RANKS - 1 - case.victim
            return (rf"rank {other} {place}.*: waited \d.*s for rank {case.victim}\b.*deadline")
        if case.launcher == "threads":
            return ""
        return rf"rank {case.victim} \(process \d+\) (was killed by signal|is gone|left with exit code)"

    def check_slow(self, case, folder):
        shown = subprocess.run([self.options.moe, "debug", "flight", folder + "/flight", "-o", "json"],
                               capture_output=True, text=True, check=False)
        if shown.returncode != 0:
            return ["moe debug flight: " + shown.stderr.strip()]
        straggler = json.loads(shown.stdout)["straggler"]
        if case.phase in RARE or (straggler and straggler["rank"] == case.victim):
            return []
        return [f"moe debug flight names {straggler}"]

    def left_behind(self, folder):
        for _ in range(50):
            found = subprocess.run(["pgrep", "-f", "--", folder + "/"], capture_output=True, text=True,
                                   check=False).stdout.split()
            temporary = os.listdir(folder + "/tmp")
            if not found and not temporary:
                return []
            time.sleep(0.02)
        return [f"left processes {found}"] * bool(found) + [f"left {temporary}"] * bool(temporary)


def phases_of(moe):
    """The phases that the program lists where it refuses one."""
    refused = subprocess.run(
        [moe, "train", "--data", __file__, "--ranks", "1", "--fault", "rank=0,phase=?,kind=throw"],
        capture_output=True, text=True, check=False)
    return refused.stderr.strip().rpartition("expected one of ")[2].split(", ")


def shared_memory():
    """Files of this user in shared memory, where MPI and the runs might leave some."""
    folder = "/dev/shm"
    if not os.path.isdir(folder):
        return set()
    return {entry.name for entry in os.scandir(folder)
            if entry.stat(follow_symlinks=False).st_uid == os.getuid()}


def left_in_memory(before):
    for _ in range(100):  # of other jobs of this user some may be there for moments
        left = shared_memory() - before
        if not left:
            break
        time.sleep(0.1)
    return left


def print_table(results):
    print("| launcher | kind | cases | passed | median s | worst s |\n|---|---|---|---|---|---|")
    for launcher, kind in itertools.product(sorted({c.launcher for c in results}), KINDS):
        of_row = [r for c, r in results.items() if (c.launcher, c.kind) == (launcher, kind)]
        seconds = [r.seconds for r in of_row if r.seconds is not None]
        times = (f"{statistics.median(seconds):.2f} | {max(seconds):.2f}" if seconds else "– | –")
        passed = sum(not r.failed for r in of_row)
        print(f"| {launcher} | {kind} | {len(of_row)} | {passed} | {times} |")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("moe")
    parser.add_argument("--mpi", default="openmpi")
    parser.add_argument("--mpiexec", default="")
    parser.add_argument("--launchers", default="")
    parser.add_argument("--all", action="store_true")
    parser.add_argument("--table", action="store_true")
    parser.add_argument("--verbose", action="store_true")
    parser.add_argument("--jobs", type=int, default=3)
    parser.add_argument("--timeout", type=float, default=2)
    options = parser.parse_args()
    options.moe = os.path.abspath(options.moe)
    launchers = ["threads"] + ["mpi"] * bool(options.mpiexec)
    if options.launchers:
        launchers = options.launchers.split(",")
    phases = phases_of(options.moe)
    if not set(COVERED + list(RARE)) <= set(phases):
        sys.exit(f"phases of this test are unknown to the program, which has {phases}")
    cases = [Case(*values) for values in itertools.product(
        phases if options.all else COVERED, KINDS, launchers, (0, RANKS - 1))]
    if not options.all:
        cases = covering(cases)
    before = shared_memory()
    with tempfile.TemporaryDirectory() as work:
        matrix = Matrix(options, work)
        with concurrent.futures.ThreadPoolExecutor(options.jobs) as pool:
            results = dict(zip(cases, pool.map(matrix.run, cases)))
    failed = {case: result for case, result in results.items() if result.failed}
    for case, result in failed.items():
        print(f"FAILED: {case.phase}, {case.kind}, {case.launcher}, rank {case.victim}: {result.failed}")
    left = left_in_memory(before)
    if left:
        print(f"FAILED: left in /dev/shm: {sorted(left)}")
    if options.table:
        print_table(results)
    seconds = [r.seconds for r in results.values() if r.seconds is not None]
    print(f"{len(results)} cases, {len(failed)} failed; from the fault to the end "
          f"{statistics.median(seconds):.2f} s, at most {max(seconds):.2f} s")
    sys.exit(bool(failed or left))


if __name__ == "__main__":
    main()
