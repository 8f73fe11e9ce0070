import threading

import pytest

from lightning_memsave.core.memory import HOST, category_in_context, counted_as, host_copies


def test_inside_and_outside_and_after_an_error():
    assert category_in_context() == ""
    with pytest.raises(KeyError), host_copies():  # noqa: PT012 - what is done before it
        with host_copies():
            assert category_in_context() == HOST
        with counted_as("parameter"):
            assert category_in_context() == "parameter"
        assert category_in_context() == HOST
        raise KeyError
    assert category_in_context() == ""


def test_of_one_thread_only():
    found = []
    with host_copies():
        thread = threading.Thread(target=lambda: found.append(category_in_context()))
        thread.start()
        thread.join()
    assert found == [""]
