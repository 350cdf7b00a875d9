"""Running programs and counting what does not hold: for the tests of this folder in Python."""
import os
import subprocess

# Nothing of the caller's that changes a run; Open MPI as root, with more ranks than cores.
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
