"""What the PyTorch peers share: one thread, and an answer of JSON for each request of JSON."""
import json
import os
import statistics
import sys
import time

os.environ["OMP_NUM_THREADS"] = "1"  # read when torch is loaded

import torch  # noqa: E402

torch.set_num_threads(1)


def milliseconds(ways, calls):
    """{name: median ms} of the callables in `ways`, interleaved: every call is one of each."""
    times = {name: [] for name in ways}
    for _ in range(calls):
        for name, way in ways.items():
            begin = time.perf_counter()
            way()
            times[name].append(1e3 * (time.perf_counter() - begin))
    return {name: statistics.median(values) for name, values in times.items()}


def relative_error(got, expected):
    """Norm of the difference over the norm of `expected`, in float64; NaN counts as infinite."""
    got, expected = got.detach().double(), expected.detach().double()
    error = ((got - expected).norm() / expected.norm()).item()
    return error if error == error else float("inf")


def serve(prepare):
    """prepare(shape) gives {name: callable} of checked ways; it is called again when the shape, all
    of a request but `calls`, is another one. A way that is wrong raises ValueError."""
    shape = ways = None
    for line in sys.stdin:
        request = json.loads(line)
        calls = request.pop("calls")
        try:
            if request != shape:
                shape, ways = None, None  # frees the memory of the last shape
                ways = prepare(request)
                shape = request
            answer = {"ms": milliseconds(ways, calls), "version": torch.__version__}
        except (ValueError, RuntimeError) as problem:
            answer = {"error": str(problem)[:300]}
        print(json.dumps(answer), flush=True)
