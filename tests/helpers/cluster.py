"""A Slurm cluster of four nodes on this machine, with real daemons.

A node is a network, host-name, mount and process namespace: it has its own name, address and
loopback, so that what fails between hosts fails here too, and killing its first process is a power
cut. The bridge between the nodes has a namespace of its own, where no firewall of the host acts.
"""

import contextlib
import os
import shlex
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from common.launch.process import end_with_parent
from tests.helpers.commands import ROOT, clean_env, wait_for
from tests.helpers.pool import PATIENCE_S

NODES = ("n1", "n2", "n3", "n4")
HEAD = "head"  # where slurmctld runs and users log in
_ADDRESSES = {name: f"10.78.0.{number}" for number, name in enumerate((HEAD, *NODES), 1)}

_CONF = """\
ClusterName=recipes
SlurmctldHost={head}({head_address})
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge/socket,cred_expire=8
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool.%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
MpiDefault=none
SwitchType=switch/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SlurmctldParameters=preempt_send_user_signal
SchedulerParameters=sched_interval=1,bf_interval=1,batch_sched_delay=0,sched_min_interval=0
ReturnToService=2
SlurmdTimeout=15
KillWait=10
JobRequeue=1
EnforcePartLimits=ALL
FirstJobId={first_job_id}
GresTypes=gpu
{nodes}
PartitionName=main Nodes=ALL Default=YES MaxTime=60 PriorityTier=1 PreemptMode=REQUEUE GraceTime=20
PartitionName=high Nodes=ALL MaxTime=60 PriorityTier=10 PreemptMode=OFF
"""

# Another site: memory is handed out by core and a job killed that takes more, tasks are bound to
# cores (as far as this machine has them), and the first task that fails ends its step.
STRICT = {
    "SelectTypeParameters": "CR_Core_Memory",
    "DefMemPerCPU": "1500",
    "TaskPlugin": "task/affinity",
    "KillOnBadExit": "1",
    "JobAcctGatherType": "jobacct_gather/linux",
    "JobAcctGatherFrequency": "task=1",
    "JobAcctGatherParams": "OverMemoryKill",
}

# submitit asks sacct; without an accounting database squeue knows the same of recent jobs.
_SACCT = """\
#!/bin/sh
echo 'JobID|State|NodeList'
exec squeue --noheader --states all --format '%i|%T|%N'
"""


class Cluster:
    """A running cluster; commands run on its head node.

    Args:
        folder: for its state and logs, short: munge's socket lies in it.
        settings: lines of slurm.conf that another site has otherwise.
    """

    def __init__(self, folder: Path, settings: Mapping[str, str] | None = None) -> None:
        self.folder = folder
        self._settings = settings or {}
        self._name = f"recipes-{folder.name}"
        self._nodes: dict[str, subprocess.Popen[bytes]] = {}
        self._daemons: list[subprocess.Popen[bytes]] = []
        try:
            self._write_files()
            self._make_network()
            self._start_munge()
            self.start_slurmctld()
            for node in NODES:
                self.power_on(node)
            wait_for(lambda: self._idle() == len(NODES), every_s=0.1)
        except BaseException:
            self.close()
            raise

    def _write_files(self) -> None:
        for name in ("state", "munge", "bin"):
            (self.folder / name).mkdir()
        hosts = "".join(f"{address} {name}\n" for name, address in _ADDRESSES.items())
        (self.folder / "hosts").write_text(f"127.0.0.1 localhost\n{hosts}")
        nodes = "\n".join(
            f"NodeName={node} NodeAddr={_ADDRESSES[node]} CPUs=8 RealMemory=8000 Gres=gpu:h100:2"
            for node in NODES
        )
        conf = _CONF.format(
            head=HEAD,
            head_address=_ADDRESSES[HEAD],
            folder=self.folder,
            nodes=nodes,
            first_job_id=(int(time.time()) + 1000 * os.getpid()) % 10_000_000,
        )
        kept = [s for s in conf.splitlines() if s.partition("=")[0] not in self._settings]
        changed = [f"{name}={value}" for name, value in self._settings.items()]
        (self.folder / "slurm.conf").write_text("\n".join([*changed, *kept, ""]))
        for number in (0, 1):  # character devices: for a plain file Slurm hides and shows nothing
            os.mknod(self.folder / f"nvidia{number}", 0o666 | stat.S_IFCHR, os.makedev(1, 3))
        (self.folder / "gres.conf").write_text(
            f"AutoDetect=off\nName=gpu Type=h100 File={self.folder}/nvidia[0-1]\n"
        )
        sacct = self.folder / "bin" / "sacct"
        sacct.write_text(_SACCT)
        sacct.chmod(0o755)

    def _make_network(self) -> None:
        bridge = f"{self._name}-bridge"
        _ip("netns", "add", bridge)
        _ip("-n", bridge, "link", "add", "bridge", "type", "bridge")
        _ip("-n", bridge, "link", "set", "bridge", "up")
        for name, address in _ADDRESSES.items():
            host = f"{self._name}-{name}"
            _ip("netns", "add", host)
            _ip("-n", host, "link", "set", "lo", "up")
            _ip(
                "-n",
                host,
                "link",
                "add",
                "eth0",
                "type",
                "veth",
                "peer",
                "name",
                f"to-{name}",
                "netns",
                bridge,
            )
            _ip("-n", host, "addr", "add", f"{address}/24", "dev", "eth0")
            _ip("-n", host, "link", "set", "eth0", "up")
            _ip("-n", bridge, "link", "set", f"to-{name}", "master", "bridge", "up")

    def _start_munge(self) -> None:
        folder = self.folder / "munge"
        folder.chmod(0o755)
        key = folder / "key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o400)
        socket = folder / "socket"
        command: list[str | Path] = [
            *"munged --foreground --force --key-file".split(),
            key,
            "--socket",
            socket,
            "--pid-file",
            folder / "pid",
            "--log-file",
            folder / "log",
            "--seed-file",
            folder / "seed",
        ]
        self._daemons.append(self._popen(command, "munged"))
        wait_for(socket.exists)

    def network(self, host: str) -> str:
        """The file of a host's network namespace."""
        return f"/run/netns/{self._name}-{host}"

    def _inside(self, host: str) -> list[str]:
        """The words that run a command in a host's network, under its name and hosts file."""
        script = f'hostname {host}; mount --bind {self.folder}/hosts /etc/hosts; exec "$@"'
        # Not `ip netns exec`, which mounts a /sys without the cgroups that slurmd looks for.
        return [
            "nsenter",
            f"--net={self.network(host)}",
            *"unshare --uts --mount sh -c".split(),
            script,
            "sh",
        ]

    def _popen(self, command: Sequence[str | Path], log: str) -> "subprocess.Popen[bytes]":
        with (self.folder / f"{log}.out").open("ab") as file:
            return subprocess.Popen(
                [str(word) for word in command],
                env={**clean_env(), "SLURM_CONF": str(self.folder / "slurm.conf")},
                stdout=file,
                stderr=file,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
                preexec_fn=end_with_parent,
            )

    def start_slurmctld(self) -> None:
        """Start the head node's daemon, which goes on with the jobs that there were."""
        self._daemons.append(self._popen([*self._inside(HEAD), "slurmctld", "-D"], "slurmctld"))

    def stop_slurmctld(self) -> None:
        """End it: nobody can submit, ask or requeue."""
        slurmctld = self._daemons.pop()
        slurmctld.terminate()
        slurmctld.wait(10)

    def power_on(self, node: str) -> None:
        """Start a node's daemon; a shell is its first process, which buries what Slurm leaves."""
        _ip("-n", f"{self._name}-{node}", "link", "set", "eth0", "up")
        boot = f"slurmd -N {node} -D & wait"
        command = [
            *self._inside(node),
            *"unshare --pid --fork --kill-child --mount-proc bash -c".split(),
            boot,
        ]
        self._nodes[node] = self._popen(command, f"slurmd.{node}")

    def power_off(self, node: str) -> None:
        """Cut a node's power: nothing it says reaches anybody, and then it is gone."""
        _ip("-n", f"{self._name}-{node}", "link", "set", "eth0", "down")
        process = self._nodes.pop(node)
        process.send_signal(signal.SIGKILL)
        process.wait()

    def _idle(self) -> int:
        states = self.run(
            "sinfo", "--noheader", "--Node", "--partition", "main", "--format", "%T", check=False
        ).stdout.split()
        return sum(state == "idle" for state in states)

    def env(self, more: Mapping[str, str] | None = None) -> dict[str, str]:
        """A user's environment on the head node."""
        env = clean_env()
        env.pop("PYTHONPATH")  # what the shipped files need they must set themselves
        return {
            **env,
            "SLURM_CONF": str(self.folder / "slurm.conf"),
            "PATH": f"{self.folder / 'bin'}:{env['PATH']}",
            "PYTHON": sys.executable,
            **(more or {}),
        }

    def start(
        self,
        *command: str | Path,
        env: Mapping[str, str] | None = None,
        cwd: Path = ROOT,
        **more: Any,
    ) -> "subprocess.Popen[str]":
        """Start a command on the head node."""
        return subprocess.Popen(
            [*self._inside(HEAD), *map(str, command)],
            env=self.env(env),
            cwd=cwd,
            text=True,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
            **more,
        )

    def run(
        self,
        *command: str | Path,
        env: Mapping[str, str] | None = None,
        cwd: Path = ROOT,
        check: bool = True,
        timeout_s: float = PATIENCE_S,
    ) -> "subprocess.CompletedProcess[str]":
        """Run a command on the head node to its end."""
        process = self.start(*command, env=env, cwd=cwd)
        try:
            stdout, stderr = process.communicate(timeout=timeout_s)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.communicate()
        done = subprocess.CompletedProcess(
            list(map(str, command)), process.returncode, stdout, stderr
        )
        said = f"{shlex.join(done.args)}: {done.returncode}\n{stdout}\n{stderr}"
        assert not check or done.returncode == 0, said
        return done

    def job(self, job: str) -> dict[str, str]:
        """What Slurm knows of a job."""
        ask = ("scontrol", "--oneliner", "show", "job", job)
        for _ in range(3):
            if text := self.run(*ask, check=False).stdout:
                break
            time.sleep(1)  # on a busy machine the controller may close a connection unanswered
        else:
            text = self.run(*ask).stdout
        return dict(word.split("=", 1) for word in text.split() if "=" in word)

    def close(self) -> None:
        """End everything that was started, by its own id."""
        for slurmctld in self._daemons[1:]:
            slurmctld.terminate()  # else a child of its own stays
            with contextlib.suppress(subprocess.TimeoutExpired):
                slurmctld.wait(5)
        for process in [*self._nodes.values(), *self._daemons]:
            process.kill()
            process.wait()
        for name in ("bridge", *_ADDRESSES):
            with contextlib.suppress(subprocess.CalledProcessError):
                _ip("netns", "delete", f"{self._name}-{name}")
        shutil.rmtree(self.folder, ignore_errors=True)


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


def make_folder() -> Path:
    """A folder with a short path that others may enter: munge insists on both."""
    folder = Path(tempfile.mkdtemp(prefix="slurm-"))
    folder.chmod(0o755)
    return folder
