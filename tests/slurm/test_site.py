"""The site profile: what it puts around a job, and one line for each fault."""

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


def test_apptainer_wraps_the_interpreter(profile):
    assert load_site(profile(PROFILE)).python_command("/venv/bin/python") == (
        "apptainer exec --nv --bind /runs --bind /models:/models:ro /images/relax.sif "
        "/venv/bin/python"
    )


def test_pyxis_goes_through_srun():
    site = Site(container="pyxis", image="relax.sqsh", mounts=("/runs:/runs", "/models"))
    assert site.python_command("python3") == "python3"
    assert site.srun_arguments() == [
        "--container-image=relax.sqsh",
        "--container-mounts=/runs:/runs,/models",
    ]


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
