"""Two hosts on one machine, for fault_matrix.py.

Each is a namespace of its own for network, processes, names, mounts and memory, with a link to a
switch, on which launchers run. Needs root, iproute2 and util-linux.
"""

import os
import subprocess

NAMES = ["host-a", "host-b"]
# TCP gives a silent peer up after 0.2 + 0.4 + ... s, 3 s in all: Open MPI's launcher waits for it.
TCP_RETRIES = 3


def namespaces(name, script):
    """The process that holds new namespaces, and the first one inside, when `script` is through."""
    holder = subprocess.Popen(
        ["unshare", "--net", "--pid", "--uts", "--ipc", "--mount", "--mount-proc", "--fork",
         "--kill-child", "sh", "-c", f"set -e; hostname {name}; mount -t tmpfs tmpfs /dev/shm; "
         f"ip link set lo up; {script} echo up; exec sleep 100000"],
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    if holder.stdout.readline() != "up\n":
        holder.kill()
        raise OSError(holder.stderr.read().strip())
    with open(f"/proc/{holder.pid}/task/{holder.pid}/children", encoding="ascii") as file:
        return holder, int(file.read())


def inside(process, script):
    subprocess.run(["nsenter", "--target", str(process), "--net", "sh", "-ec", script], check=True)


class Hosts:
    """host-a and host-b; the launcher on the switch reaches them by `rsh`."""

    def __init__(self, folder):
        self.holders = []
        try:
            self.first = {"switch": self._start(
                "switch", "ip link add br0 type bridge; ip addr add 10.78.0.9/24 dev br0; "
                "ip link set br0 up;")}
            for name in NAMES:
                self.first[name] = self._start(name)
                self._connect(name)
        except (OSError, subprocess.CalledProcessError):
            self.end()
            raise
        self.rsh = os.path.join(folder, "rsh")
        with open(self.rsh, "w", encoding="ascii") as file:
            of_name = " ".join(f"{name}) to={self.first[name]};;" for name in NAMES)
            # As a connection does, it hangs where its host is lost.
            file.write(f'#!/bin/sh\ncase $1 in {of_name} esac\nshift\nnsenter --target $to --net '
                       '--pid --uts --ipc --mount sh -c "$*"\ncode=$?\nwhile test -e "$0.lost" && '
                       'kill -0 $PPID 2>/dev/null; do sleep 0.1; done\nexit $code\n')
        os.chmod(self.rsh, 0o755)

    def _start(self, name, script=""):
        holder, first = namespaces(name, script)
        self.holders.append(holder)
        return first

    def _connect(self, name):
        process = self.first[name]
        inside(self.first["switch"],
               f"ip link add {name} type veth peer name eth0 netns {process}; "
               f"ip link set {name} master br0; ip link set {name} up")
        inside(process, f"ip addr add 10.78.0.{1 + NAMES.index(name)}/24 dev eth0; "
               f"ip link set eth0 up; echo {TCP_RETRIES} >/proc/sys/net/ipv4/tcp_retries2")
        inside(self.first["switch"], f"echo {TCP_RETRIES} >/proc/sys/net/ipv4/tcp_retries2")

    def launcher(self, mpiexec):
        """The words that start a rank on each host."""
        return ["nsenter", "--target", str(self.first["switch"]), "--net", "--uts", mpiexec,
                "--mca", "plm_rsh_agent", self.rsh, "--mca", "btl", "self,tcp", "--bind-to", "none",
                "--host", ",".join(f"{name}:1" for name in NAMES), "-n", str(len(NAMES))]

    def cut(self, name):
        """The cable of the host is out; the host does not notice."""
        inside(self.first["switch"], f"ip link set {name} down")

    def lose(self, name):
        """The host is gone."""
        self.cut(name)
        with open(self.rsh + ".lost", "w", encoding="ascii"):
            pass
        holder = self.holders[1 + NAMES.index(name)]
        holder.kill()
        holder.wait()

    def end(self):
        for holder in self.holders:
            holder.kill()
            holder.wait()
            holder.stdout.close()
            holder.stderr.close()


def refusal(folder):
    """Why there can be no hosts here; empty: there can."""
    try:
        Hosts(folder).end()
    except (OSError, subprocess.CalledProcessError) as error:
        return str(error) or "no namespaces"
    return ""
