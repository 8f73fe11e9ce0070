import pytest

from lightning_memsave.core.technique import Handle


def fail():
    raise ValueError("cannot be undone")


def test_undo_goes_on_where_one_function_fails():
    done: list[int] = []
    handle = Handle(None, ("a",), undo=[lambda: done.append(1), fail, lambda: done.append(2)])
    with pytest.raises(ValueError, match="cannot be undone"):
        handle.undo()
    assert done == [2, 1]
    handle.undo()
    assert done == [2, 1]


def test_leaving_the_context_does_not_hide_what_was_raised():
    with pytest.raises(KeyError) as raised, Handle(None, ("a",), undo=[fail]):
        raise KeyError("first")
    assert raised.value.__notes__ == ["Undoing it failed in part: ValueError: cannot be undone"]
    with pytest.raises(ValueError, match="cannot be undone"), Handle(None, ("a",), undo=[fail]):
        pass
