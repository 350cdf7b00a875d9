#!/usr/bin/env python3
"""`--trace` end to end: python3 trace.py <moe> <golden data> [<mpiexec>]

Reads the traces as a viewer does and compares them with what the runs themselves say."""
import json
import os
import sys
import tempfile

from end_to_end import check, exit_code, json_lines, run, train_command, write_text

MOE, GOLDEN = sys.argv[1:3]
MPIEXEC = sys.argv[3] if len(sys.argv) > 3 else None
FORWARD = {"gate", "plan", "dispatch", "experts", "combine", "combine sum"}
BACKWARD = {"gate backward", "combine weights backward", "dispatch backward", "experts backward",
            "combine backward", "dispatch backward sum", "experts weight gradients"}
SHARED = {"shared expert", "shared expert backward"}
DENSE = {"embedding", "embedding backward", "attention", "attention backward", "norm",
         "norm backward", "residual", "loss"}
STEP = {"step", "micro-batch", "wait for gradients", "step totals", "optimiser"}
EXCHANGES = {"dispatch", "combine", "dispatch backward", "combine backward"}


def thread_of(pid, tid):
    """The thread that Perfetto's trace processor adds an event to. As on Linux, a tid belongs to
    one process at a time, the main thread has the pid, and 0 is nobody's: it is taken for the main
    thread."""
    return tid if tid else pid


def read_lanes(events, where):
    """(rank, lane) by thread, from the metadata."""
    told = {}
    for event in events:
        if event["ph"] == "M":
            thread = thread_of(event["pid"], event["tid"])
            known = told.setdefault(thread, {"pid": event["pid"]})
            (value,) = event["args"].values()
            check(known["pid"] == event["pid"] and known.get(event["name"], value) == value,
                  f"{where}: tid {event['tid']} is {known}, and {event}")
            known[event["name"]] = value
    main = {thread: facts for thread, facts in told.items() if "process_name" in facts}
    check({facts["pid"] for facts in told.values()} == main.keys() and min(main) > 0,
          f"{where}: process names are not all on main threads: {told}")
    ranks = {pid: rank for rank, pid in enumerate(sorted(main))}
    for pid, rank in ranks.items():
        check(main[pid]["process_name"].startswith(f"rank {rank} (") and
              main[pid]["process_sort_index"] == rank, f"{where}: rank {rank} is {main[pid]}")
        threads = sorted(thread for thread, facts in told.items() if facts["pid"] == pid)
        order = [told[thread]["thread_sort_index"] for thread in threads]
        check(order == list(range(len(threads))), f"{where}: lanes of rank {rank}: {order}")
    return {thread: (ranks[facts["pid"]], facts["thread_name"]) for thread, facts in told.items()}


def load(path, ranks, lanes, where):
    """The events of a trace by (rank, lane name), after the checks that hold for every trace."""
    with open(path) as file:
        trace = json.load(file)
    names, by_lane = read_lanes(trace["traceEvents"], where), {}
    for event in trace["traceEvents"]:
        if event["ph"] == "X":
            by_lane.setdefault(names[thread_of(event["pid"], event["tid"])], []).append(event)
    check(sorted(names.values()) == [(r, lane) for r in range(ranks) for lane in sorted(lanes)],
          f"{where}: lanes {names}")
    for lane, events in by_lane.items():
        events.sort(key=lambda e: (e["ts"], -e["dur"]))
        check_nesting(events, f"{where}: {lane}")
    other = trace["otherData"]
    check(other["schema"] == "moe.trace/1" and other["left_out"] == 0, f"{where}: {other}")
    count = sum(len(events) for events in by_lane.values())
    check(sum(r["events"] for r in other["ranks"]) == count, f"{where}: {count} events")
    check(min(e["ts"] for es in by_lane.values() for e in es) == 0, f"{where}: does not start at 0")
    return by_lane


def check_nesting(events, where):
    """On one lane pieces of work lie inside each other or follow each other."""
    ends = []  # ends of the open events
    for event in events:
        check(event["dur"] >= 0, f"{where}: {event['name']} lasts {event['dur']} us")
        while ends and ends[-1] <= event["ts"] + 1e-6:
            ends.pop()
        end = event["ts"] + event["dur"]
        # Decimals of 1 ns: 1e-6 us is above the rounding of doubles.
        check(not ends or end <= ends[-1] + 1e-6, f"{where}: {event['name']} at {event['ts']} "
              f"overlaps what was open")
        ends.append(end)


def metrics(folder):
    return json_lines(os.path.join(folder, "metrics.jsonl"))


def moved(report, what):
    """Bytes of a row of the end report, with their unit's rounding: (value, half a unit)."""
    for line in report.splitlines():
        if line.startswith(what):
            number, unit = line[len(what):].split()[:2]
            scale = {"B": 1, "kB": 1e3, "MB": 1e6, "GB": 1e9}[unit]
            digits = len(number.partition(".")[2])
            return float(number) * scale, 0.5 * 10 ** -digits * scale
    raise AssertionError(f"no '{what}' in the report")


def train(work, text, ranks, *extra, launcher=(), name="run", steps=2, ep=None):
    out = os.path.join(work, name)
    trace = os.path.join(work, name + ".json")
    own = [] if launcher else ["--ranks", ranks]
    command = [*launcher, *train_command(
        MOE, text, "--moe-shared-expert-intermediate-size", 16, "--micro-batches", 4, "--steps",
        steps, "--ep", ep or ranks, "--bucket-size-mb", 0.05, *own, *extra)]
    traced = run(*command, "--out", out, "--trace", trace)
    return command, traced, metrics(out), trace


def check_train(trace, ranks, steps, lanes, where):
    by_lane = load(trace, ranks, lanes, where)
    steps_of = {}
    for rank in range(ranks):
        compute = by_lane[rank, "compute"]
        everything = [e for (r, _), events in by_lane.items() if r == rank for e in events]
        expected = FORWARD | BACKWARD | SHARED | DENSE | STEP
        if ranks > 1:
            expected = expected | {"all-reduce"}
        if 4 * rank // ranks == 4 * (rank + 1) // ranks:  # joins the exchanges without tokens
            expected = expected - {"embedding backward"}
        found = {e["name"] for e in everything}
        check(found == expected, f"{where}: rank {rank} has {found ^ expected} more or less")
        own = [e for e in compute if e["name"] == "step"]
        check([e["args"]["step"] for e in own] == list(steps), f"{where}: steps {own}")
        steps_of[rank] = own
        for event in everything:
            step = event["args"]["step"]
            begin, end = next((s["ts"], s["ts"] + s["dur"]) for s in own
                              if s["args"]["step"] == step)
            check(begin - 1e-6 <= event["ts"] and event["ts"] + event["dur"] <= end + 1e-6,
                  f"{where}: {event['name']} lies outside step {step}")
            check(("bytes" in event["args"]) == (event["name"] in EXCHANGES | {"all-reduce"}),
                  f"{where}: {event}")
        for layer in range(2):
            for call in range(-(-4 // ranks)):
                for name in FORWARD - {"combine sum"}:
                    check(any(e["name"] == name and e["args"]["layer"] == layer and
                              e["args"]["call"] == call for e in everything),
                          f"{where}: no {name} of layer {layer} in micro-batch {call}")
        buckets = {e["args"]["bucket"] for e in everything if e["name"] == "all-reduce"}
        check(ranks == 1 or len(buckets) > 1, f"{where}: buckets {buckets}")
    return by_lane


def check_bytes(by_lane, report, where):
    """All steps are traced, so the sums agree with the report's, but for its rounding."""
    everything = [e for events in by_lane.values() for e in events]
    for key, names, rows in (
            ("bytes", {"all-reduce"}, ["gradients: all-reduce"]),
            ("bytes", EXCHANGES, ["experts: to a rank of the node", "experts: to another node"]),
            ("bytes_self", EXCHANGES, ["experts: on the same rank"])):
        sent = sum(e["args"][key] for e in everything if e["name"] in names)
        values = [moved(report, row) for row in rows]
        value, half = sum(v for v, _ in values), sum(h for _, h in values)
        check(abs(sent - value) <= half, f"{where}: {key} {sent}, {rows} {value}")
    check(sum(e["args"]["bytes_self"] for e in everything if e["name"] in EXCHANGES) > 0,
          f"{where}: nothing moved")


def check_exchange(end, report, ranks, where):
    """Copy, gather and wait are the phases dispatch and combine, in the file and in the report."""
    parts, phases = end["exchange_seconds"], end["phase_seconds"]
    both = phases["dispatch"] + phases["combine"]
    check(abs(sum(parts.values()) - both) <= 1e-9 * both, f"{where}: {parts}, together {both}")
    check(parts["gather"] > 0 and all((s > 0) == (ranks > 1) for name, s in parts.items()
                                      if name != "gather"), f"{where}: {parts}")
    told = {line.split()[0]: line.split()[1] for line in report.splitlines()
            if line.split()[:1] and line.split()[0] in parts}
    expected = {name: f"{s:.3f}" for name, s in parts.items()} if ranks > 1 else {}
    check(told == expected, f"{where}: the report has {told}, expected {expected}")


def checked(work, text, ranks, lanes, *extra, name, steps=2, launcher=()):
    """A run all of whose steps are traced, after what holds for every one: its command, its events by
    lane, and its hash of the weights."""
    command, traced, rows, trace = train(work, text, ranks, *extra, name=name, steps=steps,
                                         launcher=launcher)
    by_lane = check_train(trace, ranks, range(1, steps + 1), lanes, name)
    check_bytes(by_lane, traced.stdout, name)
    check_exchange(rows[-1], traced.stdout, ranks, name)
    check(trace in traced.stdout, f"{name}: the report does not name the trace")
    return command, by_lane, rows[-1]["weights_xxh3"]


def overlap(a, b):
    return min(a["ts"] + a["dur"], b["ts"] + b["dur"]) - max(a["ts"], b["ts"])


def main():
    with tempfile.TemporaryDirectory() as work:
        text = write_text(work)
        two = {"compute", "gradients"}
        hashes = set()
        for ranks in (1, 3, 8):
            command, _, weights = checked(work, text, ranks, two, name=f"{ranks}-ranks")
            plain = os.path.join(work, f"plain{ranks}")
            run(*command, "--out", plain)
            check(metrics(plain)[-1]["weights_xxh3"] == weights,
                  f"{ranks} ranks: other weights with a trace")
            hashes.add(weights)
        check(len(hashes) == 1, f"weights differ between ranks: {hashes}")

        # Chunks: the exchange has a lane of its own.
        _, by_lane, _ = checked(work, text, 3, two | {"exchange"}, "--moe-overlap-degree", 2,
                                name="overlap", steps=4)
        beside = 0
        for rank in range(3):
            lane = by_lane[rank, "exchange"]
            check({e["name"] for e in lane} == EXCHANGES, "overlap: other work in the exchange")
            check({e["args"]["chunk"] for e in lane} == {0, 1}, "overlap: not two chunks")
            experts = [e for e in by_lane[rank, "compute"] if e["name"].startswith("experts")]
            beside += sum(overlap(a, b) > 0 for a in lane for b in experts)
        check(beside > 0, "overlap: no exchange beside experts in four steps")

        # Stages of ranks that share matrices: every byte that they exchange is in an event.
        _, _, rows, trace = train(work, text, 4, "--tp", 2, "--tensor-leaves", 2, "--pp", 2,
                                  "--moe-shared-expert-intermediate-size", 32, name="tensor", ep=2)
        names = ("tensor sum", "tensor rows", "router logits", "combine weights", "logits",
                 "gradient of the logits")
        lanes = load(trace, 4, two, "tensor").values()
        between = sum(e["args"]["bytes"] for lane in lanes for e in lane
                      if e["name"] == "pipeline send")
        check(between == rows[-1]["pipeline_bytes"] > 0,
              f"pipeline: {between}, expected {rows[-1]['pipeline_bytes']}")
        sent = {name: sum(e["args"]["bytes"] for lane in lanes for e in lane if e["name"] == name)
                for name in names}
        check(min(sent.values()) > 0 and sum(sent.values()) == rows[-1]["tensor_bytes"],
              f"tensor: {sent}, expected {rows[-1]['tensor_bytes']} in all")

        # Only some steps of a run; the trace exists when the last of them has ended.
        _, _, _, trace = train(work, text, 2, "--profile-step-start", 2, "--profile-step-end", 3,
                               name="window", steps=4)
        check_train(trace, 2, (2, 3), two, "window")
        for flags in (("--profile-step-start", 3), ("--profile-step-start", 0),
                      ("--profile-step-start", 2, "--profile-step-end", 1)):
            done = run(*command, *flags, "--trace", os.path.join(work, "no.json"), code=2)
            check(flags[0] in done.stderr or flags[-2] in done.stderr, f"{flags}: {done.stderr}")

        # Refused before the work starts.
        run(*command, "--trace", os.path.join(work, "absent", "t.json"), code=2)
        run(*command, "--trace", "/proc/t.json", code=4)

        if MPIEXEC:
            _, _, weights = checked(work, text, 3, two, name="mpi", launcher=(MPIEXEC, "-n", 3))
            check({weights} == hashes, "mpi: other weights")

        layer(work)
        bench(work)
        leftover = [f for f in os.listdir(work) if "tmp" in f]
        check(not leftover, f"left behind: {leftover}")
    return exit_code()


def layer(work):
    model = os.path.join(GOLDEN, "mixtral-1")
    trace, plain = os.path.join(work, "layer.json"), os.path.join(work, "plain")
    tokens = os.path.join(model, "io.safetensors")
    command = [MOE, "layer", "--hf-config", os.path.join(model, "config.json"), "--weights", model,
               "--input", tokens, "--grad-output", tokens, "--ranks", 2, "--grads"]
    run(*command, os.path.join(work, "g"), "--output", plain)
    traced = os.path.join(work, "y")
    run(*command, os.path.join(work, "g"), "--output", traced, "--trace", trace)
    with open(plain, "rb") as a, open(traced, "rb") as b:
        check(a.read() == b.read(), "layer: other results with a trace")
    by_lane = load(trace, 2, {"compute", "gradients"}, "layer")
    for rank in range(2):
        names = {e["name"] for e in by_lane[rank, "compute"]}
        check(names == FORWARD | BACKWARD | {"forward", "backward", "wait for gradients"},
              f"layer: rank {rank}: {names}")
        names = {e["name"] for e in by_lane[rank, "gradients"]}
        check(names == {"all-reduce"}, f"layer: gradients of rank {rank}: {names}")
    run(*command, os.path.join(work, "g"), "--output", traced, "--trace", traced, code=2)


def bench(work):
    trace, rows = os.path.join(work, "bench.json"), os.path.join(work, "rows.json")
    for dispatch in (("staged",), ("hierarchical", "--node-size", 2)):
        run(MOE, "bench", "alltoallv", "-b", "12K", "-e", "24K", "-n", 3, "-w", 1, "--max-noise",
            100000, "--routing", "zipf:1", "--ranks", 4, "-J", rows, "--trace", trace, "--dispatch",
            *dispatch)
        by_lane = load(trace, 4, {"collective"}, "bench")
        events = [e for lane in by_lane.values() for e in lane]
        check({e["name"] for e in events} == {"alltoallv", "memcpy"}, "bench: other calls")
        with open(rows) as file:
            sizes = json.load(file)
        for key, told in (("bytes", lambda r: r["bytes_same_host"] + r["bytes_cross_host"]),
                          ("bytes_self", lambda r: r["bytes_self"])):
            sent = sum(e["args"][key] for e in events if e["name"] == "alltoallv")
            expected = sum(told(row) * row["iters"] for row in sizes)
            check(sent == expected, f"bench: {dispatch}: {key} {sent}, the rows have {expected}")

    for degree, lanes in ((1, {"compute"}), (2, {"compute", "exchange"})):
        run(MOE, "bench", "layer", "-n", 3, "-w", 1, "--max-noise", 100000, "--tokens", 16,
            "--hidden-size", 16, "--moe-ffn-hidden-size", 16, "--ranks", 3, "--trace", trace,
            "--moe-overlap-degree", degree)
        by_lane = load(trace, 3, lanes, "bench layer")
        names = [{e["name"] for (r, _), events in by_lane.items() if r == rank for e in events}
                 for rank in range(3)]
        check(names == [FORWARD | BACKWARD | {"forward", "backward"}] * 3,
              f"bench layer: {degree}: {names}")
        calls = {e["args"]["call"] for events in by_lane.values() for e in events}
        check(calls == {0, 1, 2}, f"bench layer: {degree}: calls {calls}")
    run(MOE, "bench", "gemm", "--trace", trace, code=2)
    run(MOE, "bench", "alltoall", "--trace", "/proc/t.json", code=4)


sys.exit(main())
