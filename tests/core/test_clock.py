import time

from lightning_memsave.core.clock import processor_time_s


def test_time_in_which_nothing_is_computed_does_not_count():
    start_s, since_s = time.perf_counter(), processor_time_s()
    while time.perf_counter() - start_s < 0.2:
        time.sleep(0.05)
    assert processor_time_s() - since_s < 0.1


def test_time_in_which_is_computed_counts():
    since_s = processor_time_s()
    while processor_time_s() == since_s:
        sum(range(100))
