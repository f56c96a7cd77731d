"""A PostgreSQL server that lives as long as a test, with its own folder, port and password."""

import contextlib
import os
import pwd
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

PASSWORD = "not-to-be-shown"
START_SECONDS = 60


def binary(name: str) -> Path | None:
    """One of PostgreSQL's programs, on the path or where Debian puts them."""
    found = shutil.which(name)
    if found:
        return Path(found)
    return max(Path("/usr/lib/postgresql").glob(f"*/bin/{name}"), default=None)


def need_postgres() -> None:
    """Skips a test where PostgreSQL is not installed; fails it where it must be."""
    if binary("initdb") and binary("postgres"):
        return
    if os.environ.get("LOGDEPTH_CI"):
        pytest.fail("PostgreSQL is not installed, and LOGDEPTH_CI says that it must be")
    pytest.skip("PostgreSQL is not installed")


@contextlib.contextmanager
def postgres_server() -> Iterator[str]:
    """The URL of an empty database; the server and all that it wrote are gone after the block."""
    initdb, postgres = binary("initdb"), binary("postgres")
    assert initdb
    assert postgres
    user = _other_user()
    # Not below pytest's folders, which are closed to other users; and short, for the socket's sake.
    folder = Path(tempfile.mkdtemp(prefix="pg-"))
    try:
        (folder / "password").write_text(PASSWORD)
        if user:
            for path in (folder, folder / "password"):
                shutil.chown(path, user)
        data = folder / "data"
        made = [initdb, "-D", data, "-U", "logdepth", "--auth=scram-sha-256", f"--pwfile={folder / 'password'}"]
        done = subprocess.run([*made, "--no-sync"], user=user, cwd=folder, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        port = _free_port()
        with (folder / "log").open("w") as log:
            settings = ("listen_addresses=127.0.0.1", f"port={port}", f"unix_socket_directories={folder}", "fsync=off")
            options = [part for setting in settings for part in ("-c", setting)]
            server = subprocess.Popen(
                [postgres, "-D", data, *options], user=user, cwd=folder, stdout=log, stderr=subprocess.STDOUT
            )
        try:
            url = f"postgresql+psycopg2://logdepth:{PASSWORD}@127.0.0.1:{port}/postgres"
            _wait_until_ready(server, port, folder / "log")
            yield url
        finally:
            server.send_signal(signal.SIGINT)  # SIGTERM would wait until every client is gone
            try:
                server.wait(10)
            except subprocess.TimeoutExpired:
                server.kill()
                server.wait()
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _other_user() -> str | None:
    """PostgreSQL refuses to run as root."""
    if os.geteuid() != 0:
        return None
    known = {one.pw_name for one in pwd.getpwall()}
    return next(name for name in ("postgres", "nobody") if name in known)


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


def _wait_until_ready(server: "subprocess.Popen[bytes]", port: int, log: Path) -> None:
    import psycopg2

    end = time.monotonic() + START_SECONDS
    while True:
        assert server.poll() is None, log.read_text()
        try:
            psycopg2.connect(host="127.0.0.1", port=port, user="logdepth", password=PASSWORD, dbname="postgres").close()
        except psycopg2.OperationalError:
            assert time.monotonic() < end, log.read_text()
            time.sleep(0.05)
        else:
            return
