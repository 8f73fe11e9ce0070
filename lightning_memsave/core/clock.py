"""The clock of time limits."""

import time


def processor_time_s() -> float:
    """Return the processor time of this thread, so that other work on the machine uses no limit."""
    return time.thread_time()
