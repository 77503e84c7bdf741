"""Lets these tests use the data sets of the unit tests."""

import sys
from pathlib import Path

UNIT = Path(__file__).resolve().parents[2] / "unit" / "store"
sys.path.insert(0, str(UNIT))
