"""The site profile: what it puts around a job, and one line for each fault."""

import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from slurm.errors import JobError
from slurm.site import Site, load_site

PROFILE = """
modules = ["cuda/12.4"]
setup = ["ulimit -n 65536"]
container = "apptainer"
image = "/images/relax.sif"
mounts = ["/runs", "/models:/models:ro"]
hf_home = "/scratch/hf"
local_dir = "/local"
interface = "ib0"
environment = { NCCL_DEBUG = "WARN" }
"""


@pytest.fixture
def profile(tmp_path):
    path = tmp_path / "site.toml"

    def write(text):
        path.write_text(text)
        return path

    return write


def test_setup_lines_of_a_whole_profile(profile):
    assert load_site(profile(PROFILE)).setup_lines(Path("/runs/x/code/ab")) == [
        "module load cuda/12.4",
        "ulimit -n 65536",
        "export PYTHONPATH=/runs/x/code/ab${PYTHONPATH:+:$PYTHONPATH}",
        "export PYTHONSAFEPATH=1",
        "export PYTHONUNBUFFERED=1",
        "export HF_HUB_OFFLINE=1",
        'export TRITON_CACHE_DIR="/local/relax-$USER/triton"',
        'export TORCHINDUCTOR_CACHE_DIR="/local/relax-$USER/inductor"',
        'export VLLM_CACHE_ROOT="/local/relax-$USER/vllm"',
        'export RELAX_LOCAL_DIR="/local/relax-$USER"',
        "export HF_HOME=/scratch/hf",
        "export NCCL_SOCKET_IFNAME=ib0",
        "export GLOO_SOCKET_IFNAME=ib0",
        "export NCCL_DEBUG=WARN",
    ]


IFNAMES = ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME")


def env(*more):
    """The job's variables once more, inside of a container whose image may have others."""
    names = ("PYTHONPATH", "PYTHONSAFEPATH", "PYTHONUNBUFFERED", "HF_HUB_OFFLINE")
    names += ("TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "VLLM_CACHE_ROOT", "RELAX_LOCAL_DIR")
    return "env " + " ".join(f'{name}="${name}"' for name in (*names, *more))


def test_values_with_spaces_reach_a_container(tmp_path, monkeypatch):
    """The lines of a script, run: what the command inside gets, though the image has its own."""
    monkeypatch.setenv("PYTHONPATH", "/a theirs")
    site = Site(container="pyxis", image="i", environment={"WORDS": "a b$HOME"})
    python = site.python_command(shlex.quote(sys.executable))
    lines = [*site.setup_lines(tmp_path / "of me"), "export -n PYTHONPATH WORDS"]
    show = "import os; print(os.environ['PYTHONPATH'], os.environ['WORDS'], sep='|')"
    text = "\n".join([*lines, f"{python} -c {shlex.quote(show)}"])
    said = subprocess.run(["bash", "-c", text], capture_output=True, text=True, check=True).stdout
    assert said == f"{tmp_path}/of me:/a theirs|a b$HOME\n"


def test_apptainer_wraps_the_interpreter(profile):
    assert load_site(profile(PROFILE)).python_command("/venv/bin/python") == (
        "apptainer exec --nv --bind /runs:/runs --bind /models:/models:ro --bind /local:/local "
        f"--bind /scratch/hf:/scratch/hf /images/relax.sif {env('HF_HOME', *IFNAMES, 'NCCL_DEBUG')}"
        " /venv/bin/python"
    )


def test_pyxis_goes_through_srun():
    site = Site(container="pyxis", image="relax.sqsh", mounts=("/runs:/runs", "/models"))
    assert site.python_command("python3") == f"{env()} python3"
    assert site.srun_arguments() == [
        "--container-image=relax.sqsh",
        "--container-mounts=/runs:/runs,/models:/models",
    ]
    assert Site(container="pyxis", image="i").srun_arguments() == ["--container-image=i"]
    beside = Site(container="pyxis", image="i", mounts=("/a:/scratch",), local_dir="/scratch/x")
    assert beside.srun_arguments()[1] == "--container-mounts=/a:/scratch"


def test_without_a_container_python_is_the_submitters_own():
    assert Site().python_command("/venv/bin/python") == "/venv/bin/python"
    assert Site().srun_arguments() == []


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("modles = []", "modles: no such key; did you mean modules?"),
        ("modules = 'cuda'", "modules = 'cuda'; must be a list of texts"),
        ("environment = 'A=1'", "environment = 'A=1'; must be a table of texts"),
        ("container = 'docker'", "container = 'docker'; allowed: pyxis, apptainer"),
        ("container = 'pyxis'", "container = 'pyxis' needs image"),
        ("a = ", "not TOML"),
    ],
)
def test_faults_are_one_line(profile, text, fault):
    with pytest.raises(JobError) as error:
        load_site(profile(text))
    assert fault in str(error.value)
    assert "\n" not in str(error.value)


def test_missing_file():
    with pytest.raises(JobError, match="no such file; give the path of a site"):
        load_site("/no/such.toml")
