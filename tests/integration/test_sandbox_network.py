from __future__ import annotations

import asyncio
import json
import tempfile
from asyncio.subprocess import PIPE
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import pytest_asyncio

from agentrl.protocols import Sandbox
from agentrl.sandbox.client import KeeperHost
from agentrl.sandbox.network import SandboxNetwork
from agentrl.types.sandbox import Command, SandboxSpec
from tests.integration.sandbox_hosts import AS_NOBODY, keeper

pytestmark = pytest.mark.timeout(600)
# By Python's own HTTP client, as an agent's program would: through the proxy that the variables name.
FETCH = """
import json, sys, urllib.request
found = []
for url in sys.argv[1:]:
    try:
        found.append(urllib.request.urlopen(url, timeout=20).read().decode())
    except OSError as error:
        found.append(f"{type(error).__name__}: {error}")
print(json.dumps(found))
"""
# urllib speaks CONNECT for https alone; this is what it sends then.
TUNNEL = """
import http.client, os, sys
proxy = os.environ["HTTPS_PROXY"].removeprefix("http://").split(":")
for address in sys.argv[1:]:
    host, port = address.split(":")
    connection = http.client.HTTPConnection(proxy[0], int(proxy[1]), timeout=20)
    connection.set_tunnel(host, int(port))
    try:
        connection.request("GET", "/")
        print(connection.getresponse().read().decode())
    except OSError as error:
        print(error)
"""


# Sets address (SIOCSIFADDR) and flags (SIOCSIFFLAGS) of loopback.
SET_LOOPBACK = """
import fcntl, socket, struct
def set_loopback(address):
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        as_bytes = socket.inet_aton(address)
        fcntl.ioctl(any_socket, 0x8914, struct.pack("16sh", b"lo", 1))
        fcntl.ioctl(any_socket, 0x8916, struct.pack("16sHH4s8x", b"lo", socket.AF_INET, 0, as_bytes))
"""
# The kernel takes 127.0.0.1 for free where no address was ever given, and no longer once there is a table of them.
HAVE_NO_LOOPBACK = SET_LOOPBACK + "set_loopback('0.0.0.0'); print('in', flush=True); input()"
BRING_UP_AND_ASK = (
    SET_LOOPBACK
    + """
set_loopback("127.0.0.1")
with socket.create_connection(("127.0.0.1", 3128), timeout=60) as proxy:
    proxy.sendall(b"CONNECT elsewhere:1 HTTP/1.1\\r\\n\\r\\n")
    print(proxy.recv(1000).decode())
"""
)


@pytest_asyncio.fixture(params=[None, AS_NOBODY], ids=["root", "nobody"])
async def host(request: pytest.FixtureRequest) -> AsyncIterator[KeeperHost]:
    async with keeper(module=request.param) as running:
        yield running


async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await reader.readuntil(b"\r\n\r\n")
    writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nConnection: close\r\n\r\nhello")
    await writer.drain()
    writer.close()


@pytest_asyncio.fixture
async def server() -> AsyncIterator[str]:
    """The address of an HTTP server of this machine."""
    async with await asyncio.start_server(answer, "127.0.0.1", 0) as serving:
        yield f"127.0.0.1:{serving.sockets[0].getsockname()[1]}"


async def said(sandbox: Sandbox, program: str, *arguments: str, gateway: str | None = None) -> str:
    command = Command(("python3", "-I", "-c", program, *arguments), timeout_s=120, gateway=gateway)
    result = await sandbox.run(command, program[:20])
    assert result.exit_code == 0, result.text
    return result.stdout.decode()


async def test_only_allowed_addresses_are_reached_and_only_through_the_proxy(host: KeeperHost, server: str) -> None:
    sandbox = await host.open(SandboxSpec(allow=(server,)))
    other = "127.0.0.1:9" if server != "127.0.0.1:9" else "127.0.0.1:10"
    reached, refused = (await said(sandbox, TUNNEL, server, other)).splitlines()
    assert reached == "hello"
    assert "403" in refused
    (direct,) = json.loads(await said(sandbox, "import os; os.environ['no_proxy'] = '*'" + FETCH, f"http://{server}/"))
    assert "refused" in direct, "an address was reached without the proxy"
    (plain,) = json.loads(await said(sandbox, FETCH, f"http://{server}/"))
    assert "403" in plain, "the proxy carries what it does not check"


@asynccontextmanager
async def gateway() -> AsyncIterator[str]:
    """The path of a gateway's socket, which keepers of every user may use."""
    with tempfile.TemporaryDirectory(prefix="gateway-", dir="/tmp") as folder:
        Path(folder).chmod(0o755)
        path = Path(folder, "socket")
        async with await asyncio.start_unix_server(answer, path):
            path.chmod(0o777)
            yield str(path)


CALL_GATEWAY = "import os, sys; sys.argv.append(os.environ['AGENTRL_GATEWAY'])" + FETCH


async def test_the_gateway_alone_is_reached(host: KeeperHost, server: str) -> None:
    async with gateway() as path:
        sandbox = await host.open(SandboxSpec())
        direct, answered = json.loads(await said(sandbox, CALL_GATEWAY, f"http://{server}/", gateway=path))
    assert answered == "hello"
    assert "refused" in direct


async def test_the_gateway_is_reached_without_the_proxy_for_allowed_addresses(host: KeeperHost, server: str) -> None:
    async with gateway() as path:
        sandbox = await host.open(SandboxSpec(allow=(server,)))
        assert json.loads(await said(sandbox, CALL_GATEWAY, gateway=path)) == ["hello"]
        assert (await said(sandbox, TUNNEL, server)).strip() == "hello"


async def test_ports_are_open_before_a_process_has_brought_its_loopback_up() -> None:
    """A command's first process does so by itself, and may come to it later than the keeper."""
    arguments = ("unshare", "--net", "python3", "-c", HAVE_NO_LOOPBACK)
    process = await asyncio.create_subprocess_exec(*arguments, stdin=PIPE, stdout=PIPE)
    network = SandboxNetwork(SandboxSpec(allow=("127.0.0.1:1",)))
    try:
        assert process.stdout is not None
        assert await process.stdout.readline() == b"in\n"
        await network.begin(process.pid, Command(("true",)))
        in_namespace = ("nsenter", f"--net=/proc/{process.pid}/ns/net")
        up = await asyncio.create_subprocess_exec(*in_namespace, "python3", "-c", BRING_UP_AND_ASK, stdout=PIPE)
        said, _ = await asyncio.wait_for(up.communicate(), 120)
        assert b"403 Forbidden" in said
    finally:
        network.end()
        process.kill()
        await process.wait()


async def test_names_of_the_sandbox_itself_are_known(host: KeeperHost) -> None:
    sandbox = await host.open(SandboxSpec())
    program = "import socket; print(*map(socket.gethostbyname, ('localhost', socket.gethostname())))"
    assert (await said(sandbox, program)).split() == ["127.0.0.1", "127.0.0.1"]


async def test_a_sandbox_without_either_has_no_port_open(host: KeeperHost) -> None:
    sandbox = await host.open(SandboxSpec())
    listening = await said(sandbox, "print(open('/proc/net/tcp').read().count('\\n'))")
    assert listening.strip() == "1", "the table has more than its heading"
