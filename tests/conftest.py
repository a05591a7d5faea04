"""Settings for every test: clients run in the test's own process unless a test asks for workers."""

import os

os.environ.setdefault("ANYSIZE_ENGINE", "inprocess")  # also for commands that tests start
