"""Settings for every test: clients run in the test's own process unless a test asks for workers."""

import os
import signal

from anysize.engines.start import quick_start

quick_start()  # as the commands do: torch's compiler is loaded only by the tests that need it
os.environ.setdefault("ANYSIZE_ENGINE", "inprocess")  # also for commands that tests start
os.environ.setdefault("OMP_NUM_THREADS", "1")  # tests run side by side, one for each core
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # so a shell starts what is to run in the background
    signal.signal(signal.SIGINT, signal.default_int_handler)  # commands that tests start would ignore it too
