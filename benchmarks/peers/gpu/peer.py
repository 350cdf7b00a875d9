"""What the peers share: arguments, timing by CUDA events, checks, JSON lines on standard output.

A line has peer, op, shape and status ("ok", "wrong", "error"); where it was timed time_us (median),
time_us_min, time_us_max, iters and tflops_per_s or gbytes_per_s; where it was checked error, the
norm of the difference over the norm of what was expected.
"""

import argparse
import json
import statistics
import sys
import time

import torch


def arguments(description, cuda_shape, cpu_shape):
    """Parsed flags: device, rounds, seed and one per size, by default those of the device."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--device", default="cuda", help="cpu: small shapes, a test of the peer")
    parser.add_argument("--rounds", type=int, default=30, help="timed calls of each way [30]")
    parser.add_argument("--seed", type=int, default=0)
    for name, size in cuda_shape.items():
        parser.add_argument(f"--{name}", type=int, help=f"[{size}; cpu {cpu_shape[name]}]")
    args = parser.parse_args()
    for name, size in (cpu_shape if args.device == "cpu" else cuda_shape).items():
        if getattr(args, name) is None:
            setattr(args, name, size)
    args.shape = {name: getattr(args, name) for name in cuda_shape}
    torch.manual_seed(args.seed)
    return args


def random(args, *shape, scale=1.0):
    """bfloat16 from a normal distribution: values of zeros would make a GPU's clock rise."""
    return torch.randn(*shape, device=args.device, dtype=torch.bfloat16) * scale


def count(ids, experts):
    """How often each of 0 .. experts - 1 is in `ids`; bincount would wait for the device."""
    counts = torch.zeros(experts, dtype=torch.int64, device=ids.device)
    return counts.scatter_add_(0, ids.view(-1), torch.ones_like(ids).view(-1))


class _Clock:
    """Marks in the stream (CUDA) or on the host (CPU), read after everything has run."""

    def __init__(self, device):
        self._cuda = device != "cpu"

    def mark(self):
        if not self._cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def wait(self):
        if self._cuda:
            torch.cuda.synchronize()

    def microseconds(self, begin, end):
        return begin.elapsed_time(end) * 1e3 if self._cuda else (end - begin) * 1e6


def time_ways(args, ways, warmup=3):
    """{name: [us]} of the callables in `ways`, interleaved: each round calls every way once."""
    clock = _Clock(args.device)
    for way in ways.values():
        for _ in range(warmup):
            way(0)
    clock.wait()
    marks = {name: [] for name in ways}
    for call in range(args.rounds):
        for name, way in ways.items():
            begin = clock.mark()
            way(call)
            marks[name].append((begin, clock.mark()))
    clock.wait()
    return {name: [clock.microseconds(*pair) for pair in pairs] for name, pairs in marks.items()}


def relative_error(got, expected):
    """Norm of the difference over the norm of `expected`, in float64; NaN counts as infinite."""
    got, expected = got.detach().double(), expected.detach().double()
    error = ((got - expected).norm() / expected.norm()).item()
    return error if error == error else float("inf")


class Report:
    """Writes the lines of one peer program; `close` is its exit code."""

    def __init__(self, op, args):
        self._op, self._args, self._code = op, args, 0

    def add(self, peer, times=None, operations=None, bytes_moved=None, error=None, bound=None):
        """One way. Above `bound`, `error` makes the line "wrong" and the exit code 1."""
        line = {"schema": "moe.peer/1", "peer": peer, "op": self._op, "shape": self._args.shape}
        if times:
            median = statistics.median(times)
            line |= {"time_us": median, "time_us_min": min(times), "time_us_max": max(times),
                     "iters": len(times)}
            if operations:
                line["tflops_per_s"] = operations / median / 1e6
            if bytes_moved:
                line["gbytes_per_s"] = bytes_moved / median / 1e3
        if error is not None:
            line |= {"error": error, "bound": bound}
        wrong = error is not None and not error <= bound
        self._write(line | {"status": "wrong" if wrong else "ok"}, failed=wrong)

    def fail(self, peer, problem):
        """A way that could not run."""
        text = (str(problem).splitlines() or [""])[0][:200]
        self._write({"schema": "moe.peer/1", "peer": peer, "op": self._op, "status": "error",
                     "message": f"{type(problem).__name__}: {text}"}, failed=True)

    def close(self):
        return self._code

    def _write(self, line, failed):
        if failed:
            self._code = 1
            print(f"{line['peer']}: {line['status']}: "
                  f"{line.get('message', line.get('error'))}", file=sys.stderr)
        print(json.dumps(line), flush=True)


def runnable(report, ways, results):
    """Those of `ways` that run: each is called once, its result kept in `results`."""
    good = {}
    for name, way in ways.items():
        try:
            results[name] = way(0)
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            good[name] = way
        except (RuntimeError, AttributeError, NotImplementedError, TypeError) as problem:
            report.fail(name, problem)
    return good
