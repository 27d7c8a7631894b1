"""The profile of one cluster: modules, container, caches, interfaces. One TOML file per site."""

from __future__ import annotations

import difflib
import shlex
import tomllib
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, get_args

from slurm.errors import JobError

Container = Literal["", "pyxis", "apptainer"]


@dataclass(frozen=True)
class Site:
    """What every job of a cluster needs before Python starts; all of it may be left out."""

    modules: tuple[str, ...] = ()
    """Loaded by `module load` in this order."""
    setup: tuple[str, ...] = ()
    """Shell lines run before srun, on the first node."""
    environment: dict[str, str] = field(default_factory=dict)
    """Variables of every rank; never secrets: they stand in the job's script."""
    python: str = ""
    """Command that starts Python on a node; empty: the submitter's own interpreter."""
    container: Container = ""
    """`pyxis` (image through srun) or `apptainer` (image in the command)."""
    image: str = ""
    """Container image, as the container system names it."""
    mounts: tuple[str, ...] = ()
    """Directories that the container sees, SOURCE or SOURCE:TARGET: run, model and data at least.

    local_dir and hf_home are seen without being named here.
    """
    hf_home: str = ""
    """HF_HOME on the nodes."""
    local_dir: str = "/tmp"
    """Node-local disk for compiler caches and models."""
    interface: str = ""
    """Network interface for NCCL and gloo, such as `ib0`."""

    def setup_lines(self, code: Path) -> list[str]:
        """Shell lines between the #SBATCH block and srun."""
        lines = [f"module load {shlex.quote(name)}" for name in self.modules]
        return [*lines, *self.setup, *(f"export {n}={v}" for n, v in self.variables(code).items())]

    def variables(self, code: Path) -> dict[str, str]:
        """What every rank's environment holds, in shell words."""
        local = f"{self.local_dir}/relax-$USER"
        variables = {
            # The user's own modules are found where the submitter finds them, after the copy.
            "PYTHONPATH": f"{shlex.quote(str(code))}${{PYTHONPATH:+:$PYTHONPATH}}",
            "PYTHONSAFEPATH": "1",  # the working directory may hold another copy of the code
            "PYTHONUNBUFFERED": "1",
            "HF_HUB_OFFLINE": "1",
            "TRITON_CACHE_DIR": f'"{local}/triton"',
            "TORCHINDUCTOR_CACHE_DIR": f'"{local}/inductor"',
            "VLLM_CACHE_ROOT": f'"{local}/vllm"',
            "RELAX_LOCAL_DIR": f'"{local}"',
        }
        if self.hf_home:
            variables["HF_HOME"] = shlex.quote(self.hf_home)
        if self.interface:
            interface = shlex.quote(self.interface)
            variables["NCCL_SOCKET_IFNAME"] = variables["GLOO_SOCKET_IFNAME"] = interface
        return variables | {name: shlex.quote(value) for name, value in self.environment.items()}

    def python_command(self, own: str) -> str:
        """The shell words that start Python on a node."""
        python = self.python or own
        if not self.container:
            return python
        # An image's own variables come before those of the job, and its PYTHONPATH has no stages.
        names = self.variables(Path())
        inside = " ".join(["env", *(f'{name}="${name}"' for name in names), python])
        if self.container == "pyxis":
            return inside
        binds = [word for mount in self._seen() for word in ("--bind", shlex.quote(mount))]
        return " ".join(["apptainer", "exec", "--nv", *binds, shlex.quote(self.image), inside])

    def srun_arguments(self) -> list[str]:
        """What the container needs on srun's command line."""
        if self.container != "pyxis":
            return []
        mounts = ",".join(self._seen())
        return [
            f"--container-image={self.image}",
            *([f"--container-mounts={mounts}"] if mounts else []),
        ]

    def _seen(self) -> list[str]:
        """SOURCE:TARGET of all that the container sees (older versions of pyxis want both).

        Containers have a /tmp as it is.
        """
        mounts = [mount if ":" in mount else f"{mount}:{mount}" for mount in self.mounts]
        targets = [Path("/tmp"), *(Path(mount.split(":")[1]) for mount in mounts)]
        own = [d for d in (self.local_dir, self.hf_home) if d]
        hidden = [d for d in own if not any(Path(d).is_relative_to(target) for target in targets)]
        return [*mounts, *(f"{d}:{d}" for d in hidden)]


def load_site(path: str | Path) -> Site:
    """Read a profile; JobError with one line where it cannot be used."""
    try:
        tree = tomllib.loads(Path(path).read_text())
    except FileNotFoundError:
        raise JobError(f"{path}: no such file; give the path of a site profile (TOML)") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise JobError(f"{path}: not TOML: {error}") from None
    known = {f.name: f for f in fields(Site)}
    for name, value in tree.items():
        if name not in known:
            close = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {close[0]}?" if close else f"known: {', '.join(known)}"
            raise JobError(f"{path}: {name}: no such key; {hint}")
        _check_type(path, name, value, str(known[name].type))
    if tree.get("container", "") not in get_args(Container):
        raise JobError(f"{path}: container = {tree['container']!r}; allowed: pyxis, apptainer")
    if tree.get("container") and not tree.get("image"):
        raise JobError(f"{path}: container = {tree['container']!r} needs image")
    values: dict[str, Any] = {n: tuple(v) if isinstance(v, list) else v for n, v in tree.items()}
    return Site(**values)


def _check_type(path: str | Path, name: str, value: object, declared: str) -> None:
    if declared.startswith("tuple"):
        wanted = "a list of texts"
        fine = isinstance(value, list) and all(isinstance(v, str) for v in value)
    elif declared.startswith("dict"):
        wanted = "a table of texts"
        fine = isinstance(value, dict) and all(isinstance(v, str) for v in value.values())
    else:
        wanted, fine = "a text", isinstance(value, str)
    if not fine:
        raise JobError(f"{path}: {name} = {value!r}; must be {wanted}")
