"""The engine in a child process, behind a pipe."""

from __future__ import annotations

import multiprocessing
import signal
import threading
import weakref
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess

from mrv2.config import EngineConfig
from mrv2.engine.remote_client import Mailbox, RemoteClient
from mrv2.engine.service import Command, CoreFactory, EngineMessage, Failure, make_core, run_engine
from mrv2.engine.step_outputs import ColumnWire, EngineOutputs

_EXIT_SECONDS = 10.0


class ProcessClient(RemoteClient):
    """The engine in a spawned child process; it dies with its parent, and its crash is an `EngineDeadError`.

    Spawning imports the caller's main module anew: a script must guard its entry with
    ``if __name__ == "__main__":``.
    """

    def __init__(self, config: EngineConfig, factory: CoreFactory = make_core) -> None:
        """`factory` must be importable by name in the child."""
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe(duplex=True)
        process = context.Process(target=_child_main, args=(theirs, config, factory), name="mrv2-engine", daemon=True)
        process.start()
        # the child holds the only other end, so that its death reads as end of file here
        theirs.close()
        mailbox = Mailbox()
        reader = threading.Thread(target=_read, args=(ours, process, mailbox), name="engine-reader", daemon=True)
        reader.start()
        sender = _Sender(ours)
        self.pid = process.pid
        self._finalizer = weakref.finalize(self, _stop_process, mailbox, sender, process)
        super().__init__(mailbox, sender)

    def close(self) -> None:
        self._finalizer()


class _Sender:
    """Sends whole commands from any thread."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._lock = threading.Lock()

    def __call__(self, command: Command) -> None:
        with self._lock:
            try:
                self._connection.send(command)
            except OSError:
                pass  # the child is gone: the reader sees its end and fails every waiting call


def _read(connection: Connection, process: SpawnProcess, mailbox: Mailbox) -> None:
    wire = ColumnWire()
    try:
        while True:
            message = connection.recv()
            mailbox.deliver(wire.unpack(message) if isinstance(message, EngineOutputs) else message)
    except (EOFError, OSError):
        process.join(_EXIT_SECONDS)
        mailbox.fail(Failure(_describe_exit(process)))
    except Exception as error:  # a message that cannot be unpickled: whoever waits must hear of it
        mailbox.fail(Failure(f"a message of the engine process cannot be read: {type(error).__name__}: {error}"))


def _describe_exit(process: SpawnProcess) -> str:
    code = process.exitcode
    if code is not None and code < 0:
        return f"the engine process {process.pid} was killed by {signal.Signals(-code).name}"
    hint = (
        "; its own output says more (a script that uses engine='process' must guard its entry "
        'with `if __name__ == "__main__":`)'
    )
    return f"the engine process {process.pid} ended with exit code {code}{hint if code else ''}"


def _stop_process(mailbox: Mailbox, sender: _Sender, process: SpawnProcess) -> None:
    sender(Command(-1, "close"))
    process.join(_EXIT_SECONDS)
    if process.is_alive():
        process.kill()
        process.join()
    mailbox.fail(Failure("it was closed"))


def _child_main(connection: Connection, config: EngineConfig, factory: CoreFactory) -> None:
    # Ctrl-C reaches the whole process group; the parent decides what it means
    signal.signal(signal.SIGINT, signal.SIG_IGN)

    def receive(wait: bool) -> Command | None:
        try:
            return connection.recv() if wait or connection.poll() else None
        except OSError as error:
            raise EOFError("the parent process is gone") from error

    wire = ColumnWire()

    def send(message: EngineMessage) -> None:
        try:
            connection.send(wire.pack(message) if isinstance(message, EngineOutputs) else message)
        except OSError as error:
            raise EOFError("the parent process is gone") from error

    run_engine(config, factory, receive, send)
