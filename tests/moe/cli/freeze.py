"""freeze.py <process> <threads>: waits until the process has so many threads, stops the last of
them, a rank's, and keeps it stopped until the process ends. Exit code 77: not allowed."""
import ctypes
import os
import sys
import time

PTRACE_ATTACH, WALL, WNOHANG = 16, 0x40000000, 1
process, threads = int(sys.argv[1]), int(sys.argv[2])
tasks = []
while len(tasks) < threads:
    time.sleep(0.005)
    tasks = sorted(int(task) for task in os.listdir(f"/proc/{process}/task"))
if ctypes.CDLL(None).ptrace(PTRACE_ATTACH, tasks[threads - 1], 0, 0) != 0:
    sys.exit(77)
os.waitpid(tasks[threads - 1], WALL)
print("frozen", time.time_ns(), flush=True)
try:
    while os.waitpid(tasks[threads - 1], WALL | WNOHANG)[0] == 0:
        time.sleep(0.01)
except ChildProcessError:
    pass
