"""Coverage-guided fuzzing of everything that parses bytes from a file: ``make fuzz``."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "tests"))  # helpers: sources in memory
