"""Running programs and counting what does not hold: for the tests of this folder in Python."""
import json
import os
import subprocess

# No environment of the caller that changes a run; Open MPI as root, with more ranks than cores.
ENVIRONMENT = {k: v for k, v in os.environ.items()
               if not k.startswith(("MOE_", "OMPI_COMM_", "PMI_", "PMIX_", "SLURM_"))}
ENVIRONMENT.update(OMPI_ALLOW_RUN_AS_ROOT="1", OMPI_ALLOW_RUN_AS_ROOT_CONFIRM="1",
                   OMPI_MCA_rmaps_base_oversubscribe="1", NO_COLOR="1")
_failures = []


def check(holds, what):
    if not holds:
        _failures.append(what)
        print("FAILED:", what)


def exit_code():
    return 1 if _failures else 0


def run(*args, code=0):
    done = subprocess.run([str(a) for a in args], capture_output=True, text=True, timeout=300,
                          stdin=subprocess.DEVNULL, env=ENVIRONMENT)
    check(done.returncode == code, f"{args}: exit code {done.returncode}, expected {code}: "
          f"{done.stderr[-500:]}")
    return done


def write_text(folder):
    """The path of a text to train on."""
    path = os.path.join(folder, "text")
    with open(path, "w") as file:
        file.write("the router sends every token to two experts and each answers in turn. " * 600)
    return path


def train_command(moe, text, *extra):
    """A small model of two MoE layers of 8 experts; a micro-batch has 32 tokens."""
    return [moe, "train", "--data", text, "--num-layers", 2, "--hidden-size", 32,
            "--num-attention-heads", 2, "--num-experts", 8, "--moe-ffn-hidden-size", 16,
            "--seq-length", 16, "--micro-batch-size", 2, "--eval-sequences", 4, "--threads", 1,
            "--quiet", "--numerics", "layout-invariant", *extra]


def json_lines(path):
    """The objects of a file of JSON lines, which are whole."""
    with open(path) as file:
        text = file.read()
    check(text.endswith("\n"), f"{path}: half a line")
    return [json.loads(line) for line in text.splitlines()]
