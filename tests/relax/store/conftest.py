"""store_cases.py is shared by the tests of this folder and the processes that they start."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
