"""A laboratory for runs that are killed, shared by the tests of this folder."""

import shutil
import sys
import tempfile
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from crash_lab import Lab


@pytest.fixture(scope="session")
def lab():
    """In memory where the machine has such a place: these runs fsync without end."""
    memory = Path("/dev/shm")
    folder = Path(tempfile.mkdtemp(prefix="relax-lab-", dir=memory if memory.is_dir() else None))
    laboratory = Lab(folder)
    yield laboratory
    laboratory.close()
    shutil.rmtree(folder)
