"""The TCP store: values, waits, counters, clients that misbehave, servers that go."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from moecomm import store as store_module
from moecomm import store_wire
from moecomm.errors import ConfigError, StateError, TransportError
from moecomm.store import TcpStore
from moecomm.store_local import LocalStore
from moecomm.store_server import StoreServer
from moecomm.store_wire import MAGIC, MAX_MESSAGE, OP_GET, OP_SET, REQUEST

HAS_IPV6 = socket.has_dualstack_ipv6()
with contextlib.suppress(OSError), socket.create_server(("::1", 0), family=socket.AF_INET6):
    HAS_IPV6 = True
needs_ipv6 = pytest.mark.skipif(not HAS_IPV6, reason="this machine has no IPv6 loopback")


@pytest.fixture
def server() -> Iterator[StoreServer]:
    with StoreServer("127.0.0.1", job="test") as running:
        yield running


@pytest.fixture
def client(server: StoreServer) -> Iterator[TcpStore]:
    with connect(server) as store:
        yield store


def connect(server: StoreServer, timeout_s: float = 10.0) -> TcpStore:
    return TcpStore("127.0.0.1", server.port, job="test", timeout_s=timeout_s)


def in_background(call: Callable[[], Any]) -> tuple[threading.Thread, list[Any]]:
    outcome: list[Any] = []

    def work() -> None:
        try:
            outcome.append(call())
        except (Exception, pytest.fail.Exception) as error:  # noqa: BLE001  shown by the test
            outcome.append(error)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return thread, outcome


def store_threads() -> list[str]:
    return [t.name for t in threading.enumerate() if t.name == "moecomm-store"]


@pytest.fixture(params=["tcp", "local"])
def any_store(request: pytest.FixtureRequest) -> Any:
    return LocalStore() if request.param == "local" else request.getfixturevalue("client")


# The protocol, on both implementations


def test_values_of_any_bytes_come_back(any_store: Any) -> None:
    for value in (b"", b"\0" * 100, bytes(range(256)), os.urandom(3 << 20)):
        any_store.set("key/with:odd ünicode", value)
        assert any_store.get("key/with:odd ünicode", 1) == value


def test_a_missing_key_ends_its_wait(any_store: Any) -> None:
    for timeout_s in (-1.0, 0.0, 0.15):
        start = time.monotonic()
        with pytest.raises(TimeoutError, match="'nobody sets this'"):
            any_store.get("nobody sets this", timeout_s)
        took = time.monotonic() - start
        assert max(0.0, timeout_s) <= took < timeout_s + 2
    any_store.set("nobody sets this", b"after all")
    assert any_store.get("nobody sets this", 0) == b"after all"


def test_a_wait_ends_when_the_key_is_set(any_store: Any) -> None:
    thread, outcome = in_background(lambda: any_store.get("later", 10))
    time.sleep(0.05)
    assert outcome == []
    any_store.set("later", b"now")
    thread.join(5)
    assert outcome == [b"now"]


def test_an_endless_wait_is_allowed(any_store: Any) -> None:
    thread, outcome = in_background(lambda: any_store.get("later", float("inf")))
    time.sleep(0.05)
    any_store.set("later", b"now")
    thread.join(5)
    assert outcome == [b"now"]


def test_counters_count(any_store: Any) -> None:
    assert [any_store.add("n", 1), any_store.add("n", 41), any_store.add("n", -2)] == [1, 42, 40]
    assert any_store.get("n", 0) == b"40"
    any_store.set("text", b"no number")
    with pytest.raises(ValueError, match=r".*"):
        any_store.add("text", 1)
    assert any_store.get("text", 0) == b"no number"


def test_deleted_keys_are_gone(any_store: Any) -> None:
    any_store.set("key", b"x")
    any_store.delete("key")
    any_store.delete("key")
    with pytest.raises(TimeoutError):
        any_store.get("key", 0)
    assert any_store.add("key", 1) == 1


# TCP


def test_adds_from_many_clients_are_atomic(server: StoreServer) -> None:
    def work() -> list[int]:
        with connect(server) as store:
            return [store.add("n", 1) for _ in range(200)]

    results = [in_background(work) for _ in range(4)]
    for thread, _ in results:
        thread.join(30)
    assert sorted(n for _, [numbers] in results for n in numbers) == list(range(1, 801))


def test_one_client_serves_threads_that_wait_for_each_other(server: StoreServer) -> None:  # C06
    with connect(server) as left, connect(server) as right:

        def ping(store: TcpStore, name: str, first: bool) -> int:
            for n in range(1000):
                mine, other = (f"{name} {n} a", f"{name} {n} b")[:: 1 if first else -1]
                store.set(mine, b"%d" % n)
                assert store.get(other, 20) == b"%d" % n
            return 1000

        results = [
            in_background(lambda s=store, n=name, f=first: ping(s, n, f))
            for name in ("red", "blue")
            for store, first in ((left, True), (right, False))
        ]
        for thread, _ in results:
            thread.join(50)
        assert [outcome for _, outcome in results] == [[1000]] * 4


def test_exchange_sets_and_waits(server: StoreServer, client: TcpStore) -> None:
    with connect(server) as other:
        thread, outcome = in_background(lambda: other.exchange("a", b"from other", "b", 10))
        assert client.get("a", 5) == b"from other"
        client.set("b", b"from client")
        thread.join(5)
        assert outcome == [b"from client"]
        with pytest.raises(TimeoutError):
            other.exchange("a", b"again", "c", 0.1)
        assert client.get("a", 0) == b"again"


def test_a_server_that_closes_at_once_still_answers_an_exchange() -> None:
    """Rank 0 publishes and leaves; nobody who has given its part may miss the result."""
    for n in range(20):
        server = StoreServer("127.0.0.1", job="test")
        with connect(server) as root, connect(server) as other:
            value = os.urandom(1 << 20) if n % 2 else b"small"
            call = in_background(lambda o=other: o.exchange("mine", b"x", "result", 10))
            root.get("mine", 5)
            root.set("result", value)
            server.close()
            call[0].join(10)
            assert call[1] == [value]


def test_many_waits_end_in_the_order_of_their_deadlines(server: StoreServer) -> None:
    order: list[int] = []

    def wait(n: int) -> None:
        with connect(server) as store:
            with pytest.raises(TimeoutError):
                store.get("never", 0.1 + 0.15 * n)
            order.append(n)

    threads = [in_background(lambda n=n: wait(n))[0] for n in (3, 1, 0, 2)]
    for thread in threads:
        thread.join(10)
    assert order == [0, 1, 2, 3]


def test_a_client_that_dies_does_no_harm(server: StoreServer, client: TcpStore) -> None:
    code = (
        "import os, sys, threading, time\n"
        "from moecomm.store import TcpStore\n"
        "store = TcpStore('127.0.0.1', int(sys.argv[1]), job='test')\n"
        "threading.Thread(target=store.get, args=('key', 60), daemon=True).start()\n"
        "time.sleep(0.1)\n"
        "store.set('about to die', b'')\n"
        "os.kill(os.getpid(), 9)\n"
    )
    thread, outcome = in_background(lambda: client.get("key", 20))
    dead = subprocess.run([sys.executable, "-c", code, str(server.port)], timeout=30)
    assert dead.returncode == -9
    assert client.get("about to die", 0) == b""
    client.set("key", b"fine")
    thread.join(5)
    assert outcome == [b"fine"]


def garbage(server: StoreServer) -> list[socket.socket]:
    """Connections that send what no client would."""
    messages = [
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n" * 3,
        b"\xff" * 64,
        REQUEST.pack(MAX_MESSAGE + 1, OP_SET, 0.0, 1, 0),
        REQUEST.pack(4, OP_SET, 0.0, 3, 2) + b"abcd",
        REQUEST.pack(4, 77, 0.0, 1, 0) + b"abcd",
        REQUEST.pack(2, OP_GET, float("nan"), 1, 1) + b"ab",
        REQUEST.pack(2, OP_GET, float("inf"), 1, 1) + b"ab",
        REQUEST.pack(2, OP_GET, 1e300, 1, 1) + b"ab",
        b"\0",
        b"",
    ]
    connections = []
    for message in messages:
        sock = socket.create_connection(("127.0.0.1", server.port), timeout=5)
        sock.sendall(message)
        connections.append(sock)
    return connections


def test_strangers_do_no_harm(server: StoreServer, client: TcpStore) -> None:
    strangers = garbage(server)
    slow = socket.create_connection(("127.0.0.1", server.port), timeout=5)
    for byte in REQUEST.pack(4, OP_SET, 0.0, 3, 0) + b"keyv":
        slow.send(bytes([byte]))
        client.set("other", b"x")
    assert client.get("key", 5) == b"v"
    for sock in [*strangers, slow]:
        sock.close()
    client.set("a", b"1")
    assert client.get("a", 0) == b"1"


def test_a_client_that_does_not_read_holds_nobody_up(server: StoreServer, client: TcpStore) -> None:
    client.set("big", bytes(1 << 20))
    lazy = socket.create_connection(("127.0.0.1", server.port), timeout=5)
    for _ in range(64):
        lazy.sendall(REQUEST.pack(3, OP_GET, 0.0, 0, 3) + b"big")
    start = time.monotonic()
    client.set("a", b"1")
    assert client.get("a", 0) == b"1"
    assert time.monotonic() - start < 2
    lazy.close()


# Who answers


def test_clients_wait_for_a_server_that_starts_later() -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    thread, outcome = in_background(lambda: TcpStore("127.0.0.1", port, job="late", timeout_s=20))
    time.sleep(0.2)
    with StoreServer("127.0.0.1", port, job="late"):
        thread.join(10)
        assert isinstance(outcome[0], TcpStore), outcome
        outcome[0].close()


def test_nobody_there_is_an_error_in_time() -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    start = time.monotonic()
    with pytest.raises(TransportError, match=rf"no store answered within 0.3 s \(127.0.0.1:{port}"):
        TcpStore("127.0.0.1", port, timeout_s=0.3)
    assert time.monotonic() - start < 2


def test_another_jobs_server_is_recognised(server: StoreServer) -> None:
    with pytest.raises(TransportError, match="belongs to job 'test', not 'mine'"):
        TcpStore("127.0.0.1", server.port, job="mine", timeout_s=0.2)


def test_silent_and_foreign_listeners_are_passed_over(
    server: StoreServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_wire, "GREETING_TIMEOUT_S", 0.3)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        addresses = [silent.getsockname()[:2], ("127.0.0.1", server.port)]
        with TcpStore.connect(addresses, job="test", timeout_s=10) as store:
            assert store.address == ("127.0.0.1", server.port)
    with socket.create_server(("127.0.0.1", 0)) as foreign:

        def answer() -> None:
            with foreign.accept()[0] as peer:
                peer.sendall(b"SSH-2.0-OpenSSH")
                with contextlib.suppress(ConnectionResetError):
                    assert peer.recv(100) == b"", "the client sent something to a stranger"

        thread, outcome = in_background(answer)
        addresses = [foreign.getsockname()[:2], ("127.0.0.1", server.port)]
        TcpStore.connect(addresses, job="test", timeout_s=10).close()
        thread.join(5)
        assert outcome == [None]


def test_the_greeting_is_what_the_protocol_says(server: StoreServer) -> None:
    with socket.create_connection(("127.0.0.1", server.port), timeout=5) as sock:
        assert sock.recv(100) == MAGIC + b"\0\0\0\4test"


@needs_ipv6
def test_bootstrap_over_ipv6() -> None:  # F12
    with StoreServer("::1", job="six") as server, TcpStore("::1", server.port, job="six") as store:
        store.set("a", b"1")
        assert store.get("a", 0) == b"1"


@needs_ipv6
def test_every_interface_means_both_families() -> None:
    with StoreServer(None, job="both") as server:
        for host in ("127.0.0.1", "::1", "localhost"):
            with TcpStore(host, server.port, job="both") as store:
                assert store.add("n", 1) > 0


def test_serve_starts_and_ends_a_server() -> None:
    store = TcpStore("127.0.0.1", 0, serve=True)
    with TcpStore(*store.address) as other:
        other.set("a", b"1")
    assert store.get("a", 0) == b"1"
    store.close()
    assert store_threads() == []


def test_a_port_that_is_taken_is_an_error_and_leaves_nothing(server: StoreServer) -> None:
    with pytest.raises(OSError, match="in use"):
        StoreServer("127.0.0.1", server.port)
    assert len(store_threads()) == 1
    for port in (-1, 65536, "x", 1.5):
        with pytest.raises(ConfigError, match="port="):
            StoreServer("127.0.0.1", port)  # type: ignore[arg-type]


# Ends


def test_shutdown_leaves_no_thread_and_no_connection(server: StoreServer) -> None:
    stores = [connect(server) for _ in range(3)]
    waits = [in_background(lambda s=s: s.get("never", 30)) for s in stores]
    time.sleep(0.1)
    start = time.monotonic()
    server.close()
    server.close()
    assert time.monotonic() - start < 2
    assert store_threads() == []
    for thread, outcome in waits:
        thread.join(5)
        assert isinstance(outcome[0], TransportError)
        assert "lost the store" in str(outcome[0])
    for store in stores:
        start = time.monotonic()
        with pytest.raises(TransportError, match="lost the store"):
            store.set("a", b"1")
        assert time.monotonic() - start < 1
        store.close()
    with socket.create_server(("127.0.0.1", server.port)):
        pass  # the port is free again


def test_a_closed_client_says_so(server: StoreServer) -> None:
    store = connect(server)
    thread, outcome = in_background(lambda: store.get("never", 30))
    time.sleep(0.1)
    store.close()
    store.close()
    thread.join(5)
    assert isinstance(outcome[0], StateError)
    for call in (lambda: store.get("a", 0), lambda: store.set("a", b""), lambda: store.add("a", 1)):
        with pytest.raises(StateError, match="closed"):
            call()


def test_a_stopped_server_does_not_hold_a_client_for_ever(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A server process that is suspended answers no ping; the client gives up by itself."""
    monkeypatch.setattr(store_module, "REPLY_GRACE_S", 0.2)
    done = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as silent:

        def greet_only() -> None:
            with silent.accept()[0] as peer:
                peer.sendall(MAGIC + b"\0\0\0\0")
                done.wait(10)

        thread, _ = in_background(greet_only)
        with TcpStore("127.0.0.1", silent.getsockname()[1], timeout_s=0.1) as store:
            start = time.monotonic()
            with pytest.raises(TransportError, match="timed out"):
                store.get("a", 0.3)
            assert 0.4 < time.monotonic() - start < 2
        done.set()
        thread.join(10)


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_is_told_and_does_no_harm(server: StoreServer, client: TcpStore) -> None:
    client.set("a", b"parent")  # F13
    child = os.fork()
    if child == 0:
        failures = 0
        for call in (lambda: client.get("a", 1), lambda: client.set("a", b"child")):
            try:
                call()
                failures += 1
            except StateError as error:
                failures += "forked" not in str(error)
        client.close()
        server.close()
        os._exit(failures)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    assert client.get("a", 1) == b"parent"
    with connect(server) as other:
        assert other.get("a", 1) == b"parent"


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_does_not_keep_connections_open() -> None:
    """Else a server's end would go unnoticed for as long as some data loader lives."""
    server = StoreServer("127.0.0.1", job="test")
    store = connect(server)
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(writing)
        os.read(reading, 1)  # until the parent closes its end
        os._exit(0)
    thread, outcome = in_background(lambda: store.get("never", 20))
    time.sleep(0.1)
    server.close()
    thread.join(3)
    os.close(writing)
    os.waitpid(child, 0)
    os.close(reading)
    store.close()
    assert isinstance(outcome[0], TransportError)


EXITS = """
import sys
from moecomm.store import TcpStore
store = TcpStore("127.0.0.1", 0, serve=True)
store.set("a", b"1")
if sys.argv[1] == "error":
    raise ValueError("on purpose")
sys.exit(int(sys.argv[1]))
"""


@pytest.mark.parametrize(("how", "code"), [("0", 0), ("7", 7), ("error", 1)])
def test_exit_without_close_keeps_its_code(how: str, code: int) -> None:  # D09
    start = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", EXITS, how], capture_output=True, text=True, timeout=30
    )
    assert done.returncode == code
    assert time.monotonic() - start < 5
    assert ("Traceback" in done.stderr) == (how == "error")


def test_too_large_a_value_is_refused_here(client: TcpStore) -> None:
    class Huge(bytes):
        def __len__(self) -> int:
            return MAX_MESSAGE + 1

    with pytest.raises(ConfigError, match="at most"):
        client.set("a", Huge())
    client.set("a", b"still works")
