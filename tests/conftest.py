"""Settings for every test: clients run in its own process unless it asks for workers; all its draws are the same."""

import os
import signal

from anysize.engines.start import quick_start

quick_start()  # as the commands do: torch's compiler is loaded only by the tests that need it
os.environ.setdefault("ANYSIZE_ENGINE", "inprocess")  # also for commands that tests start
os.environ.setdefault("OMP_NUM_THREADS", "1")  # tests run side by side, one for each core
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # so a shell starts what is to run in the background
    signal.signal(signal.SIGINT, signal.default_int_handler)  # commands that tests start would ignore it too

import torch  # noqa: E402 - after what it reads when it is loaded

torch.manual_seed(0)  # for networks that a module of tests makes when it is loaded


def pytest_runtest_setup() -> None:
    """Networks that a test makes have the same first weights in every run, whatever ran before it."""
    torch.manual_seed(0)
