"""Set before anything imports torch."""

import os

# As the product does for its own CPU workers: spinning threads starve each other on a busy machine.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
