"""Programs that try to break out of the strong jail. What harms nobody is run without it as well, where it
must succeed: an attempt that fails everywhere shows nothing.
"""

import json
import os
import signal
import socket
import subprocess
import sys
import uuid
from pathlib import Path

import pytest

from rljax.sandbox.limits import Limits
from rljax.sandbox.process import Process, Sandbox, start_unconfined

from .processes import end, namespaces, running

ROOT = Path(__file__).resolve().parents[2]
SMALL = Limits(memory_mb=256, processes=6, file_mb=4)

pytestmark = pytest.mark.skipif(not namespaces(), reason="this system has no user namespaces or no seccomp")


@pytest.fixture
def jail():
    return Sandbox(SMALL)


def attempts(sources, **values):
    """A program that tries one after the other and prints, as JSON, what each raised: null is an escape."""
    return f"""
import ctypes, errno, json, os, signal, socket, sys
raised = dict.fromkeys({list(sources)!r})
for name, source in {sources!r}.items():
    try:
        exec(source, globals() | {values!r})
    except BaseException as error:
        raised[name] = repr(error)
print(json.dumps(raised))
"""


def tried(jail, sources, **values):
    return json.loads(jail.run(attempts(sources, **values), b"", 20).output)


def unconfined(source):
    """The output of the program as any process of this user."""
    return subprocess.run([sys.executable, "-c", source], capture_output=True, check=False).stdout


HARMLESS_OUTSIDE = {
    "read the repository": "open(repository + '/pyproject.toml').read()",
    "list the repository": "os.listdir(repository)",
    "read the password file": "open('/etc/passwd').read()",
    "read a secret file": "assert open(secret).read() == 'secret'",
    "write outside": "open(secret + '.new', 'w').write('x')",
    "overwrite a file": "open(secret, 'a').write('x')",
    "delete a file": "os.rename(secret, secret + '.gone'); os.rename(secret + '.gone', secret)",
    "read the parent's environment": "open(f'/proc/{os.getppid()}/environ').read()",
    "read the parent's memory map": "open(f'/proc/{os.getppid()}/maps').read(1)",
    "see the host's processes": "os.kill(host, 0)",
    "connect to a server on this machine": "socket.create_connection(('127.0.0.1', port), 2)",
    "connect to an abstract socket": "socket.socket(socket.AF_UNIX).connect('\\0' + abstract)",
    "walk up from a directory": "os.chdir('../' * 40 + repository)",
    "see any process": "os.listdir('/proc/self')",
    "use a terminal or a disk": "assert set(os.listdir('/dev')) > {'null', 'zero', 'full', 'urandom'}",
}


def test_nothing_outside_can_be_reached(jail, tmp_path):
    secret = tmp_path / "secret"
    secret.write_text("secret")
    abstract = uuid.uuid4().hex
    with socket.create_server(("127.0.0.1", 0)) as server, socket.socket(socket.AF_UNIX) as local:
        local.bind("\0" + abstract)
        local.listen()
        values = {"repository": str(ROOT), "secret": str(secret), "port": server.getsockname()[1]}
        values |= {"abstract": abstract, "host": os.getpid()}
        inside = tried(jail, HARMLESS_OUTSIDE, **values)
        assert [name for name, raised in inside.items() if raised is None] == []
        assert [path.name for path in tmp_path.iterdir()] == ["secret"] and secret.read_text() == "secret"
        outside = unconfined(attempts(HARMLESS_OUTSIDE, **values))
        assert json.loads(outside) == dict.fromkeys(HARMLESS_OUTSIDE)


PRIVILEGES = {
    "become root": "os.setuid(0)",
    "a further user namespace": "assert ctypes.CDLL(None).unshare(0x10000000) == 0",
    "a further mount namespace": "assert ctypes.CDLL(None).unshare(0x00020000) == 0",
    "mount": "assert ctypes.CDLL(None).mount(b'tmpfs', b'/tmp', b'tmpfs', 0, None) == 0",
    "unmount": "assert ctypes.CDLL(None).umount2(b'/usr', 2) == 0",
    "remount writable": "assert ctypes.CDLL(None).mount(None, b'/usr', None, 32 | 4096, None) == 0",
    "write to the system": "open('/usr/escaped', 'w')",
    "write to Python's library": "open(os.path.join(os.path.dirname(os.__file__), 'escaped'), 'w')",
    "write to the root": "open('/escaped', 'w')",
    "make a device": "os.mknod('/tmp/disk', 0o060600, os.makedev(254, 0))",
    "trace the first process": "assert ctypes.CDLL(None).ptrace(16, 1, 0, 0) == 0",
    "change root": "os.chroot('/tmp')",
    "raise its limits": "import resource; resource.setrlimit(resource.RLIMIT_NPROC, (999, 999))",
    "a raw socket": "socket.socket(socket.AF_PACKET, socket.SOCK_RAW)",
    "the network by address": "socket.create_connection(('192.0.2.1', 80), 1)",
    "end the first process": "os.kill(1, signal.SIGKILL); import time; time.sleep(0.1); os.kill(1, 0); 1 / 0",
    "an inherited file": "import fcntl\nfor n in range(3, 64):\n    try: fcntl.fcntl(n, fcntl.F_GETFD)\n"
    "    except OSError: continue\n    break\nelse: raise OSError",
    "namespaces, as far as a limit of the kernel's goes": "libc = ctypes.CDLL(None, use_errno=True)\n"
    "assert libc.unshare(0x10000000) == 0 or ctypes.get_errno() != errno.EPERM",
    "namespaces by clone": "number = 56 if os.uname().machine == 'x86_64' else 220\n"
    "libc = ctypes.CDLL(None, use_errno=True)\n"
    "if (child := libc.syscall(number, 0x10000000 | 17, 0, 0, 0, 0)) == 0: os._exit(0)\n"
    "assert child > 0 or ctypes.get_errno() != errno.EPERM",
    "shared memory that no limit counts": "assert ctypes.CDLL(None).shmget(0, 4096, 0o1600) >= 0",
    "files in memory that no limit counts": "os.memfd_create('x')",
    "the keys of the session": "number = 250 if os.uname().machine == 'x86_64' else 219\n"
    "assert ctypes.CDLL(None).syscall(number, 0, -3, 0) >= 0",
    "a socket to the hypervisor": "socket.socket(40, socket.SOCK_STREAM)",
    "a pair of sockets of a strange family": "libc = ctypes.CDLL(None, use_errno=True)\n"
    "assert libc.socketpair(30, 1, 0, (ctypes.c_int * 2)()) == 0 or ctypes.get_errno() != errno.EPERM",
    "files without end": "assert os.statvfs('/tmp').f_files > 100_000",
}


def test_no_privilege_can_be_had(jail):
    assert [name for name, raised in tried(jail, PRIVILEGES).items() if raised is None] == []


def test_ordinary_programs_are_not_filtered(jail):
    program = """
import socket, subprocess, threading
thread = threading.Thread(target=print, args=("thread",), kwargs={"flush": True})
thread.start(), thread.join()
left, right = socket.socketpair()
left.send(b"socket")
print(right.recv(9).decode(), subprocess.run(["/bin/echo", "process"], capture_output=True).stdout.decode())
exit()
"""
    assert jail.run(program, b"", 10).output.split() == [b"thread", b"socket", b"process"]


def test_secrets_in_the_environment_are_not_passed_on(jail, monkeypatch):
    monkeypatch.setenv("RLJAX_TEST_TOKEN", "hunter2")
    program = "import os; print(sorted(os.environ.items()))"
    assert b"hunter2" in unconfined(program)
    output = jail.run(program, b"", 10).output
    assert b"hunter2" not in output and b"PATH" in output


def test_killing_everybody_ends_the_program_alone(jail):
    marker = uuid.uuid4().hex
    bystander = subprocess.Popen([sys.executable, "-c", f"import time; time.sleep(60) # {marker}"])
    try:
        for source in ("os.kill(os.getppid(), 9)", "os.killpg(0, 9)", "os.kill(-1, 9)"):
            jail.run(f"import os\nfor _ in range(3):\n    {source}", b"", 10)
        assert bystander.poll() is None and running(marker) == [bystander.pid]
    finally:
        bystander.kill()
        bystander.wait()


def test_a_fork_bomb_is_small_and_ends(jail):
    marker = uuid.uuid4().hex
    program = f"""
import os, sys, time  # {marker}
children = 0
try:
    while True:
        if os.fork() == 0:
            while True:
                try:
                    os.fork()
                except OSError:
                    time.sleep(0.01)
        children += 1
except OSError:
    print(children, flush=True)
time.sleep(99)
"""
    with jail.start(program) as process:
        finished = process.exchange(b"", 1.0, 100)
        assert finished.ending == "timeout" and 0 < int(finished.output) <= SMALL.processes
        # The program and the first process of the jail bear the marker too, and so does the launcher.
        assert len(running(marker)) <= SMALL.processes + 3
    assert end(marker) == []


BOMBS = {  # what each raises
    "x = bytearray(32 << 20)": None,
    "x = bytearray(1 << 30)": "MemoryError",
    "open('small', 'wb').write(bytes(3 << 20))": None,
    "open('big', 'wb').write(bytes(5 << 20))": "File too large",
    "[open(f'{i}', 'wb').write(bytes(3 << 20)) for i in range(200)]": "No space left",
}


def test_memory_and_disk_cannot_be_filled(jail):
    for source, raised in tried(jail, {source: source for source in BOMBS}).items():
        assert raised is BOMBS[source] is None or BOMBS[source] in raised


def test_huge_output_ends_the_program(jail):
    marker = uuid.uuid4().hex
    finished = jail.run(f"while True: print('x' * 9999)  # {marker}", b"", 10, max_output=50_000)
    assert (finished.ending, len(finished.output)) == ("too much output", 50_000)
    assert end(marker) == []


ENDLESS = {
    "endless": "while True: pass",
    "ignores signals": "import signal, time\nfor n in (1, 2, 3, 13, 15): signal.signal(n, signal.SIG_IGN)\n"
    "time.sleep(99)",
    "blocks signals": "import signal, os, time\nsignal.pthread_sigmask(0, range(1, 65))\n"
    "os.setsid() if os.getpgid(0) != os.getpid() else None\ntime.sleep(99)",
    "in new sessions": "import os, time\nif os.fork() == 0:\n    os.setsid()\n"
    "    if os.fork(): os._exit(0)\ntime.sleep(99)",
}


@pytest.mark.parametrize("source", ENDLESS.values(), ids=ENDLESS)
def test_a_program_ends_at_its_time_limit(jail, source):
    marker = uuid.uuid4().hex
    assert jail.run(f"{source}\n# {marker}", b"", 0.5).ending == "timeout"
    assert end(marker) == []


def test_daemons_end_with_their_program(jail):
    marker = uuid.uuid4().hex
    program = f"""
import os, time  # {marker}
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        os.dup2(os.open("/dev/null", os.O_RDWR), 1)
        time.sleep(99)
    os._exit(0)
os.wait()
print("left a daemon")
"""
    finished = jail.run(program, b"", 10)
    assert (finished.output, finished.ending) == (b"left a daemon\n", "exited")
    assert end(marker) == []


def test_a_program_ends_with_the_run_that_started_it(jail):
    """The run is killed, so it can do nothing about its programs."""
    marker = uuid.uuid4().hex
    run = f"""
from rljax.sandbox.process import Sandbox
process = Sandbox().start("print('runs', flush=True)\\nwhile True: pass  # {marker}")
print(process.exchange(b"", 20, 5, line=True).output.decode(), flush=True)
import time; time.sleep(60)
"""
    holder = subprocess.Popen([sys.executable, "-c", run], stdout=subprocess.PIPE, cwd=ROOT)
    assert holder.stdout.readline() == b"runs\n"
    assert len(running(marker)) >= 3  # the holder, the launcher, the first inside, the program
    holder.send_signal(signal.SIGKILL)
    holder.wait()
    holder.stdout.close()
    assert end(marker) == []


def test_what_is_readable_is_only_readable(tmp_path):
    tmp_path.chmod(0o755)  # root's sandboxes have a stranger's rights
    (tmp_path / "module_of_ours.py").write_text("VALUE = 6 * 7\n")
    sandbox = Sandbox(SMALL, readable=(str(tmp_path),), packages=(str(tmp_path),))
    assert sandbox.run("import module_of_ours as m; print(m.VALUE)", b"", 10).output == b"42\n"
    (tmp_path / "module_of_ours.py").chmod(0o666)
    found = tried(sandbox, {"write": "open(file, 'a')"}, file=str(tmp_path / "module_of_ours.py"))
    assert "Read-only file system" in found["write"]


def test_an_unconfined_process_ends_when_closed():
    marker = uuid.uuid4().hex
    source = "import signal; signal.signal(15, signal.SIG_IGN); print(1, flush=True)\nwhile True: pass"
    source += f"  # {marker}"
    with start_unconfined([sys.executable, "-c", source], dict(os.environ)) as process:
        assert isinstance(process, Process)
        assert process.exchange(b"", 10, 100, line=True).output == b"1\n"
    assert end(marker) == []
