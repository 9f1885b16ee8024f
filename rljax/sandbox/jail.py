"""The launcher of the sandbox: a script for `python -I -S` that uses only the standard library.

    jail.py SPEC STATUS_FD

SPEC is JSON: `argv`, `env`, `readable` (paths that the program may read), `limits` (see limits.py), `strong`.
The program inherits the launcher's standard streams and nothing else. The launcher writes one line to
STATUS_FD if the jail cannot be built, and closes it when the program starts.

The strong jail consists of namespaces (user_namespaces(7)), which need no privileges where the kernel allows
them, and which root uses in the same way:

- user: no privileges outside, for any user; for root, an id that no other user has. No process inside has a
  capability or can gain one (PR_SET_NO_NEW_PRIVS, empty bounding set, no further namespaces).
- mount: an empty file system with the system's libraries and `readable`, read-only, four harmless devices,
  and a `/tmp` in memory. There is no `/proc`.
- pid: no process outside can be seen or signalled, and when the first one ends, all end.
- network, ipc, uts: empty namespaces.

A filter of system calls (seccomp(2)) refuses the rest: memory that no limit counts, the keys of the parent
session, families of sockets that network namespaces do not confine, further namespaces.

There are three processes: this one, outside, which waits; the first one inside, which collects ended
children; and the program. Each ends with the one before it, so killing the launcher ends everything.

The weak jail has resource limits and an empty environment only: it stops accidents, not intent.
"""

import contextlib
import ctypes
import errno
import json
import os
import platform
import resource
import select
import signal
import sys

_CLONE_NEWNS, _CLONE_NEWUTS, _CLONE_NEWIPC = 0x00020000, 0x04000000, 0x08000000
_CLONE_NEWUSER, _CLONE_NEWPID, _CLONE_NEWNET = 0x10000000, 0x20000000, 0x40000000
_MS_NOSUID, _MS_NODEV, _MS_BIND, _MS_REC, _MS_PRIVATE = 2, 4, 4096, 16384, 1 << 18
_ATTR_RDONLY, _ATTR_NOSUID, _ATTR_NODEV = 1, 2, 4
_AT_FDCWD, _AT_RECURSIVE, _MNT_DETACH = -100, 0x8000, 2
_SYS_MOUNT_SETATTR = 442  # the same on every architecture
_SYS_CLONE3 = 435  # likewise
_AUDIT_ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}  # by platform.machine()
_SYS_PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}
_SYS_CLONE = {"x86_64": 56, "aarch64": 220}
_SYS_SOCKET = {"x86_64": (41, 53), "aarch64": (198, 199)}  # socket, socketpair
_REFUSED = {
    # shmget, semget, msgget, memfd_create, memfd_secret: memory that no limit counts. add_key, request_key,
    # keyctl. unshare, setns. bpf, perf_event_open, userfaultfd, and io_uring_setup, which makes sockets, too.
    "x86_64": (29, 64, 68, 319, 447, 248, 249, 250, 272, 308, 321, 298, 323, 425),
    "aarch64": (194, 190, 186, 279, 447, 217, 218, 219, 97, 268, 280, 241, 282, 425),
}
_FIRST_OF_X32 = 0x40000000  # the numbers of x86-64's second set of system calls begin here
_NEW_NAMESPACES = 0x7E020000  # the flags of clone(2) that create namespaces
_FAMILIES = (1, 2, 10)  # AF_UNIX, AF_INET, AF_INET6: sockets that a network namespace closes in
_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_CAPBSET_DROP = 1, 4, 24
_PR_SET_SECCOMP, _PR_SET_CHILD_SUBREAPER, _PR_SET_NO_NEW_PRIVS = 22, 36, 38
_SECCOMP_MODE_FILTER, _SECCOMP_ALLOW, _SECCOMP_ERRNO = 2, 0x7FFF0000, 0x00050000
_CAPABILITY_VERSION_3 = 0x20080522
_INNER_ID = 1000
_UNUSED_IDS = 2_000_000_000  # first id for sandboxes of root, which add the launcher's process number
_SYSTEM = ("/usr", "/lib", "/lib64", "/lib32", "/bin", "/etc/ld.so.cache")
_DEVICES = ("null", "zero", "full", "urandom")

_libc = ctypes.CDLL(None, use_errno=True)


def _call(name, *args):
    """Calls a function of libc by its name; raises an OSError if it fails."""
    if getattr(_libc, name)(*args) == -1:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")


def _prctl(option, value):
    _call("prctl", option, ctypes.c_ulong(value), 0, 0, 0)


def _mount(source, target, kind=None, flags=0, data=None):
    _call("mount", *(None if x is None else x.encode() for x in (source, target, kind)), flags, data)


class _MountAttributes(ctypes.Structure):
    _fields_ = [(name, ctypes.c_uint64) for name in ("set", "clear", "propagation", "userns")]


def _bind(source, target, attributes):
    """Mounts `source`, with everything mounted below it, at `target`."""
    _mount(source, target, flags=_MS_BIND | _MS_REC)
    changes = _MountAttributes(set=attributes)
    size = ctypes.c_size_t(ctypes.sizeof(changes))
    _call(
        "syscall",
        ctypes.c_long(_SYS_MOUNT_SETATTR),
        _AT_FDCWD,
        target.encode(),
        _AT_RECURSIVE,
        ctypes.byref(changes),
        size,
    )


def _write(path, text):
    with open(path, "w") as file:
        file.write(text)


def _write_id_maps(launcher):
    """Sets the ids of the launcher's new user namespace; must be called by a process outside of it."""
    user, group = os.geteuid(), os.getegid()
    if user == 0:
        unused = _UNUSED_IDS + launcher
        try:
            _write(f"/proc/{launcher}/uid_map", f"0 0 1\n{_INNER_ID} {unused} 1\n")
            _write(f"/proc/{launcher}/gid_map", f"0 0 1\n{_INNER_ID} {unused} 1\n")
            return
        except OSError:
            pass  # root of a container with few ids: continue as another user would
    _write(f"/proc/{launcher}/setgroups", "deny")
    _write(f"/proc/{launcher}/uid_map", f"{_INNER_ID} {user} 1\n")
    _write(f"/proc/{launcher}/gid_map", f"{_INNER_ID} {group} 1\n")


def _leave_namespaces():
    """Moves this process into new namespaces; the pid namespace applies to its children."""
    launcher = os.getpid()
    ready, go = os.pipe()
    helper = os.fork()
    if helper == 0:
        try:
            os.close(go)
            os._exit(2 if os.read(ready, 1) != b"1" else _write_id_maps(launcher) or 0)
        except OSError:
            os._exit(3)
    _call(
        "unshare",
        _CLONE_NEWUSER | _CLONE_NEWNS | _CLONE_NEWPID | _CLONE_NEWNET | _CLONE_NEWIPC | _CLONE_NEWUTS,
    )
    os.write(go, b"1")
    os.close(go)
    os.close(ready)
    if os.waitpid(helper, 0)[1] != 0:
        raise OSError("the ids of a user namespace cannot be set")
    with contextlib.suppress(OSError):  # read-only in some containers; the filter refuses them, too
        _write("/proc/sys/user/max_user_namespaces", "0")


def _build_root(readable, memory_mb):
    """Makes a file system in memory, with `readable` mounted in it, the root; unmounts the old root."""
    if platform.machine() not in _SYS_PIVOT_ROOT:
        raise OSError(f"no sandbox for {platform.machine()}")
    os.umask(0o022)  # another user must be able to read the new files
    root = "/tmp"  # any existing directory: its mounts are visible in this namespace only
    _mount(None, "/", flags=_MS_REC | _MS_PRIVATE)
    shown = [path for path in (*_SYSTEM, *readable) if os.path.lexists(path)]
    devices = [f"/dev/{name}" for name in _DEVICES]
    # These paths may lie in the directory that will be covered.
    handles = {path: os.open(path, os.O_PATH) for path in (*shown, *devices) if not os.path.islink(path)}
    links = {path: os.readlink(path) for path in shown if os.path.islink(path)}
    _mount("tmpfs", root, "tmpfs", _MS_NOSUID | _MS_NODEV, b"mode=755,size=4m")
    os.mkdir(root + "/tmp")  # before the paths above, which may lie in it
    files = 1024 + 16 * memory_mb  # an empty file takes about 1 KiB of kernel memory
    options = f"mode=1777,size={memory_mb}m,nr_inodes={files}"
    _mount("tmpfs", root + "/tmp", "tmpfs", _MS_NOSUID | _MS_NODEV, options.encode())
    for path, link in links.items():
        os.makedirs(os.path.dirname(root + path), exist_ok=True)
        os.symlink(link, root + path)
    for path, handle in handles.items():
        target, source = root + path, f"/proc/self/fd/{handle}"
        if os.path.isdir(source):
            os.makedirs(target, exist_ok=True)
        else:
            os.makedirs(os.path.dirname(target), exist_ok=True)
            os.close(os.open(target, os.O_CREAT | os.O_WRONLY, 0o600))
        device = path in devices
        _bind(source, target, _ATTR_NOSUID | (0 if device else _ATTR_RDONLY | _ATTR_NODEV))
        os.close(handle)
    changes = _MountAttributes(set=_ATTR_RDONLY)
    size = ctypes.c_size_t(ctypes.sizeof(changes))
    setattr_number = ctypes.c_long(_SYS_MOUNT_SETATTR)
    _call("syscall", setattr_number, _AT_FDCWD, root.encode(), 0, ctypes.byref(changes), size)
    os.chdir(root)
    _call("syscall", ctypes.c_long(_SYS_PIVOT_ROOT[platform.machine()]), b".", b".")
    _call("umount2", b".", _MNT_DETACH)
    os.chdir("/tmp")


def _give_up_privileges():
    if os.getuid() == 0:
        os.setgroups([])
        os.setresgid(_INNER_ID, _INNER_ID, _INNER_ID)
    for capability in range(64):
        try:
            _prctl(_PR_CAPBSET_DROP, capability)
        except OSError:
            break  # beyond the capabilities of this kernel
    if os.getuid() == 0:
        os.setresuid(_INNER_ID, _INNER_ID, _INNER_ID)
    header = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION_3, 0)
    _call("capset", header, (ctypes.c_uint32 * 6)())
    _prctl(_PR_SET_NO_NEW_PRIVS, 1)
    _prctl(_PR_SET_DUMPABLE, 0)  # no process inside can read or change this one


class _Step(ctypes.Structure):
    """One instruction: `code`, its operand `k`, and the steps that a comparison skips if true, if false."""

    _fields_ = [
        ("code", ctypes.c_uint16),
        ("then", ctypes.c_uint8),
        ("otherwise", ctypes.c_uint8),
        ("k", ctypes.c_uint32),
    ]


class _Filter(ctypes.Structure):
    _fields_ = [("length", ctypes.c_uint16), ("steps", ctypes.POINTER(_Step))]


def _filter_system_calls():
    """Filters system calls of this process and its children; a refused call fails with EPERM."""
    load, equal, at_least, any_bit, answer = 0x20, 0x15, 0x35, 0x45, 0x06
    number, machine, argument = 0, 4, 16  # offsets in seccomp_data; the argument's lower half
    name = platform.machine()
    refuse, allow = (answer, 0, 0, _SECCOMP_ERRNO | errno.EPERM), (answer, 0, 0, _SECCOMP_ALLOW)
    steps = [(load, 0, 0, machine), (equal, 1, 0, _AUDIT_ARCH[name]), refuse]
    steps += [(load, 0, 0, number), (at_least, 0, 1, _FIRST_OF_X32), refuse]
    for call in _REFUSED[name]:
        steps += [(equal, 0, 1, call), refuse]
    # The flags of clone3 lie in memory, which a filter cannot read. The C library then uses clone.
    steps += [(equal, 0, 1, _SYS_CLONE3), (answer, 0, 0, _SECCOMP_ERRNO | errno.ENOSYS)]
    steps += [(equal, 0, 4, _SYS_CLONE[name]), (load, 0, 0, argument)]
    steps += [(any_bit, 0, 1, _NEW_NAMESPACES), refuse, allow]
    for call in _SYS_SOCKET[name]:
        steps += [(equal, 0, len(_FAMILIES) + 3, call), (load, 0, 0, argument)]
        steps += [(equal, len(_FAMILIES) - i, 0, family) for i, family in enumerate(_FAMILIES)]
        steps += [refuse, allow]
    program = (_Step * (len(steps) + 1))(*steps, allow)
    mode = ctypes.c_ulong(_SECCOMP_MODE_FILTER)
    _call("prctl", _PR_SET_SECCOMP, mode, ctypes.byref(_Filter(len(program), program)), 0, 0)


def _limit(limits, already):
    """Sets resource limits of the program; `already` is the number of the user's other processes."""
    mebibyte = 1 << 20
    bounds = {
        resource.RLIMIT_AS: limits["memory_mb"] * mebibyte,
        resource.RLIMIT_FSIZE: limits["file_mb"] * mebibyte,
        resource.RLIMIT_NOFILE: limits["open_files"],
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_MEMLOCK: 0,
        resource.RLIMIT_MSGQUEUE: 0,
    }
    if already is not None:
        bounds[resource.RLIMIT_NPROC] = limits["processes"] + already
    if limits["cpu_seconds"] is not None:
        bounds[resource.RLIMIT_CPU] = limits["cpu_seconds"]
    for kind, bound in bounds.items():
        hard = resource.getrlimit(kind)[1]
        bound = bound if hard == resource.RLIM_INFINITY else min(bound, hard)
        resource.setrlimit(kind, (bound, bound))


def _start(spec, already):
    """Starts the program in a child of this process; returns its process id."""
    program = os.fork()
    if program == 0:
        try:
            os.setsid()
            for number in range(1, signal.NSIG):
                if number not in (signal.SIGKILL, signal.SIGSTOP) and not 32 <= number <= 33:
                    signal.signal(number, signal.SIG_DFL)
            _limit(spec["limits"], already)
            os.execve(spec["argv"][0], spec["argv"], spec["env"])
        except BaseException as error:
            os.write(spec["status"], f"cannot start {spec['argv'][0]}: {error}\n".encode())
        os._exit(127)
    return program


def _wait_for(program):
    """Collects every child until `program` ends; returns its exit status, 128 + signal if it was killed."""
    while True:
        ended, status = os.wait()
        if ended == program:
            code = os.waitstatus_to_exitcode(status)
            return code if code >= 0 else 128 - code


def _first_inside(spec, alive):
    """Runs as the first process of the pid namespace."""
    try:
        _build_root(spec["readable"], spec["limits"]["memory_mb"])
        _call("sethostname", b"sandbox", 7)
        _give_up_privileges()
        _filter_system_calls()
        _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if select.select([alive], [], [], 0)[0]:
            os._exit(1)  # the launcher ended before the line above took effect
        program = _start(spec, already=2)
    except BaseException as error:
        os.write(spec["status"], f"{error}\n".encode())
        os._exit(126)
    for descriptor in (0, 1, 2, spec["status"]):
        os.close(descriptor)
    os._exit(_wait_for(program))


def _strong(spec):
    _leave_namespaces()
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    alive, launcher_lives = os.pipe()
    first = os.fork()
    if first == 0:
        os.close(launcher_lives)
        _first_inside(spec, alive)
    os.close(alive)
    return first


def _kill_descendants():
    """Ends all remaining descendants of the program, whose orphans become children of this subreaper."""
    while True:
        with open(f"/proc/self/task/{os.getpid()}/children") as file:
            children = file.read().split()
        if not children:
            return
        for child in children:
            os.kill(int(child), signal.SIGKILL)  # the id is still valid, as only this process collects it
        os.wait()


def main():
    spec = json.loads(sys.argv[1]) | {"status": int(sys.argv[2])}
    os.set_inheritable(spec["status"], False)
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    with contextlib.suppress(OSError):
        _write("/proc/self/oom_score_adj", "1000")  # if memory runs out, the kernel kills this first
    try:
        if spec["strong"]:
            waited_for = _strong(spec)
        else:
            _prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
            _prctl(_PR_SET_CHILD_SUBREAPER, 1)
            signal.signal(signal.SIGTERM, lambda *_: (_kill_descendants(), os._exit(1)))
            waited_for = _start(spec, already=None)
    except BaseException as error:
        os.write(spec["status"], f"{error}\n".encode())
        os._exit(126)
    for descriptor in (0, 1, 2, spec["status"]):
        os.close(descriptor)
    status = _wait_for(waited_for)
    if not spec["strong"]:
        _kill_descendants()
    os._exit(status)


if __name__ == "__main__":
    main()
