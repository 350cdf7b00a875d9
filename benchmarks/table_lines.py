"""What the table programs share: a clean environment, programs that are run or kept and asked,
rounds in which the core was not ours, and cells with quartiles.

A round is dropped when the loop between its parts was more than 10 % slower than the fastest. When
fewer than three are left, the quietest three are used and the row is marked with `!`.
"""
import argparse
import json
import os
import platform
import select
import signal
import statistics
import subprocess
import sys

CORES = len(os.sched_getaffinity(0))
RUN_SECONDS = 300
# Settings that restrict each library to AVX2 on newer CPUs: ours, oneDNN (its own name and
# PyTorch's copy), PyTorch's own loops, MKL, OpenBLAS.
AVX2 = {"MOE_SIMD": "AVX2", "DNNL_MAX_CPU_ISA": "AVX2", "ONEDNN_MAX_CPU_ISA": "AVX2",
        "ATEN_CPU_CAPABILITY": "avx2", "MKL_ENABLE_INSTRUCTIONS": "AVX2",
        "OPENBLAS_CORETYPE": "Haswell"}
# Variables that force kernels of an older machine on us or on a peer.
SLOWING = ("OPENBLAS_L2_SIZE", *AVX2)


held = {}  # restricts to AVX2 once --avx2 was given


def clean_environment(**more):
    """Without what slows ours or a peer, but for what a flag asks for."""
    kept = {name: text for name, text in os.environ.items() if name not in SLOWING}
    return kept | held | more


def one_thread():
    """For libraries that would else start a thread for each core."""
    return clean_environment(OMP_NUM_THREADS="1", OPENBLAS_NUM_THREADS="1", MKL_NUM_THREADS="1")


def output(command, env):
    """What a program writes to standard output; None if it did not end in time."""
    with subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                          text=True, start_new_session=True) as process:
        try:
            stdout, stderr = process.communicate(timeout=RUN_SECONDS)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)  # including the ranks that mpirun started
            process.communicate()
            return None
    if process.returncode != 0:
        sys.exit(f"{' '.join(command)}: exit code {process.returncode}\n{stdout}{stderr}")
    return stdout


def run(command, env):
    """The rows that a program writes as JSON lines; None if it did not end in time."""
    text = output(command, env)
    return text and [json.loads(line) for line in text.splitlines() if line.startswith("{")]


def kernels(command, calls, env):
    """{name: medians over `calls` calls}, of a command of benchmarks/kernel_bench.cc."""
    text = output(command + [f"--benchmark_repetitions={calls}", "--benchmark_min_time=0",
                             "--benchmark_min_warmup_time=0", "--benchmark_format=json"], env)
    return {row["run_name"].split("/")[1]: row for row in json.loads(text)["benchmarks"]
            if row.get("aggregate_name", "median") == "median"}


class Worker:
    """A program that answers each line with a line of JSON, so that its start is not in a round."""

    def __init__(self, command):
        self._command = command
        self._process = subprocess.Popen(command, env=one_thread(), stdin=subprocess.PIPE,
                                         stdout=subprocess.PIPE, text=True)

    def ask(self, request):
        """The answer to `request`, a line or what becomes one as JSON. A worker that fails, is late
        or says "error" ends the program: a table without it would look complete."""
        line = request if isinstance(request, str) else json.dumps(request)
        try:
            print(line, file=self._process.stdin, flush=True)
            ready, _, _ = select.select([self._process.stdout], [], [], RUN_SECONDS)
            text = self._process.stdout.readline() if ready else ""
        except BrokenPipeError:
            text = ""
        answer = json.loads(text) if text else {"error": "no answer"}
        if "error" in answer:
            self._process.kill()
            sys.exit(f"{' '.join(self._command)}: {line}: {answer['error']}")
        return answer


class Core:
    """Pins this program and all that it starts to a core, and says how fast that is."""

    def __init__(self, args, cpu_clock=False):
        allowed = sorted(os.sched_getaffinity(0))
        if args.core >= 0 and args.core not in allowed:
            sys.exit(f"--core is {args.core}, expected one of {allowed}")
        held.update(AVX2 if args.avx2 else {})
        os.sched_setaffinity(0, {args.core if args.core >= 0 else allowed[-1]})
        self._loop = Worker([args.fma_peak])
        self._speed = "gflops_per_cpu_s" if cpu_clock else "gflops_per_s"
        self._peaks = []

    def rounds(self, args, measure):
        """What measure() gives in each round that is used (quiet), and the mark. Between its parts it
        calls check()."""
        rounds = []
        for _ in range(args.rounds):
            self._peaks = []
            self.check()
            result = measure()
            # Seconds for 1e9 operations when the core was slowest.
            rounds.append((1 / min(self._peaks), result))
        return quiet(rounds, min(calibration for calibration, _ in rounds))

    def check(self):
        """GFLOP/s of a loop of multiply-adds, now."""
        self._peaks.append(self._loop.ask("")[self._speed])
        return self._peaks[-1]

    def peak(self, dtype):
        """GFLOP/s of what products of `dtype` run on, now."""
        return self._loop.ask(dtype)[self._speed]


def core_arguments(description):
    """Flags of the tables that keep to one core."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--fma-peak", required=True, help="benchmarks/fma_peak.cc, compiled")
    parser.add_argument("--core", type=int, default=-1, help="-1: the last")
    parser.add_argument("--avx2", action="store_true", help="hold ours and the peers to AVX2")
    parser.add_argument("--rounds", type=int, default=7)
    return parser


def quiet(rounds, fastest):
    """Of (calibration, times) pairs, the times of rounds in which the cores were ours, and a mark
    when they were too few. Calibration is a time: the longer, the more was taken."""
    kept = [times for calibration, times in rounds if calibration <= 1.1 * fastest]
    if len(kept) >= 3:
        return kept, ""
    return [times for _, times in sorted(rounds, key=lambda entry: entry[0])[:3]], "!"


def spread(values, form):
    """Median and, in brackets, quartiles."""
    low, middle, high = (statistics.quantiles(values, n=4) if len(values) > 1 else values * 3)
    return f"{middle:{form}} ({low:{form}}–{high:{form}})"


def machine():
    """The CPU's name, its cores, and what it is held to."""
    with open("/proc/cpuinfo", encoding="utf-8") as cpuinfo:
        models = [line.split(":", 1)[1].strip() for line in cpuinfo
                  if line.startswith("model name")]
    only = " with AVX2 alone" if held else ""
    return f"{models[0] if models else platform.machine()}{only}, {CORES} cores"


def add_kernels(parser):
    """The flag of the tables whose kernels kernel_bench measures."""
    parser.add_argument("--kernel-bench", required=True,
                        help="benchmarks/kernel_bench.cc, compiled")


def add_torch(parser):
    """Flags of the tables that have PyTorch as a peer."""
    parser.add_argument("--moe", required=True, help="the program `moe`")
    parser.add_argument("--python", action="append", default=[],
                        help="one that has torch; more than once: versions beside each other")


def workers(args, peer, module, script):
    """{"PEER VERSION": worker of benchmarks/peers/cpu/}, of each --python that has the module; what
    has none is said and left out."""
    found = {}
    for python in args.python:
        version = subprocess.run(
            [python, "-c", f"from importlib.metadata import version; import {module}; "
             f"print(version('{module}'))"], capture_output=True, text=True, check=False)
        if version.returncode != 0:
            print(f"No {peer} in {python}: its column is missing.\n")
            continue
        path = os.path.join(os.path.dirname(__file__), "peers", "cpu", script)
        found[f"{peer} {version.stdout.split()[-1]}"] = Worker([python, path])
    return found


def torch_workers(args, script):
    return workers(args, "PyTorch", "torch", script)


def head(columns):
    """The first two lines of a Markdown table."""
    print(f"| {' | '.join(columns)} |\n|{'---|' * len(columns)}")


def row(cells):
    print(f"| {' | '.join(str(cell) for cell in cells)} |", flush=True)
