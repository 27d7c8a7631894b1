"""A SLURM cluster on one machine for the tests: four nodes with two pretended GPUs each.

    python tests/cluster/lab.py install | start | stop | env
    python tests/cluster/lab.py kill N | boot N | freeze N | thaw N       (N: node number from 1)

Everything lives under $RELAX_LAB (default /tmp/relax-lab); clients find it by SLURM_CONF. It
needs root and Debian's packages of Slurm, munge and MariaDB. Each node is a slurmd in its own
UTS and pid namespace, so that it has a host name and dies whole, as by a power cut.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

ROOT = Path(os.environ.get("RELAX_LAB", "/tmp/relax-lab"))
CONF = ROOT / "etc" / "slurm.conf"
MUNGE, MYSQL = ROOT / "munge" / "socket", ROOT / "run" / "mysqld.sock"
NODES, GPUS, CPUS, MEMORY_MB = 4, 2, 4, 4000
CONTROLLER_PORT, DATABASE_PORT, NODE_PORT = 26817, 26819, 27000
PACKAGES = "munge slurm-client slurmctld slurmd slurmdbd mariadb-server-core mariadb-client-core"
PROGRAMS = ("munged", "sbatch", "slurmctld", "slurmd", "slurmdbd", "mariadbd", "mariadb")
MARK = "RELAX_LAB_DAEMON"

# Waits shortened so that node failures and requeues take seconds. cred_expire below 5 counts as
# 120; EnforcePartLimits makes sbatch refuse what could never run; ReturnToService=2 would bring a
# node back that a test set down.
SLURM_CONF = f"""\
ClusterName=relaxlab
SlurmctldHost={{host}}(127.0.0.1)
SlurmctldPort={CONTROLLER_PORT}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket={MUNGE},cred_expire=5
StateSaveLocation={ROOT}/state
SlurmdSpoolDir={ROOT}/spool/%n
SlurmctldPidFile={ROOT}/run/slurmctld.own
SlurmdPidFile={ROOT}/run/slurmd-%n.own
SlurmctldLogFile={ROOT}/log/slurmctld.log
SlurmdLogFile={ROOT}/log/slurmd-%n.log
MailProg=/bin/true
FirstJobId={{first_job}}
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SwitchType=switch/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
DefMemPerCPU=100
GresTypes=gpu
EnforcePartLimits=ALL
SlurmdParameters=config_overrides
SlurmctldParameters=preempt_send_user_signal
ReturnToService=1
SlurmdTimeout=5
KillWait=3
BatchStartTimeout=2
MinJobAge=3600
MessageTimeout=5
TCPTimeout=2
SchedulerType=sched/backfill
SchedulerParameters=batch_sched_delay=0,sched_interval=1,sched_min_interval=100000,bf_interval=1
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
AccountingStorageType=accounting_storage/slurmdbd
AccountingStorageHost=127.0.0.1
AccountingStoragePort={DATABASE_PORT}
AccountingStoragePass={MUNGE}
AccountingStorageTRES=gres/gpu
JobAcctGatherType=jobacct_gather/linux
JobAcctGatherFrequency=task=1
NodeName=n[1-{NODES}] NodeHostname={{host}} NodeAddr=127.0.0.1 \
Port=[{NODE_PORT + 1}-{NODE_PORT + NODES}] CPUs={CPUS} RealMemory={MEMORY_MB} Gres=gpu:{GPUS}
PartitionName=gpu Nodes=n[1-3] Default=YES MaxTime=600 PriorityTier=10 PreemptMode=OFF
PartitionName=cpu Nodes=n4 MaxTime=600 PriorityTier=10 PreemptMode=OFF
PartitionName=low Nodes=n[1-3] MaxTime=600 PriorityTier=1 GraceTime=30 PreemptMode=REQUEUE
"""
DATABASE_CONF = f"""\
AuthType=auth/munge
AuthInfo=socket={MUNGE}
DbdHost={{host}}
DbdAddr=127.0.0.1
DbdPort={DATABASE_PORT}
SlurmUser=root
LogFile={ROOT}/log/slurmdbd.log
PidFile={ROOT}/run/slurmdbd.own
StorageType=accounting_storage/mysql
StorageHost=localhost
StorageUser=root
StorageLoc=relaxlab
CommitDelay=0
"""


def missing() -> str:
    """Why no cluster can be had here; empty where it can."""
    if os.geteuid() != 0:
        return "not root"
    if all(shutil.which(program) for program in PROGRAMS):
        return ""
    return "" if shutil.which("apt-get") else "Slurm is not installed and there is no apt-get"


def install() -> None:
    """Debian's packages, without letting them start services."""
    if all(shutil.which(program) for program in PROGRAMS):
        return
    policy = Path("/usr/sbin/policy-rc.d")
    ours = not policy.exists()
    if ours:
        policy.write_text("#!/bin/sh\nexit 101\n")
        policy.chmod(0o755)
    quiet = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    try:
        subprocess.run(["apt-get", "update", "-qq"], check=True, env=quiet)
        words = ["apt-get", "install", "-y", "-qq", "--no-install-recommends", *PACKAGES.split()]
        subprocess.run(words, check=True, env=quiet, stdout=subprocess.DEVNULL)
    finally:
        if ours:
            policy.unlink()


def environment() -> dict[str, str]:
    """What a client needs in its environment."""
    return {"SLURM_CONF": str(CONF)}


# --- daemons ---------------------------------------------------------------------------------


def pid_of(name: str) -> int | None:
    """The process of a daemon of this lab; a recycled pid does not carry the mark."""
    try:
        pid = int((ROOT / "run" / f"{name}.pid").read_text())
        marks = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except (FileNotFoundError, ProcessLookupError, ValueError):
        return None
    return pid if f"{MARK}={ROOT}/{name}".encode() in marks else None


def spawn(name: str, words: list[str], **variables: str) -> None:
    """Start a daemon in a session of its own, unless it runs."""
    if pid_of(name) is not None:
        return
    with (ROOT / "log" / f"{name}.out").open("ab") as log:
        process = subprocess.Popen(
            words,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
            env={**os.environ, **environment(), **variables, MARK: f"{ROOT}/{name}"},
        )
    (ROOT / "run" / f"{name}.pid").write_text(str(process.pid))


def end(name: str, number: int, patience_s: float) -> None:
    """Signal a daemon and wait for its end; KILL where it does not hear."""
    pid = pid_of(name)
    if pid is None:
        return
    os.kill(pid, number)
    until = time.monotonic() + patience_s
    while pid_of(name) is not None and time.monotonic() < until:
        time.sleep(0.05)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(pid, os.WNOHANG)
    if pid_of(name) is not None:
        os.kill(pid, signal.SIGKILL)


def answers(*words: str) -> bool:
    """Whether a command succeeds within five seconds."""
    try:
        found = subprocess.run(
            words, capture_output=True, timeout=5, check=False, env={**os.environ, **environment()}
        )
    except (subprocess.TimeoutExpired, FileNotFoundError):
        return False
    return found.returncode == 0


def wait_for(what: str, ready: Callable[[], bool], patience_s: float = 60.0) -> None:
    """Poll until `ready`; RuntimeError with the ends of the logs after a while."""
    until = time.monotonic() + patience_s
    while not ready():
        if time.monotonic() > until:
            logs = [p for p in (ROOT / "log").iterdir() if p.stat().st_size]
            tails = [f"{p.name}: {p.read_text(errors='replace')[-500:]}" for p in logs]
            raise RuntimeError("\n".join([f"timed out waiting for {what}", *tails]))
        time.sleep(0.05)


@contextlib.contextmanager
def one_at_a_time() -> Iterator[None]:
    """Starts and stops exclude each other."""
    with open(f"{ROOT}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


# --- start and stop --------------------------------------------------------------------------


def start() -> None:
    """Bring everything up with no jobs in it; returns when all nodes answer."""
    with one_at_a_time():
        _stop()
        shutil.rmtree(ROOT, ignore_errors=True)
        configure()
        spawn("munged", _munged())
        start_database()
        spawn("slurmctld", ["slurmctld", "-D", "-f", str(CONF)])
        for number in range(1, NODES + 1):
            boot(number)
        wait_for("slurmctld", lambda: answers("scontrol", "ping"))
        wait_for("the nodes", nodes_up)


def configure() -> None:
    """Directories, key, device files, host names and configuration."""
    for name in ("etc", "run", "log", "state", "spool", "dev", "munge/private"):
        (ROOT / name).mkdir(parents=True)
    for path, mode in ((ROOT, 0o755), (ROOT / "munge", 0o755), (ROOT / "munge/private", 0o700)):
        path.chmod(mode)
    key = ROOT / "munge/private/key"
    key.touch(mode=0o600)
    key.write_bytes(os.urandom(1024))
    for gpu in range(GPUS):  # gres.conf wants distinct character devices; this one is /dev/null
        os.mknod(ROOT / f"dev/nvidia{gpu}", 0o020666, os.makedev(1, 3))
    host = socket.gethostname().split(".")[0]
    names = [f"127.0.1.{n} n{n}\n" for n in range(1, NODES + 1)]
    (ROOT / "etc/hosts").write_text(f"127.0.0.1 localhost {host}\n" + "".join(names))
    first_job = int(time.time()) % 6_000_000 * 10 + 1  # ids are not reused between starts
    CONF.write_text(SLURM_CONF.format(host=host, first_job=first_job))
    gres = f"NodeName=n[1-{NODES}] Name=gpu File={ROOT}/dev/nvidia[0-{GPUS - 1}]\n"
    (ROOT / "etc/gres.conf").write_text(gres)
    database = ROOT / "etc/slurmdbd.conf"
    database.touch(mode=0o600)
    database.write_text(DATABASE_CONF.format(host=host))


def _munged() -> list[str]:
    private = ROOT / "munge/private"
    return [
        "munged",
        "--foreground",
        "--force",
        f"--key-file={private}/key",
        f"--socket={MUNGE}",
        f"--pid-file={ROOT}/munge/pid",
        f"--log-file={private}/log",
        f"--seed-file={private}/seed",
    ]


def start_database() -> None:
    """MariaDB without a network, and slurmdbd on it: sacct works."""
    data = f"--datadir={ROOT}/mysql"
    subprocess.run(
        [
            "mariadb-install-db",
            "--no-defaults",
            "--user=root",
            data,
            "--skip-test-db",
            "--auth-root-authentication-method=normal",
            "--innodb-log-file-size=16M",
        ],
        check=True,
        capture_output=True,
    )
    spawn(
        "mariadbd",
        [
            "mariadbd",
            "--no-defaults",
            "--user=root",
            data,
            f"--socket={MYSQL}",
            f"--pid-file={ROOT}/run/mariadbd.own",
            "--skip-networking",
            "--skip-log-bin",
            "--innodb-buffer-pool-size=64M",
            "--innodb-log-file-size=16M",
            "--innodb-lock-wait-timeout=900",
            "--innodb-flush-log-at-trx-commit=0",
        ],
    )
    client = ("mariadb", "--no-defaults", "-S", str(MYSQL), "-e", "select 1")
    wait_for("mariadbd", lambda: answers(*client))
    wait_for("munged", MUNGE.is_socket)
    spawn("slurmdbd", ["slurmdbd", "-D"], MYSQL_UNIX_PORT=str(MYSQL))
    wait_for("slurmdbd", lambda: answers("sacctmgr", "-n", "show", "cluster"))


def nodes_up() -> bool:
    """Whether every node answers."""
    words = ["sinfo", "-h", "-N", "-r", "-t", "idle,mixed,alloc,comp", "-o", "%N"]
    found = subprocess.run(
        words, capture_output=True, text=True, check=False, env={**os.environ, **environment()}
    )
    return len(set(found.stdout.split())) == NODES


def stop() -> None:
    """End everything; safe at any time."""
    with one_at_a_time():
        _stop()


def _stop() -> None:
    for number in range(1, NODES + 1):
        kill(number)
    for name, patience_s in (("slurmctld", 10), ("slurmdbd", 10), ("mariadbd", 20), ("munged", 5)):
        end(name, signal.SIGTERM, patience_s)


# --- single nodes ----------------------------------------------------------------------------


def boot(number: int) -> None:
    """Switch a node on."""
    (ROOT / f"spool/n{number}").mkdir(parents=True, exist_ok=True)
    inside = (
        f"hostname n{number}; mount --bind {ROOT}/etc/hosts /etc/hosts; "
        f"slurmd -D -f {CONF} -N n{number} & wait $!"
    )
    namespaces = ["unshare", "--uts", "--pid", "--fork", "--mount-proc", "--kill-child=KILL"]
    spawn(f"node-n{number}", [*namespaces, "bash", "-c", inside])


def kill(number: int) -> None:
    """Power cut: the node's daemon and all its tasks are gone at once."""
    end(f"node-n{number}", signal.SIGKILL, 2)


def freeze(number: int) -> None:
    """The node's daemon answers no more while its tasks go on; `thaw` ends that."""
    os.kill(_slurmd(number), signal.SIGSTOP)


def thaw(number: int) -> None:
    """Let a frozen daemon go on."""
    os.kill(_slurmd(number), signal.SIGCONT)


def _slurmd(number: int) -> int:
    shell = subprocess.check_output(["pgrep", "-P", str(pid_of(f"node-n{number}"))], text=True)
    found = subprocess.check_output(["pgrep", "-P", shell.strip(), "-x", "slurmd"], text=True)
    return int(found)


def main(words: list[str]) -> None:
    """The command line."""
    plain = {"install": install, "start": start, "stop": stop}
    of_node = {"kill": kill, "boot": boot, "freeze": freeze, "thaw": thaw}
    if words in ([name] for name in plain):
        plain[words[0]]()
    elif words == ["env"]:
        print("\n".join(f"export {name}={value}" for name, value in environment().items()))
    elif len(words) == 2 and words[0] in of_node:
        of_node[words[0]](int(words[1]))
    else:
        sys.exit(__doc__)


if __name__ == "__main__":
    main(sys.argv[1:])
