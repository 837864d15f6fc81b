"""``python -m bench.transports``: libraries that receive ranges of a file, from a server on this machine.

Each transport runs in a new process: 8 connections take ranges of 8 MiB from a queue, into one buffer. The buffer is
touched before the clock starts. Memory is the growth of the process (``VmHWM``) from there, so that it is what a
transport holds in addition to the buffer. The order changes with each repetition, and the sum of the
bytes is compared.
"""

from __future__ import annotations

import importlib
import multiprocessing
import os
import socket
import ssl
import subprocess
import time
import traceback
import zlib
from collections.abc import Callable, Iterator, Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import Any

import click
import msgspec
from msgspec import Struct

from bench._raw_http import Span, huge_memory, in_parallel, receive, serving, spans, taken_counts
from sluice.benchmark import machine as _machine
from sluice.benchmark.cache import make_warm
from sluice.benchmark.folder import temporary_folder
from sluice.benchmark.results import show_document
from sluice.benchmark.table import console_for_tables
from sluice.machine.peaks import restart_peak

__all__ = ["TRANSPORTS", "Measured", "main", "table"]

MIB = 1 << 20
_FILE, _REQUEST_BYTES, _CONNECTIONS, _TIMEOUT_SECONDS = "bucket/object", 8 * MIB, 8, 40


class Measured(Struct, frozen=True, kw_only=True):
    """One run of a transport."""

    transport: str
    tls: bool
    gigabytes_per_second: float = 0.0
    #: Processor time of the client, in seconds per GB.
    cpu: float = 0.0
    server_cpu: float = 0.0
    #: Memory in addition to the buffer, in bytes.
    memory: int = 0
    problem: str = ""


class Place(Struct, frozen=True, kw_only=True):
    """A file of a server."""

    port: int
    nbytes: int
    #: PEM file of the certificate; None without TLS.
    certificate: str | None

    @property
    def origin(self) -> str:
        """Scheme, host and port."""
        return f"{'https' if self.certificate else 'http'}://127.0.0.1:{self.port}"

    def context(self) -> ssl.SSLContext | None:
        """Return a context that trusts the server."""
        return ssl.create_default_context(cafile=self.certificate) if self.certificate else None


def _bounds(span: Span) -> dict[str, str]:
    return {"Range": f"bytes={span.begin}-{span.begin + span.nbytes - 1}"}


def _socket(place: Place, todo: list[Span], memory: memoryview) -> None:
    """Send requests as text and receive with ``recv_into``."""

    def work(mine: Iterator[Span]) -> None:
        plain = socket.create_connection(("127.0.0.1", place.port))
        context = place.context()
        with context.wrap_socket(plain, server_hostname="127.0.0.1") if context else plain as connection:
            for span in mine:
                asked = f"GET {span.path} HTTP/1.1\r\nHost: 127.0.0.1\r\nRange: {_bounds(span)['Range']}\r\n\r\n"
                connection.sendall(asked.encode())
                head = b""
                while b"\r\n\r\n" not in head:
                    head += connection.recv(4096)
                early = head.partition(b"\r\n\r\n")[2]
                memory[span.target : span.target + len(early)] = early
                done = len(early)
                while done < span.nbytes:
                    done += connection.recv_into(memory[span.target + done : span.target + span.nbytes])

    in_parallel(work, todo, _CONNECTIONS)


def _standard(place: Place, todo: list[Span], memory: memoryview) -> None:
    receive(place.port, todo, memory, connections=_CONNECTIONS, context=place.context())


def _urllib3(place: Place, todo: list[Span], memory: memoryview, *, sluice: bool = False) -> None:
    """Receive with ``readinto`` of urllib3, or below its layers as sluice does."""
    urllib3: Any = importlib.import_module("urllib3")
    pool = urllib3.PoolManager(maxsize=_CONNECTIONS, ca_certs=place.certificate)
    if sluice:
        pools = importlib.import_module("sluice.sources.remote.http_pools")
        pool.pool_classes_by_scheme = pools.POOLS

    def work(mine: Iterator[Span]) -> None:
        for span in mine:
            answer = pool.request("GET", place.origin + span.path, headers=_bounds(span), preload_content=False)
            done = 0
            while done < span.nbytes:
                view = memory[span.target + done : span.target + min(span.nbytes, done + MIB)]
                done += pools.receive(answer, view) if sluice else answer.readinto(view)
            answer.release_conn()

    in_parallel(work, todo, _CONNECTIONS)
    pool.clear()


def _sluice(place: Place, todo: list[Span], memory: memoryview) -> None:
    _urllib3(place, todo, memory, sluice=True)


def _store(place: Place) -> tuple[Any, Any]:
    obstore: Any = importlib.import_module("obstore")
    stores: Any = importlib.import_module("obstore.store")
    options: dict[str, Any] = {"allow_http": True}
    if place.certificate:
        options["root_certificate"] = Path(place.certificate).read_bytes()
    config = {"endpoint": place.origin, "region": "us-east-1", "skip_signature": True}
    return obstore, stores.S3Store("bucket", config=config, client_options=options)


def _obstore_stream(place: Place, todo: list[Span], memory: memoryview) -> None:
    """Copy the pieces of a stream, as sluice does."""
    obstore, store = _store(place)

    def work(mine: Iterator[Span]) -> None:
        for span in mine:
            answer = obstore.get(store, "object", options={"range": (span.begin, span.begin + span.nbytes)})
            at = span.target
            for piece in answer.stream(min_chunk_size=256 << 10):
                memory[at : at + len(piece)] = memoryview(piece)
                at += len(piece)

    in_parallel(work, todo, _CONNECTIONS)


def _obstore_range(place: Place, todo: list[Span], memory: memoryview) -> None:
    """Copy whole ranges."""
    obstore, store = _store(place)

    def work(mine: Iterator[Span]) -> None:
        for span in mine:
            found = obstore.get_range(store, "object", start=span.begin, length=span.nbytes)
            memory[span.target : span.target + span.nbytes] = memoryview(found)

    in_parallel(work, todo, _CONNECTIONS)


def _s3torch(place: Place, todo: list[Span], memory: memoryview) -> None:
    """Read ranges with ``readinto`` of a reader for each thread; its sequential reader keeps the whole object."""
    if place.certificate:
        raise NotImplementedError("it trusts the certificates of the system only")
    library: Any = importlib.import_module("s3torchconnector")
    config = library.S3ClientConfig(force_path_style=True)
    objects = library.S3MapDataset.from_objects(
        [f"s3://{_FILE}"],
        region="us-east-1",
        endpoint=place.origin,
        s3client_config=config,
        reader_constructor=library.S3ReaderConstructor.range_based(buffer_size=0),
    )

    def work(mine: Iterator[Span]) -> None:
        with objects[0] as file:
            for span in mine:
                file.seek(span.begin)
                done = 0
                while done < span.nbytes:
                    done += file.readinto(memory[span.target + done : span.target + span.nbytes])

    in_parallel(work, todo, _CONNECTIONS)


#: Transports by name, with the module that each needs.
TRANSPORTS: Mapping[str, tuple[Callable[[Place, list[Span], memoryview], None], str]] = {
    "socket, `recv_into`": (_socket, "socket"),
    "http.client, `readinto`": (_standard, "http.client"),
    "urllib3, `readinto`": (_urllib3, "urllib3"),
    "urllib3 as in sluice": (_sluice, "sluice.sources.remote.http_pools"),
    "obstore, stream": (_obstore_stream, "obstore.store"),
    "obstore, `get_range`": (_obstore_range, "obstore.store"),
    "s3torchconnector": (_s3torch, "s3torchconnector"),
}


def _work(name: str, place: Place, expected: int, answers: Connection) -> None:
    measured = Measured(transport=name, tls=place.certificate is not None)
    try:
        answers.send(_measure(name, place, expected, measured))
    except ImportError as error:
        answers.send(msgspec.structs.replace(measured, problem=f"not installed: {error.name}"))
    except BaseException:  # noqa: BLE001  (sent to the parent)
        problem = traceback.format_exc(limit=-1).strip().splitlines()[-1][:120]
        answers.send(msgspec.structs.replace(measured, problem=problem))


def _measure(name: str, place: Place, expected: int, measured: Measured) -> Measured:
    os.environ |= {"AWS_ACCESS_KEY_ID": "bench", "AWS_SECRET_ACCESS_KEY": "bench", "AWS_EC2_METADATA_DISABLED": "true"}
    if place.certificate:
        os.environ["AWS_CA_BUNDLE"] = place.certificate
    transport, module = TRANSPORTS[name]
    importlib.import_module(module)
    held = huge_memory(place.nbytes)
    memory = memoryview(held)
    memory[::4096] = bytes(len(memory[::4096]))
    todo = spans([(f"/{_FILE}", place.nbytes)], _REQUEST_BYTES)
    restart_peak()
    before, used, began = _status("VmRSS"), time.process_time(), time.perf_counter()
    transport(place, todo, memory)
    seconds, cpu, growth = time.perf_counter() - began, time.process_time() - used, _status("VmHWM") - before
    if zlib.crc32(memory) != expected:
        raise ValueError("wrong bytes")
    gigabytes = place.nbytes / 1e9
    return msgspec.structs.replace(
        measured, gigabytes_per_second=gigabytes / seconds, cpu=cpu / gigabytes, memory=max(0, growth)
    )


def _status(field: str) -> int:
    with open("/proc/self/status", encoding="ascii") as lines:
        return next(1024 * int(line.split()[1]) for line in lines if line.startswith(field))


def _run(name: str, place: Place, expected: int) -> Measured:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_work, args=(name, place, expected, theirs))
    taken_counts(place.port, place.context())
    process.start()
    theirs.close()
    try:
        answered = ours.poll(_TIMEOUT_SECONDS)
        late = Measured(transport=name, tls=place.certificate is not None, problem="no answer in time")
        measured: Measured = ours.recv() if answered else late
    except EOFError:
        measured = Measured(transport=name, tls=place.certificate is not None, problem="killed")
    finally:
        process.kill()
        process.join()
        ours.close()
    server_cpu = taken_counts(place.port, place.context())["cpu"] / (place.nbytes / 1e9)
    return msgspec.structs.replace(measured, server_cpu=server_cpu)


def table(done: list[Measured]) -> list[str]:
    """Return the lines of the table, medians."""
    names = "transport | GB/s | client CPU s per GB | server CPU s per GB | MiB without the buffer"
    lines = [
        f"| {names} | with TLS: GB/s | client CPU s per GB | remark |",
        "|---|---:|---:|---:|---:|---:|---:|---|",
    ]
    for name in dict.fromkeys(each.transport for each in done):
        cells, remarks = [], []
        for tls in (False, True):
            same = [each for each in done if (each.transport, each.tls) == (name, tls)]
            good = [each for each in same if not each.problem]
            remarks += [f"{'TLS: ' if tls else ''}{each.problem}" for each in same[:1] if each.problem]
            figures = [
                f"{median(each.gigabytes_per_second for each in good):.2f}" if good else "-",
                f"{median(each.cpu for each in good):.2f}" if good else "-",
                f"{median(each.server_cpu for each in good):.2f}" if good else "-",
                f"{max(each.memory for each in good) / MIB:,.0f}" if good else "-",
            ]
            cells += figures[:2] if tls else figures
        lines.append(f"| {name} | {' | '.join(cells)} | {'; '.join(remarks)} |")
    return lines


def _certificate(folder: Path) -> Path:
    """Make a certificate for the loopback address; return the file that holds it and its key."""
    path = folder / "server.pem"
    command = (
        "openssl req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=127.0.0.1 -addext subjectAltName=IP:127.0.0.1"
    )
    command += " -addext basicConstraints=critical,CA:FALSE"  # obstore refuses the certificate of an authority
    files = ["-keyout", str(folder / "key.pem"), "-out", str(folder / "certificate.pem")]
    subprocess.run([*command.split(), *files], check=True, capture_output=True, timeout=60)
    path.write_bytes((folder / "key.pem").read_bytes() + (folder / "certificate.pem").read_bytes())
    return path


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--mib", type=click.IntRange(1), default=1024, show_default=True, help="Size of the file.")
@click.option("--runs", type=click.IntRange(1), default=3, show_default=True, help="Repetitions; tables show medians.")
@click.option("--transport", "chosen", type=click.Choice(list(TRANSPORTS)), multiple=True, help="Only this.")
@click.option("--directory", type=click.Path(path_type=Path), help="Where the file goes; it is removed.")
@click.option("--out", type=click.Path(path_type=Path), default=Path("bench-out"), show_default=True, help="Results.")
def main(mib: int, runs: int, chosen: tuple[str, ...], directory: Path | None, out: Path) -> None:
    """Compare transports, without and with TLS."""
    console = console_for_tables()
    done: list[Measured] = []
    with temporary_folder(directory) as folder:
        root = folder / "files"
        (root / "bucket").mkdir(parents=True)
        expected = 0
        with (root / _FILE).open("wb") as file:
            for _ in range(mib):
                piece = os.urandom(MIB)
                expected = zlib.crc32(piece, expected)
                file.write(piece)
        make_warm(root / _FILE)
        certificate = _certificate(folder)
        names = chosen or tuple(TRANSPORTS)
        for tls in (False, True):
            with serving(root, certificate=certificate if tls else None) as port:
                trusted = str(folder / "certificate.pem") if tls else None
                place = Place(port=port, nbytes=mib * MIB, certificate=trusted)
                for number in range(runs):
                    first = number % len(names)
                    for name in names[first:] + names[:first]:
                        if any(each.problem for each in done if (each.transport, each.tls) == (name, tls)):
                            continue
                        done.append(_run(name, place, expected))
                        console.print(str(done[-1]), style="dim", markup=False, highlight=False, soft_wrap=True)
        described = _machine.describe(folder, ("urllib3", "obstore", "s3torchconnector"))
    done.sort(key=lambda each: list(TRANSPORTS).index(each.transport))
    record = {"command": f"python -m bench.transports --mib {mib} --runs {runs}", "machine": described}
    show_document(console, out, "transports", {**record, "runs": msgspec.to_builtins(done)}, table(done))


if __name__ == "__main__":
    main()
