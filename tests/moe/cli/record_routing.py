#!/usr/bin/env python3
"""`moe train --record-routing` end to end: python3 record_routing.py <moe> [<mpiexec>]"""
import os
import signal
import subprocess
import sys
import tempfile
import time

from end_to_end import (ENVIRONMENT, check, exit_code, json_lines, run, train_command,
                        write_text)

MOE = sys.argv[1]
MPIEXEC = sys.argv[2] if len(sys.argv) > 2 else None
LAYERS, EXPERTS, TOPK, TOKENS, MICRO_BATCHES = 2, 8, 2, 32, 5  # tokens of a micro-batch


def command(text, *extra):
    return train_command(MOE, text, "--topk", TOPK, "--micro-batches", MICRO_BATCHES, *extra)


def micro_batches_of(rank, ranks):
    return MICRO_BATCHES * (rank + 1) // ranks - MICRO_BATCHES * rank // ranks


def record(work, text, ranks, ep, name, *extra, launcher=()):
    """A recorded run: header and records after the checks that hold for every one; its metrics."""
    out, path = os.path.join(work, name), os.path.join(work, name + ".jsonl")
    own = [] if launcher else ["--ranks", str(ranks)]
    plain = command(text, "--steps", 3, "--ep", ep, *own, *extra)
    done = run(*launcher, *plain, "--out", out, "--record-routing", path)
    check(path in done.stdout, f"{name}: the report does not name the file")
    header, *records = json_lines(path)
    metrics = json_lines(os.path.join(out, "metrics.jsonl"))[1:]
    expected = {"schema": "moe.routing/1", "ranks": ranks, "num_experts": EXPERTS,
                "expert_parallel_size": ep, "topk": TOPK, "hidden_size": 32, "dtype": "f32",
                "moe_layers": LAYERS}
    check(header == expected, f"{name}: header {header}")
    check([(r["step"], r["layer"]) for r in records] ==
          [(s, l) for s in (1, 2, 3) for l in range(LAYERS)], f"{name}: order")
    dropped = 0
    for each in records:
        tokens = [micro_batches_of(r, ranks) * TOKENS for r in range(ranks)]
        check(each["tokens"] == tokens, f"{name}: tokens {each['tokens']}, expected {tokens}")
        load = metrics[each["step"] - 1]["expert_load"][each["layer"]]
        kept = [sum(column) for column in zip(*each["slots"])]
        check(len(each["slots"]) == ranks and all(k <= l for k, l in zip(kept, load)),
              f"{name}: {kept} slots kept of {load}")
        dropped += sum(load) - sum(kept)
    slots = 3 * LAYERS * TOPK * MICRO_BATCHES * TOKENS
    told = sum(m["drop_fraction"] for m in metrics[:3]) / 3 * slots
    check(round(told) == dropped, f"{name}: {dropped} slots are missing, {told} were dropped")
    return path, records, metrics, plain


def main():
    with tempfile.TemporaryDirectory() as work:
        text = write_text(work)
        totals = {}
        runs = [("one", 1, 1, ()), ("three", 3, 3, ()), ("eight", 8, 8, ()), ("split", 4, 2, ()),
                ("overlap", 3, 3, ("--moe-overlap-degree", "2"))]
        if MPIEXEC:
            runs.append(("mpi", 4, 2, ()))
        for name, ranks, ep, extra in runs:
            launcher = (MPIEXEC, "-n", str(ranks)) if name == "mpi" else ()
            path, records, metrics, plain = record(work, text, ranks, ep, name, *extra,
                                                   launcher=launcher)
            # Dropless: the same as the metrics, summed over ranks; and the same at any layout.
            totals[name] = [[sum(c) for c in zip(*r["slots"])] for r in records]
            for each, total in zip(records, totals[name]):
                check(total == metrics[each["step"] - 1]["expert_load"][each["layer"]],
                      f"{name}: {total} is not the load")
            if ranks > 1:  # a benchmark replays what was recorded
                run(MOE, "bench", "alltoallv", "--routing", f"trace:{path}", "-n", "2", "-w", "1",
                    "--ranks", str(ranks), "--quiet")
            if name == "split":
                run(*plain, "--out", os.path.join(work, "plain"))
                again = json_lines(os.path.join(work, "plain", "metrics.jsonl"))
                check(again[-1]["weights_xxh3"] == metrics[-1]["weights_xxh3"], "other weights")
        check(all(t == totals["one"] for t in totals.values()), "slots depend on the layout")
        _, records, metrics, _ = record(work, text, 3, 3, "drops", "--capacity-factor", "0.6")
        check(metrics[0]["drop_fraction"] > 0, "nothing was dropped at a capacity factor of 0.6")
        record(work, text, 3, 3, "padded", "--capacity-factor", "0.6",
               "--moe-pad-expert-input-to-capacity")

        # A run that is killed leaves complete steps.
        path = os.path.join(work, "killed.jsonl")
        process = subprocess.Popen(
            [str(part) for part in command(text, "--steps", 200000, "--ranks", 2, "--ep", 2,
                                           "--record-routing", path)],
            env=ENVIRONMENT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline and not (os.path.exists(path) and
                                                   os.path.getsize(path) > 4000):
            time.sleep(0.05)
        process.send_signal(signal.SIGKILL)
        process.wait()
        left = json_lines(path)
        check(len(left) > 2 and len(left) % LAYERS == 1, f"killed: {len(left)} lines")

        run(*command(text, "--record-routing", os.path.join(work, "absent", "r")), code=2)
        run(*command(text, "--record-routing", "/proc/r"), code=4)
        run(*command(text, "--moe-layer-freq", 3, "--record-routing", path), code=2)
        check(len(json_lines(path)) == len(left), "a refused run changed the file")
    return exit_code()


sys.exit(main())
