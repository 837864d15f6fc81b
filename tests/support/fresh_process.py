"""Run code in fresh processes that have imported torch and sluice, without the two seconds that the imports take.

A server imports both once per test session and forks for each run, so that a run starts with the heap after the
imports: nothing freed by earlier tests hides its growth. The server has a single thread and never runs code itself.

A module that uses :func:`run` has ``pytestmark = pytest.mark.usefixtures("fresh_processes")``. Code that measures the
interpreter itself, or what is imported, starts ``sys.executable`` instead.
"""

from __future__ import annotations

import ctypes
import faulthandler
import gc
import itertools
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
import types
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import IO, Any, NoReturn, Self

#: Seconds until a run is killed, unless the caller gives its own limit: less than the timeout of a test.
_TIMEOUT = 200.0

#: Bytes of the longest message; requests carry source code.
_MESSAGE = 1 << 20

#: Advice of madvise(2) to fault pages in for reading; the module mmap has no name for it.
_MADV_POPULATE_READ = 22

_server: socket.socket | None = None
_numbers = itertools.count()


def run(
    code: str, *arguments: object, env: Mapping[str, str] | None = None, timeout: float = _TIMEOUT
) -> subprocess.CompletedProcess[str]:
    """Run code as ``python -c`` does, with torch and the public names of sluice imported.

    Args:
        code: The program. It may set limits of the process, replace functions and be killed.
        arguments: Its ``sys.argv[1:]``, as text.
        env: Its environment; that of this process by default.
        timeout: Seconds until it is killed.

    Raises:
        subprocess.TimeoutExpired: It was killed after its timeout.
    """
    command = ["-c", *map(str, arguments)]
    with ExitStack() as stack:
        outputs = [stack.enter_context(tempfile.TemporaryFile("w+", encoding="utf-8")) for _ in range(2)]
        request = {**_program(code, command, env), "timeout": timeout}
        with open(os.devnull, encoding="utf-8") as nothing:
            status = _asked(request, nothing, *outputs)
        out, err = (_text(output) for output in outputs)
    if status is None:
        late = subprocess.TimeoutExpired(command, timeout, out, err)
        late.add_note(err)  # its stacks
        raise late
    return subprocess.CompletedProcess(command, status, out, err)


def _program(code: str, argv: list[str], env: Mapping[str, str] | None) -> dict[str, Any]:
    environment = dict(os.environ if env is None else env)
    return {"code": code, "argv": argv, "path": sys.path, "directory": str(Path.cwd()), "environment": environment}


def _asked(request: dict[str, Any], *files: IO[Any]) -> int | None:
    """Send a request with the files that become standard input, output and error; return the answer."""
    if _server is None:
        raise RuntimeError('the module needs pytestmark = pytest.mark.usefixtures("fresh_processes")')
    number = next(_numbers)
    socket.send_fds(_server, [json.dumps({**request, "number": number}).encode()], [file.fileno() for file in files])
    while reply := _server.recv(_MESSAGE):
        answer: int | None
        answered, answer = json.loads(reply)
        if answered == number:  # and not a request whose test was interrupted while it waited
            return answer
    raise RuntimeError("the server of fresh processes has ended")


class Process:
    """A stand-in for ``subprocess.Popen`` of an interpreter with ``-m`` or ``-c``, with pipes of text."""

    def __init__(
        self, command: list[str], *, stderr: IO[bytes] | None = None, env: Mapping[str, str] | None = None, **_: object
    ) -> None:
        code, *argv = _parsed(command)
        ends = [*os.pipe(), *os.pipe()]
        self.stdin, self.stdout = os.fdopen(ends[1], "w", encoding="utf-8"), os.fdopen(ends[2], encoding="utf-8")
        with (
            os.fdopen(ends[0], "rb") as their_input,
            os.fdopen(ends[3], "wb") as their_output,
            os.fdopen(os.dup(2 if stderr is None else stderr.fileno()), "wb") as their_errors,
        ):
            started = _asked(_program(code, argv, env), their_input, their_output, their_errors)
        assert started is not None
        self.pid = started
        self.returncode: int | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stdout.close()
        with suppress(BrokenPipeError):
            self.stdin.close()
        self.wait()

    def wait(self) -> int:
        """Return the exit status after the process has ended."""
        if self.returncode is None:
            self.returncode = _asked({"ended": self.pid})
        assert self.returncode is not None
        return self.returncode

    def kill(self) -> None:
        """Kill the process, unless it was waited for."""
        if self.returncode is None:
            os.kill(self.pid, signal.SIGKILL)


def _parsed(command: list[str]) -> list[str]:
    """Return the code and ``sys.argv`` of a command that starts an interpreter."""
    program, option, code, *arguments = command
    assert program == sys.executable
    if option == "-m":
        code = f"import runpy; runpy.run_module({code!r}, run_name='__main__', alter_sys=True)"
    return [code, option, *arguments]


def _run_command(
    command: list[str], *, env: Mapping[str, str] | None = None, timeout: float = _TIMEOUT, **_: object
) -> subprocess.CompletedProcess[str]:
    """Run a command as ``subprocess.run`` with captured text and without a check of the exit status."""
    code, _option, *arguments = _parsed(command)
    return run(code, *arguments, env=env, timeout=timeout)


#: Stand-in for the module ``subprocess`` in code that uses only these names.
SUBPROCESS = types.SimpleNamespace(
    Popen=Process, run=_run_command, PIPE=subprocess.PIPE, TimeoutExpired=subprocess.TimeoutExpired
)


def _text(output: Any) -> str:
    output.seek(0)
    text: str = output.read()
    return text


@contextmanager
def serving() -> Iterator[None]:
    """Run a server for the block, as the session fixture ``fresh_processes`` does."""
    global _server  # noqa: PLW0603  one server per test process, which helpers of many modules use
    # SEQPACKET keeps messages whole. The server ends when this end is closed, however this process ends.
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    search = os.pathsep.join(path for path in sys.path if path)
    with ours, theirs:
        process = subprocess.Popen(
            [sys.executable, "-m", "support.fresh_process", str(theirs.fileno())],
            stdin=subprocess.DEVNULL,
            pass_fds=[theirs.fileno()],
            start_new_session=True,  # an interrupt of the terminal is for pytest
            # Thread pools of OpenBLAS do not survive a fork.
            env={**os.environ, "PYTHONPATH": search, "OPENBLAS_NUM_THREADS": "1"},
        )
        theirs.close()
        _server = ours
        try:
            yield
        finally:
            _server = None
            ours.close()
            process.wait()


def _serve(connection: socket.socket) -> None:
    while True:
        message, descriptors, _, _ = socket.recv_fds(connection, _MESSAGE, 3)
        if not message:
            return
        request = json.loads(message)
        if "ended" in request:
            answer: int | None = os.waitstatus_to_exitcode(os.waitpid(request["ended"], 0)[1])
        else:
            child = os.fork()
            if child == 0:
                connection.close()
                _be(request, descriptors)
            for descriptor in descriptors:
                os.close(descriptor)
            answer = _wait(child, connection, request["timeout"]) if "timeout" in request else child
        with suppress(BrokenPipeError):  # the client has ended
            connection.send(json.dumps([request["number"], answer]).encode())


def _wait(child: int, connection: socket.socket, timeout: float) -> int | None:
    """Return the exit status; None if the child was killed after its timeout or because the client ended."""
    handle = os.pidfd_open(child)
    waited_for: list[int] = [handle, connection.fileno()]
    ready, _, _ = select.select(waited_for, [], [], timeout)
    os.close(handle)
    if handle not in ready:
        os.kill(child, signal.SIGABRT)  # dumps its stacks
        time.sleep(1)
        os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    return os.waitstatus_to_exitcode(status) if ready else None


def _be(request: dict[str, Any], descriptors: list[int]) -> NoReturn:
    """Become the process that was requested."""
    for standard, descriptor in enumerate(descriptors):
        os.dup2(descriptor, standard)
        os.close(descriptor)
    os.chdir(request["directory"])
    os.environ.clear()
    os.environ.update(request["environment"])
    faulthandler.enable()
    sys.argv[:] = request["argv"]
    sys.path[:] = request["path"]
    tempfile.tempdir = None  # from the environment, as in any fresh process
    _map_loaded_code()
    main = types.ModuleType("__main__")
    sys.modules["__main__"] = main
    status = 0
    try:
        exec(compile(request["code"], "<string>", "exec"), vars(main))
    except SystemExit as ended:
        status = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
        if not isinstance(ended.code, int | None):
            print(ended.code, file=sys.stderr)
    except BaseException:  # noqa: BLE001  an interpreter prints any of them, and ends
        traceback.print_exc()
        status = 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _map_loaded_code() -> None:
    """Map all pages of the libraries that are loaded, so that their first use is not measured as growth.

    A fork does not inherit these pages. How many a fault maps depends on how the library came into the page cache:
    Linux 6.18 maps whole folios, 5 to 30 MiB in a small program after a fresh installation.
    """
    madvise = ctypes.CDLL(None).madvise
    for line in Path("/proc/self/maps").read_text(encoding="utf-8").splitlines():
        span, permissions, _offset, _device, inode = line.split()[:5]
        if permissions in {"r-xp", "r--p"} and inode != "0":
            start, end = (int(address, 16) for address in span.split("-"))
            size = ctypes.c_size_t(end - start)
            madvise(ctypes.c_void_p(start), size, _MADV_POPULATE_READ)  # Linux 5.14; without it, the noise stays


def _import_everything() -> None:
    import torch

    import sluice
    import sluice.testing

    for name in sluice.__all__:
        getattr(sluice, name)
    assert torch.get_num_threads()  # asked, not set: a thread pool would not survive a fork
    [threads] = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("Threads:")]
    assert threads.split()[1] == "1", threads
    gc.collect()
    gc.freeze()  # garbage collection in a child does not touch, and so copy, imported objects


if __name__ == "__main__":
    _import_everything()
    with socket.socket(fileno=int(sys.argv[1])) as inherited:
        _serve(inherited)
