"""End the processes of a fit when one of them has ended: collectives would wait for it.

Launchers end what they have started themselves, and are gone when the first process is killed; NCCL
waits for half an hour then.
"""

import functools
import os
import secrets
import selectors
import socket
import sys
import threading
import weakref
from typing import Any, cast

from lightning_memsave.trainer.distributed import has_others
from lightning_memsave.trainer.failures import attempted, describe, say

GRACE_S = 20
"""Time to leave a fit after another process has ended, as by an error in a collective."""

_NEWS_S = 1  # for news of who was first, where an error may be the consequence
_SOCKET_S = 30
_FINISHED = "finished"
_KILLED = "killed, for example by the system when host memory ran out"


class RankWatch:
    """Sockets between rank zero and the others, which the system closes when a process ends.

    Nothing is sent while all train: neither a slow step nor a busy interpreter looks like an end.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer, self._rank = trainer, trainer.global_rank
        self._selector = selectors.DefaultSelector()
        self._lost, self._last_word = "", ""
        self._has_lost, self._is_closed = threading.Event(), threading.Event()
        self._waker, woken = socket.socketpair()
        self._selector.register(woken, selectors.EVENT_READ)
        name = "memsave-lost-ranks"
        self._thread = threading.Thread(target=self._watch, daemon=True, name=name)
        # In a fork the connections of its parent would stay open.
        os.register_at_fork(after_in_child=functools.partial(_drop, weakref.ref(self)))

    def listen(self) -> tuple[str, int, str]:
        """Open a port on rank zero; returns what the others need to connect."""
        is_one_machine = self._trainer.num_nodes == 1
        host = "127.0.0.1" if is_one_machine else os.environ["MASTER_ADDR"]
        server = socket.create_server((host if is_one_machine else "", 0))
        self._token = secrets.token_hex()
        self._selector.register(server, selectors.EVENT_READ)
        return host, server.getsockname()[1], self._token

    def connect(self, host: str, port: int, token: str) -> None:
        """Connect to rank zero."""
        peer = socket.create_connection((host, port), timeout=_SOCKET_S)
        peer.sendall(f"{token} {self._rank}\n".encode())
        self._selector.register(peer, selectors.EVENT_READ, (0, peer.makefile("rb")))

    def start(self) -> None:
        self._thread.start()

    def close(self, error: BaseException | None = None) -> None:
        """Leave the fit; after an error the others end too, and say which it was."""
        if isinstance(error, RuntimeError):
            self._has_lost.wait(_NEWS_S)
        if error is not None and self._lost:
            error.add_note(_sentence(self._lost))
        self._last_word = _FINISHED if error is None else f"{self._rank} {describe(error)}"
        self._is_closed.set()
        self._waker.close()
        if self._thread.ident is not None:
            self._thread.join(_SOCKET_S)
        self.drop()

    def drop(self) -> None:
        """Close all sockets; a second call does nothing."""
        for key in [*(self._selector.get_map() or {}).values()]:
            for end in (*(key.data or ())[1:], cast(socket.socket, key.fileobj)):
                end.close()
        self._waker.close()
        self._selector.close()

    def _watch(self) -> None:
        while not self._is_closed.is_set():
            for key, _ in self._selector.select():
                if self._is_closed.is_set():
                    break
                if key.data is None:
                    self._accept(cast(socket.socket, key.fileobj))
                else:
                    self._hear(key)
        self._tell(self._last_word)

    def _accept(self, server: socket.socket) -> None:
        peer, _ = server.accept()
        peer.settimeout(_SOCKET_S)
        file = peer.makefile("rb")
        try:
            token, _, rank = file.readline(200).decode(errors="replace").partition(" ")
        except OSError:
            token = ""
        if secrets.compare_digest(token.encode(), self._token.encode()):
            self._selector.register(peer, selectors.EVENT_READ, (int(rank), file))
        else:
            file.close()
            peer.close()

    def _hear(self, key: selectors.SelectorKey) -> None:
        rank, file = key.data
        try:
            line = file.readline().decode(errors="replace").strip()
        except OSError:  # the connection was reset
            line = ""
        self._selector.unregister(key.fileobj)
        file.close()
        cast(socket.socket, key.fileobj).close()
        if line != _FINISHED and not self._lost:
            self._lost = line or f"{rank} {_KILLED}"
            self._tell(self._lost)
            self._end()

    def _tell(self, line: str) -> None:
        for key in [*self._selector.get_map().values()]:
            if key.data is not None:
                with attempted(self._trainer, f"Rank {key.data[0]} was not told"):
                    cast(socket.socket, key.fileobj).sendall(f"{line}\n".encode())

    def _end(self) -> None:
        say(self._trainer, f"{_sentence(self._lost)} Rank {self._rank} ends too.")
        self._has_lost.set()
        while not (is_closed := self._is_closed.wait(GRACE_S)) and _writes_checkpoint():
            pass
        if not is_closed:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(1)  # the main thread waits in a collective, where no exception reaches it


def _drop(reference: "weakref.ref[RankWatch]") -> None:
    watch = reference()
    if watch is not None:
        watch.drop()


# Plugins that write do not communicate: they end by themselves.
def _writes_checkpoint() -> bool:
    frames = [*sys._current_frames().values()]
    for frame in frames:
        frames += [frame.f_back] if frame.f_back else []
        if frame.f_code.co_name == "save_checkpoint":
            classes = type(frame.f_locals.get("self")).__mro__
            if any(cls.__name__ == "CheckpointIO" for cls in classes):
                return True
    return False


def _sentence(lost: str) -> str:
    rank, _, why = lost.partition(" ")
    return f"Rank {rank} has ended: {why.rstrip('.: ')}."


def watch_ranks(trainer: Any) -> RankWatch | None:
    """Watch the processes of a fit, which must all call this; ``None`` where that cannot be."""
    if not has_others():
        return None
    watch, where = RankWatch(trainer), None
    with attempted(trainer, "Other processes are not told when one has ended"):
        if trainer.global_rank == 0:
            where = watch.listen()
    where = trainer.strategy.broadcast(where)
    with attempted(trainer, "This process is not told when another one has ended"):
        if where is not None:
            if trainer.global_rank > 0:
                watch.connect(*where)
            watch.start()
            return watch
    watch.drop()
    return None
