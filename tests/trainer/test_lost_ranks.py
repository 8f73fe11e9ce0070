"""When one process of a fit ends, the others end too and name it."""

import os
import signal
import socket
import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.faults import _ranks
from lightning_memsave.trainer import failures, lost_ranks
from lightning_memsave.trainer.lost_ranks import RankWatch


@pytest.mark.slow
@pytest.mark.parametrize(
    "chosen",
    [
        {"launcher": "lightning", "strategy": "ddp", "moment": "step", "rank": 0},
        {"launcher": "by hand", "strategy": "memsave_fsdp2", "moment": "checkpoint", "rank": 1},
        {"launcher": "lightning", "strategy": "memsave_pipeline", "moment": "step", "rank": 1},
    ],
)
def test_a_process_that_is_killed_ends_the_other_which_names_it(chosen):
    found = _ranks.kill(0, **chosen)
    assert found["outcome"] == "ended and named", found["said"]
    assert f"Rank {chosen['rank']} has ended: killed" in found["said"]


@pytest.mark.slow
def test_a_process_that_fails_and_stays_ends_the_other():
    """The other one waits in a collective, for half an hour without us."""
    chosen: dict[str, Any] = {
        "launcher": "lightning",
        "moment": _ranks.OUT_OF_MEMORY,
        "rank": 1,
        "grace_s": 2,
    }
    found = _ranks.kill(0, strategy="ddp", **chosen)
    assert found["outcome"] == "ended and named", found["said"]
    assert "Rank 1 has ended: OutOfMemoryError: CUDA out of memory" in found["said"]


# --- three ranks in this process ---


@pytest.fixture
def watches(monkeypatch):
    said: list[Any] = []
    exits: list[int] = []
    monkeypatch.setattr(lost_ranks, "GRACE_S", 0.2)
    monkeypatch.setattr(lost_ranks, "say", lambda trainer, text: said.append((trainer, text)))
    monkeypatch.setattr(failures, "say", lambda trainer, text: None)
    monkeypatch.setattr(os, "_exit", exits.append)
    made = [RankWatch(SimpleNamespace(global_rank=rank, num_nodes=1)) for rank in range(3)]
    where = made[0].listen()
    for watch in made[1:]:
        watch.connect(*where)
    for watch in made:
        watch.start()
    _until(lambda: len(_peers(made[0])) == 2)
    yield SimpleNamespace(all=made, where=where, said=said, exits=exits)
    for watch in made:
        watch.close()
    assert not [t for t in threading.enumerate() if t.name == "memsave-lost-ranks"]


def _peers(watch: RankWatch) -> list[Any]:
    return [key for key in watch._selector.get_map().values() if key.data is not None]


def _until(condition: Any) -> None:
    end_s = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < end_s
        time.sleep(0.01)


def _lose(watch: RankWatch) -> None:
    """Close the connections of a rank as the system does when it ends: no word is sent."""
    for key in _peers(watch):
        nothing = os.open(os.devnull, os.O_RDWR)
        os.dup2(nothing, key.fd)
        os.close(nothing)


def said_by(watches: Any) -> dict[int, str]:
    return {trainer.global_rank: text for trainer, text in watches.said}


def test_nobody_is_lost_where_all_finish(watches):
    for watch in watches.all:
        watch.close()
    assert watches.said == []
    assert watches.exits == []


def test_all_learn_from_rank_zero_which_rank_was_killed(watches):
    _lose(watches.all[1])
    _until(lambda: len(said_by(watches)) == 2)
    assert said_by(watches).keys() == {0, 2}
    for rank, text in said_by(watches).items():
        assert text.startswith("Rank 1 has ended: killed")
        assert text.endswith(f"Rank {rank} ends too.")
    _until(lambda: len(watches.exits) == 2)


def test_an_error_is_told_and_noted_on_the_errors_that_follow(watches):
    watches.all[2].close(ValueError("the first"))
    follows = RuntimeError("Connection closed by peer")
    watches.all[0].close(follows)
    assert follows.__notes__ == ["Rank 2 has ended: ValueError: the first."]
    _until(lambda: 1 in said_by(watches))
    assert "Rank 2 has ended: ValueError: the first." in said_by(watches)[1]
    assert 0 not in watches.exits


def test_rank_zero_is_missed(watches):
    _lose(watches.all[0])
    _until(lambda: len(said_by(watches)) == 2)
    assert all("Rank 0 has ended: killed" in said_by(watches)[rank] for rank in (1, 2))


def test_strangers_are_not_heard(watches):
    _, port, _ = watches.where
    with socket.create_connection(("127.0.0.1", port)) as stranger:
        stranger.sendall(b"guess 1\n1 nothing\n")
        stranger.shutdown(socket.SHUT_WR)
        assert stranger.recv(1) == b""
    assert watches.said == []
    assert len(_peers(watches.all[0])) == 2


def test_a_fork_does_not_keep_connections_open(watches):
    """As those of data loaders, which live on for seconds."""
    reads, writes = os.pipe()
    if (child := os.fork()) == 0:  # pragma: no cover
        os.read(reads, 1)
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        _lose(watches.all[1])
        _until(lambda: len(said_by(watches)) == 2)
    finally:
        os.write(writes, b"x")
        os.waitpid(child, 0)
        os.close(reads)
        os.close(writes)
