import threading

import pytest

from lightning_memsave.core.memory import HOST, category_in_context, counted_as, host_copies


def test_inside_and_outside():
    assert category_in_context() == ""
    with host_copies():
        assert category_in_context() == HOST
        with host_copies():
            assert category_in_context() == HOST
        assert category_in_context() == HOST
    assert category_in_context() == ""


def test_an_error_ends_it():
    with pytest.raises(KeyError), host_copies():
        raise KeyError
    assert category_in_context() == ""


def test_another_category_inside():
    with host_copies():
        with counted_as("parameter"):
            assert category_in_context() == "parameter"
        assert category_in_context() == HOST


def test_of_one_thread_only():
    found = []
    with host_copies():
        thread = threading.Thread(target=lambda: found.append(category_in_context()))
        thread.start()
        thread.join()
    assert found == [""]
