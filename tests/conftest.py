"""Settings for every test: clients run in the test's own process unless a test asks for workers."""

import os
import signal

os.environ.setdefault("ANYSIZE_ENGINE", "inprocess")  # also for commands that tests start
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # so a shell starts what is to run in the background
    signal.signal(signal.SIGINT, signal.default_int_handler)  # commands that tests start would ignore it too
