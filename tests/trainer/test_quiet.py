import importlib
import logging
import signal
import sys
import threading
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lightning_memsave.trainer.nested_fit import quiet, silent_logger

PACKAGES = ("lightning.pytorch", "pytorch_lightning")


def in_thread(function: Any) -> None:
    thread = threading.Thread(target=function)
    thread.start()
    thread.join()


def say(where: str) -> None:
    sys.stdout.write(f"{where} out\n")
    print(f"{where} print")  # noqa: T201
    print(f"{where} err", file=sys.stderr, flush=True)  # noqa: T201
    logging.getLogger("somebody").warning("%s logged", where)


def test_this_thread_is_not_heard_and_others_are(capsys, caplog):
    handle = logging.Logger.handle
    say("before")
    with quiet():
        say("inside")
        assert logging.Logger.handle is handle  # nothing is replaced in a class of all
        in_thread(lambda: say("beside"))
    say("after")
    captured = capsys.readouterr()
    for heard in ("before", "beside", "after"):
        assert f"{heard} out\n{heard} print\n" in captured.out
        assert f"{heard} err" in captured.err
        assert f"{heard} logged" in caplog.messages
    assert "inside" not in captured.out + captured.err + caplog.text


def test_streams_are_otherwise_what_they_were():
    with quiet():
        assert sys.stdout.encoding == sys.__stdout__.encoding
        assert not sys.stdout.isatty()


def test_without_a_console(monkeypatch):
    monkeypatch.setattr(sys, "stdout", None)
    with quiet():
        print("nobody")  # noqa: T201
        in_thread(lambda: print("nobody"))  # noqa: T201
        sys.stdout.flush()
    assert sys.stdout is None


def test_no_warning_comes_through_and_filters_are_as_before():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        before = warnings.filters[:]
        with quiet():
            warnings.warn("something", stacklevel=1)
        assert warnings.filters[:] == before
        with pytest.raises(UserWarning, match="something"):
            warnings.warn("something", stacklevel=1)


@pytest.mark.parametrize("package", PACKAGES)
def test_what_lightning_warns_of_once_is_warned_of_afterwards(package):
    rank_zero = importlib.import_module(f"{package}.utilities.rank_zero")
    module = importlib.import_module(f"{package}.trainer.connectors.logger_connector.result")
    cache = module.warning_cache
    cache.add("said before")
    try:
        with quiet():
            cache.warn("said inside")
            rank_zero.rank_zero_warn("said by a function")
        assert "said before" in cache
        with pytest.warns(UserWarning, match="said inside"):
            cache.warn("said inside")
        cache.warn("said before")  # would be an error here
    finally:
        cache.difference_update({"said before", "said inside"})


def test_what_transformers_warns_of_once_is_warned_of_afterwards():
    from transformers.utils import logging as hugging_face

    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logger = hugging_face.get_logger("transformers.something")
    logger.setLevel(logging.WARNING)  # whatever others have set for all of transformers
    logger.addHandler(handler)
    try:
        with quiet():
            logger.warning_once("said %d time", 1)
        assert said == []
        logger.warning_once("said %d time", 1)
        logger.warning_once("said %d time", 1)
        assert said == ["said 1 time"]
    finally:
        logger.removeHandler(handler)


def test_works_outside_of_the_main_thread():
    failures: list[BaseException] = []

    def use() -> None:
        try:
            with quiet():
                pass
        except BaseException as error:
            failures.append(error)

    in_thread(use)
    assert failures == []


def test_no_process_group_is_seen(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        with quiet():
            assert not dist.is_initialized()
            with pytest.raises(ValueError, match="has not been initialized"):
                dist.all_reduce(torch.ones(1))
        assert dist.is_initialized()
        dist.all_reduce(torch.ones(1))
    finally:
        dist.destroy_process_group()


def test_everything_comes_back_after_an_error():
    def replaced():
        filters = [h.filters[:] for h in logging.root.handlers]
        handlers = {number: signal.getsignal(number) for number in signal.valid_signals()}
        return sys.stdout, sys.stderr, filters, torch.is_warn_always_enabled(), handlers

    before = replaced()
    with pytest.raises(KeyError), quiet():  # noqa: PT012 - what is done before it
        # Then torch does not note that it has warned.
        assert torch.is_warn_always_enabled()
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, lambda *_: None)
        raise KeyError
    assert replaced() == before


@pytest.mark.parametrize("package", PACKAGES)
def test_the_silent_logger_takes_everything(package):
    module = importlib.import_module(package)
    logger = silent_logger(module)
    logger.log_metrics({"a": 1.0}, step=0)
    logger.experiment.add_scalar("a", 1.0)
    assert isinstance(logger, module.loggers.Logger)
