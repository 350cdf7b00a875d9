"""Injects faults into runs of `moe train` and checks how they end.

  python3 fault_matrix.py MOE [--mpiexec FILE] [--launchers threads,mpi,hosts,nccl]
                          [--all] [--jobs N] [--timeout SECONDS] [--table]

A case is a phase, a kind, a launcher and the first or last of two ranks: threads, processes of one
host, a process on each of two hosts (fault_hosts.py; there also a link that is cut and a host that
is lost, while the rank is in the phase), or threads with simulated devices over NCCL. Other cases
are of ranks that divide the model, throw, kill and hang on threads and one host. Without --all the
cases cover, for eight of the phases, every pair of these values on threads and one host, and every
value on hosts, on devices and where the model is divided. After the fault a run must end in
--timeout + 2 s (over hosts: its line must come by then), with the exit code of its kind and one
line that names rank, host, phase and step, in a pipeline the micro-batch, and leave no process and
no file. A run with a slow rank must complete, and `moe debug flight` must name the rank. Prints a line for each case that fails, then the counts; with --table
rows for docs/reliability.md. Exit code 1 if one fails.
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
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time

import fault_hosts

KINDS = ["throw", "exit", "kill", "segv", "hang", "slow"]
LINK_KINDS = ["cut", "lost"]  # of hosts: what the test does while the rank is stopped
# Cases of these launchers take long: without --all they cover values, not pairs.
SPARSE = {"hosts", "nccl"}
# Seconds that Open MPI's launcher takes for itself with several hosts, and with one that is silent:
# until TCP gives up, as fault_hosts.py sets it. The line does not wait for it.
LAUNCHER_ENDS, SILENT_HOST_ENDS = 2, 8
COVERED = ["data", "gate", "dispatch", "combine backward", "all-reduce", "optimiser",
           "ckpt-commit", "finalize"]
# Phases that come once or so in a run: its flight need not name a slow rank.
# Runs that divide the model, and places there, in a pipeline with the micro-batch of the step: in
# warm-up, in the steady state, in cool-down, and where ranks wait for one another.
MESHES = {
    "ep": ["--ep", "2"],
    "pp": ["--pp", "2", "--num-layers", "2"],
    "tp": ["--ep", "2", "--tp", "2", "--tensor-leaves", "2"],
    "etp": ["--etp", "2", "--tensor-leaves", "2"],
    "zero": ["--ep", "2", "--zero", "3"],
}
PLACES = {
    "pp": ["gate/0", "combine backward/1", "gate backward/3", "pipeline send", "pipeline receive"],
    "tp": ["tensor rows", "tensor sum"],
    "etp": ["expert rows", "expert sum"],
    "zero": ["gather weights"],
}
RARE = {"start", "ckpt-write", "ckpt-commit", "end report", "finalize"}
RANKS = 2
STEP = 2

Case = collections.namedtuple("Case", "phase kind launcher victim mesh", defaults=["ep"])
# failed: what is wrong, "" for nothing; seconds from the fault to the line and to the end; None: no
# line, no fault seen.
Result = collections.namedtuple("Result", "failed reported seconds code")


def covering(cases, values):
    """Some of `cases`, in which every combination of `values` values of one occurs."""
    def parts_of(case):
        return set(itertools.combinations(enumerate(case), values))

    cases = random.Random(1).sample(cases, len(cases))  # else ties favour the first launcher
    missing = set().union(*map(parts_of, cases))
    chosen = []
    while missing:
        best = max(cases, key=lambda case: len(parts_of(case) & missing))
        missing -= parts_of(best)
        chosen.append(best)
    return chosen


def kinds_of(launcher):
    return KINDS + LINK_KINDS * (launcher == "hosts")


def processes_of(folder):
    found = subprocess.run(["pgrep", "-f", "--", folder + "/"], capture_output=True, text=True,
                           check=False)
    return [int(word) for word in found.stdout.split()]


class Matrix:
    def __init__(self, options, work):
        self.options = options
        self.work = work
        self.text = os.path.join(work, "text")
        words = "the router sends every token to two experts and each answers in turn\n"
        with open(self.text, "w", encoding="ascii") as file:
            file.write((words * 1000)[:40000])

    def command(self, case, folder, hosts):
        # Simulated devices take long for little.
        length, batches = ("8", "2") if case.launcher == "nccl" else ("32", "4")
        kind = "stop" if case.kind in LINK_KINDS else case.kind
        step = "" if case.phase == "start" else f"step={STEP},"
        phase, _, micro_batch = case.phase.partition("/")
        if micro_batch:
            step += f"micro-batch={micro_batch},"
        train = [
            self.options.moe, "train", "--data", self.text, "--num-layers", "1", "--hidden-size",
            "32", "--num-attention-heads", "2", "--num-experts", "4", "--moe-ffn-hidden-size", "32",
            "--seq-length", length, "--micro-batch-size", "2", "--micro-batches", batches,
            "--eval-sequences", batches, "--threads", "1", "--steps", "3", *MESHES[case.mesh],
            "--save", folder + "/save", "--save-interval", "2", "--flight-dir", folder + "/flight",
            "--comm-timeout", str(self.options.timeout), "-q", "--fault",
            f"rank={case.victim},{step}phase={phase},kind={kind}"]
        if case.launcher == "threads":
            return train + ["--ranks", str(RANKS)]
        if case.launcher == "nccl":
            return train + ["--ranks", str(RANKS), "--device", "cuda", "--backend", "nccl"]
        if case.launcher == "hosts":
            return hosts.launcher(self.options.mpiexec) + train
        return [self.options.mpiexec, "-n", str(RANKS)] + train

    def run(self, case):
        folder = os.path.join(self.work, "-".join(map(str, case)).replace(" ", "_"))
        os.makedirs(folder + "/tmp")
        hosts = fault_hosts.Hosts(folder) if case.launcher == "hosts" else None
        try:
            return self.run_in(case, folder, hosts)
        finally:
            if hosts:
                hosts.end()
            shutil.rmtree(folder, ignore_errors=True)

    def run_in(self, case, folder, hosts):
        environment = {
            name: value for name, value in os.environ.items()
            if not re.match(r"MOE_|OMPI_COMM_|PMI_|PMIX_|SLURM_|RANK$|WORLD_SIZE$|LOCAL_RANK$", name)}
        environment.update(TMPDIR=folder + "/tmp", NO_COLOR="1", OMPI_ALLOW_RUN_AS_ROOT="1",
                           OMPI_ALLOW_RUN_AS_ROOT_CONFIRM="1",
                           OMPI_MCA_rmaps_base_oversubscribe="1", CUSIM_DEVICES=str(RANKS))
        lines, fault_at, line_at = [], [], []
        process = subprocess.Popen(
            self.command(case, folder, hosts), stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE, text=True, errors="replace", env=environment,
            start_new_session=True)

        def read():
            for line in process.stderr:
                if "injected fault" in line and not fault_at:
                    self.end_link(case, folder, hosts)
                    fault_at.append(time.monotonic())
                elif line.startswith("moe train: ") and not line_at:
                    line_at.append(time.monotonic())
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
        reported = line_at[0] - fault_at[0] if fault_at and line_at else None
        if late:
            wrong = ["did not end"]
        else:
            wrong = self.check(case, folder, code, lines, seconds)
            if reported is not None and reported > self.options.timeout + 2:
                wrong.append(f"reported {reported:.1f} s after the fault")
        wrong += self.left_behind(case, folder)
        if wrong and self.options.verbose:
            wrong += ["stderr: " + " | ".join(lines[-12:])]
        return Result("; ".join(wrong), reported, seconds, code)

    def end_link(self, case, folder, hosts):
        """Cuts the link of the victim's host, or ends the host; then its rank goes on."""
        if case.kind == "cut":
            hosts.cut(fault_hosts.NAMES[case.victim])
            for process in processes_of(folder):
                os.kill(process, signal.SIGCONT)
        if case.kind == "lost":
            hosts.lose(fault_hosts.NAMES[case.victim])

    def check(self, case, folder, code, lines, seconds):
        wrong = []
        codes = self.codes(case)
        if code not in codes:
            wrong.append(f"exit code {code}, expected one of {codes}")
        if case.kind == "slow":
            return wrong + self.check_slow(case, folder)
        if seconds is None:
            return wrong + ["no fault came"]
        ends = self.options.timeout + 2
        if case.launcher == "hosts":
            ends += SILENT_HOST_ENDS if case.kind in LINK_KINDS else LAUNCHER_ENDS
        if seconds > ends:
            wrong.append(f"ended {seconds:.1f} s after the fault")
        own = [line for line in lines if line.startswith("moe train: ")]
        pattern = self.pattern(case)
        if pattern and (len(own) != 1 or not re.search(pattern, own[0])):
            wrong.append(f"not one line with {pattern}: {own}")
        return wrong

    def codes(self, case):
        own = {"throw": [1], "exit": [70], "kill": [137], "segv": [139], "hang": [8], "slow": [0],
               "cut": [8], "lost": [8]}
        codes = own[case.kind]
        # A launcher that sees a rank die ends the others, with a code of its own, unless one of
        # them notices first.
        if case.launcher in ("mpi", "hosts") and case.kind in ("exit", "kill", "segv"):
            codes = codes + [7, 8, 9, 11, 15]
        return codes

    def pattern(self, case):
        """Of the one line; empty where no process is left that could print it."""
        place = r"on host [^ ]+ in "
        phase, _, micro_batch = case.phase.partition("/")
        within = rf"\(.*micro-batch {micro_batch}," if micro_batch else r"\("
        if case.kind == "throw":
            return (rf"rank {case.victim} {place}{re.escape(phase)}( {within}.*step \d+\))?: "
                    "injected fault: throw")
        came = rf" [\d.ms]+ after it came to (\w+ \()?{re.escape(phase)}"
        if case.phase != "start":
            came += r"[ ,)].*step \d+\)"
        process = rf"rank {case.victim} \(process \d+\) "
        if case.kind == "hang" or case.kind in LINK_KINDS:
            other = RANKS - 1 - case.victim
            waited = rf"rank {other} {place}.*: waited \d.*s for rank {case.victim}\b.*deadline"
            waited += f".*{process}does not fail{came}" if case.launcher == "mpi" else ""
            if case.mesh != "pp":
                return waited
            # A stage that hangs has asked for rows, and may say first that it waits for the other.
            left = f".*rank {case.victim} did not return" if case.launcher == "threads" else ""
            return (waited + rf"|rank {case.victim} {place}.*: waited \d.*s for rank {other}\b.*"
                    f"deadline{left}")
        if case.launcher in ("threads", "nccl"):
            return ""
        return (process + r"(was killed by signal \d+ \([^)]*\)|is gone without a word|"
                rf"left with exit code 70 and without a word){came}")

    def check_slow(self, case, folder):
        shown = subprocess.run([self.options.moe, "debug", "flight", folder + "/flight", "-o", "json"],
                               capture_output=True, text=True, check=False)
        if shown.returncode != 0:
            return ["moe debug flight: " + shown.stderr.strip()]
        straggler = json.loads(shown.stdout)["straggler"]
        if case.phase in RARE or (straggler and straggler["rank"] == case.victim):
            return []
        return [f"moe debug flight names {straggler}"]

    def left_behind(self, case, folder):
        for _ in range(50):
            found = processes_of(folder)
            lost = fault_hosts.NAMES[case.victim] if case.kind == "lost" else None
            temporary = [name for name in os.listdir(folder + "/tmp") if not lost or lost not in name]
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


def times_of(values):
    values = [value for value in values if value is not None]
    return f"{statistics.median(values):.2f}, {max(values):.2f}" if values else "–"


def print_table(results):
    print("| launcher | kind | cases | passed | s to the line: median, worst | s to the end |\n"
          "|---|---|---|---|---|---|")
    def launcher_of(case):
        return case.launcher + (", divided" if case.mesh != "ep" else "")

    rows = dict.fromkeys((launcher_of(c), c.kind) for c in results)
    for launcher, kind in sorted(rows, key=lambda row: (row[0], (KINDS + LINK_KINDS).index(row[1]))):
        of_row = [r for c, r in results.items() if (launcher_of(c), c.kind) == (launcher, kind)]
        passed = sum(not r.failed for r in of_row)
        print(f"| {launcher} | {kind} | {len(of_row)} | {passed} | "
              f"{times_of(r.reported for r in of_row)} | {times_of(r.seconds for r in of_row)} |")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("moe")
    parser.add_argument("--mpiexec", default="")
    parser.add_argument("--launchers", default="threads")
    parser.add_argument("--all", action="store_true")
    parser.add_argument("--table", action="store_true")
    parser.add_argument("--verbose", action="store_true")
    parser.add_argument("--jobs", type=int, default=3)
    parser.add_argument("--timeout", type=float, default=2)
    options = parser.parse_args()
    options.moe = os.path.abspath(options.moe)
    launchers = options.launchers.split(",")
    if "hosts" in launchers:
        with tempfile.TemporaryDirectory() as work:
            refusal = fault_hosts.refusal(work)
        if refusal:
            print("SKIPPED: hosts: " + refusal)
            launchers.remove("hosts")
    phases = phases_of(options.moe)
    if not set(COVERED + list(RARE)) <= set(phases):
        sys.exit(f"phases of this test are unknown to the program, which has {phases}")
    phases = [phase for phase in phases if phase not in sum(PLACES.values(), [])]
    cases = [Case(phase, kind, launcher, victim) for launcher in launchers
             for phase, kind, victim in itertools.product(
                 phases if options.all else COVERED, kinds_of(launcher), (0, RANKS - 1))]
    meshed = [Case(place, kind, launcher, victim, mesh) for mesh, places in PLACES.items()
              for place, kind, launcher, victim in itertools.product(
                  places, ["throw", "kill", "hang"],
                  [name for name in launchers if name not in SPARSE], (0, RANKS - 1))]
    if not options.all:
        dense = [case for case in cases if case.launcher not in SPARSE]
        cases = covering(dense, 2) + [
            case for launcher in launchers if launcher in SPARSE
            for case in covering([case for case in cases if case.launcher == launcher], 1)]
        meshed = covering(meshed, 1)
    cases += meshed
    before = shared_memory()
    with tempfile.TemporaryDirectory() as work:
        matrix = Matrix(options, work)
        with concurrent.futures.ThreadPoolExecutor(options.jobs) as pool:
            results = dict(zip(cases, pool.map(matrix.run, cases)))
    failed = {case: result for case, result in results.items() if result.failed}
    for case, result in failed.items():
        print(f"FAILED: {case.phase}, {case.kind}, {case.launcher}, rank {case.victim}, {case.mesh}: "
              f"{result.failed}")
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
