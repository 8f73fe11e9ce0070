import pytest

from lightning_memsave.core.memory import host_copies, is_host_copy


def test_inside_and_outside():
    assert not is_host_copy()
    with host_copies():
        assert is_host_copy()
        with host_copies():
            assert is_host_copy()
        assert is_host_copy()
    assert not is_host_copy()


def test_an_error_ends_it():
    with pytest.raises(KeyError), host_copies():
        raise KeyError
    assert not is_host_copy()
