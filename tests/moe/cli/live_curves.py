#!/usr/bin/env python3
"""TensorBoard's reader on what `moe train --tensorboard-dir` writes, across a resume:
python3 live_curves.py <moe>. Skipped without the package tensorboard."""
import os
import sys
import tempfile
import time

try:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
except ImportError:
    print("skipped: no Python package tensorboard")
    sys.exit(77)
from end_to_end import check, exit_code, json_lines, run, train_command, write_text

with tempfile.TemporaryDirectory() as work:
    path = lambda name: os.path.join(work, name)
    watched = ["--save", path("ckpt"), "--save-interval", 2, "--out", path("run"), "--ranks", 2,
               "--eval-interval", 3, "--tensorboard-dir", path("events"),
               "--metrics-file", path("moe.prom"), "--resume", "auto"]
    text = write_text(work)
    begin = time.time()
    run(*train_command(sys.argv[1], text, "--steps", 5, *watched))
    os.rename(path("ckpt/step-00000005"), path("lost"))  # as if killed before this save
    between = time.time()
    run(*train_command(sys.argv[1], text, "--steps", 7, *watched))
    end = time.time()

    check(len(os.listdir(path("events"))) == 2, f"event files: {os.listdir(path('events'))}")
    events = EventAccumulator(path("events"), size_guidance={"scalars": 0, "histograms": 0}).Reload()
    *lines, last = json_lines(path("run/metrics.jsonl"))[1:]
    for group, key in [("train", "loss"), ("train", "lr"), ("train", "grad_norm"),
                       ("train", "val_loss"), ("moe", "aux_loss"), ("moe", "max_vio"),
                       ("speed", "peak_bytes")]:
        expected = [(line["step"], line[key]) for line in lines if line[key] is not None]
        points = events.Scalars(f"{group}/{key}")
        same = [p.step for p in points] == [step for step, _ in expected] and all(
            abs(p.value - value) <= 1e-6 * abs(value) for p, (_, value) in zip(points, expected))
        check(same, f"{group}/{key}: {points}, expected {expected}")
    times = [point.wall_time for point in events.Scalars("train/loss")]
    first = last["first_step"]  # which the second run follows
    check(0 < first < 5 and begin <= times[0] and times == sorted(times) and
          times[first - 1] <= between <= times[first] and times[-1] <= end,
          f"times: {begin} {times[:first]} {between} {times[first:]} {end}")
    for layer in range(2):
        load = [line["expert_load"][layer] for line in lines]
        histograms = events.Histograms(f"expert_load/{layer}")
        check([h.histogram_value.bucket for h in histograms] == load, f"load of layer {layer}")
        check([h.histogram_value.num for h in histograms] == [sum(each) for each in load], "slots")
        worst = [p.value for p in events.Scalars(f"layer_max_vio/{layer}")]
        check(all(abs(w - (8 * max(each) / sum(each) - 1)) < 1e-6 for w, each in zip(worst, load)),
              f"layer_max_vio/{layer}: {worst}")
    with open(path("moe.prom")) as file:
        check("\nmoe_train_step 7\n" in file.read(), "moe.prom")
sys.exit(exit_code())
