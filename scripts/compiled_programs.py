"""Compiles for accelerators that are not here, and reads off a program's text what it starts and moves."""

import contextlib
import dataclasses
import json
import math
import re
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import SingleDeviceSharding

from rljax import target
from rljax.planning.topologies import compile_devices, parse_topology, platform_of

_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\{$")
_LINE = re.compile(r"^\s*(ROOT )?%?([\w.\-]+) = (.*?) ([a-z][a-z0-9\-]*)\((.*)$")
_CALLED = re.compile(r"(?:to_apply|calls|body|(?:true|false)_computation)=%?([\w.\-]+)")
_BRANCHES = re.compile(r"(?:branch|called)_computations=\{([^}]*)\}")
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"')
_SHAPE = re.compile(r"\b(pred|[a-z]+[0-9]+[a-z0-9]*)\[([\d,]*)\](?:\{([^}]*)\})?")
# They start nothing: names for parts of memory, constants, and ends of what another operation has started.
_NO_KERNEL = {
    "after-all", "bitcast", "constant", "get-tuple-element", "opt-barrier", "parameter", "partition-id",
    "replica-id", "tuple",
}  # fmt: skip
_CALLS = ("while", "call", "conditional", "async-start")
_SLICES = ("slice", "dynamic-slice", "gather")  # they read as much as they return
_WRITES = {"dynamic-update-slice": 1, "scatter": -1}  # they write their operand of this place, into the first
_READS_ALL = "/tree_attention/"  # kernels of this name read all that they change in place; they write little


@dataclasses.dataclass(frozen=True)
class Counts:
    """The kernels, library calls and copies that a program starts, on a TPU operations and copies; and the
    bytes that they read and write of the device's memory.
    """

    kernels: int = 0
    bytes: int = 0


@dataclasses.dataclass(frozen=True)
class Operation:
    """A line of a computation; `rest` begins with its operands, up to a parenthesis."""

    name: str
    kind: str
    shape: str
    rest: str
    is_root: bool

    @property
    def operands(self) -> list[str]:
        return re.findall(r"%([\w.\-]+)", self.rest.partition(")")[0])

    @property
    def called(self) -> str | None:
        """The computation inside of a fusion."""
        found = re.search(r"calls=%?([\w.\-]+)", self.rest)
        return found and found[1]

    @property
    def config(self) -> dict[str, Any]:
        """What the compiler's backend says of it."""
        found = re.search(r"backend_config=(\{.*\})", self.rest)
        return json.loads(found[1]) if found else {}


_Computations = dict[str, list[Operation]]


@contextlib.contextmanager
def compiling_for(name: str) -> Iterator[Callable[..., Any]]:
    """Yields what compiles a function of arguments, or of their shapes, for a device of the topology of this
    name; nothing runs.
    """
    topology = parse_topology(name)
    device = compile_devices(topology)[0]
    jax.config.update("jax_enable_compilation_cache", False)  # a device that is not there reads nothing back

    def placed(leaf: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(
            np.shape(leaf), jnp.result_type(leaf), sharding=SingleDeviceSharding(device)
        )

    def compiled(function: Callable[..., Any], *args: Any, donate_argnums: tuple[int, ...] = ()) -> Any:
        return jax.jit(function, donate_argnums=donate_argnums).lower(*jax.tree.map(placed, args)).compile()

    with target.tracing_for(device, 1, platform_of(topology)):
        yield compiled


def text_of(program: Any) -> str:
    """Returns a compiled program's text; nothing where the runtime has none, as of a program from a cache."""
    try:
        return program.as_text() or ""
    except (NotImplementedError, jax.errors.JaxRuntimeError):
        return ""


def counts_of_loop(text: str) -> Counts | None:
    """Counts one step of a program's main loop, the one whose step starts the most; None without any. Loops
    inside count as often as the text says, once where it does not; of branches the longest counts.
    """
    return max((counts for counts, _ in _loops(text)), key=lambda counts: counts.kernels, default=None)


def trips_of_loop(text: str) -> int | None:
    """Returns the number of steps of the main loop, as of `counts_of_loop`, where the compiler knows it: then
    a GPU's host gives it the next step without a look at the device.
    """
    loop = max(_loops(text), key=lambda loop: loop[0].kernels)[1]
    trips = _TRIPS.search(loop.rest)
    return int(trips[1]) if trips else None


def _loops(text: str) -> list[tuple[Counts, Operation]]:
    """What a step of each loop counts."""
    computations = parsed(text)
    loops = [each for operations in computations.values() for each in operations if each.kind == "while"]
    bodies = [re.search(r"body=%?([\w.\-]+)", loop.rest)[1] for loop in loops]
    return [(_counted(body, computations), loop) for body, loop in zip(bodies, loops, strict=True)]


def counts_of_program(text: str) -> Counts | None:
    """As `counts_of_loop`, for all of a program that has no loop of steps."""
    computations = parsed(text)
    return _counted("ENTRY", computations) if computations else None


def loops_of_program(text: str) -> tuple[int, int]:
    """Counts a program's loops, and those of them whose number of turns the text does not say."""
    operations = [each for computation in parsed(text).values() for each in computation]
    loops = [each for each in operations if each.kind == "while"]
    return len(loops), sum(not _TRIPS.search(loop.rest) for loop in loops)


def parsed(text: str) -> _Computations:
    """Returns the operations of a program's computations by name; its own are under "ENTRY"."""
    computations: _Computations = {}
    current = ""
    for line in text.splitlines():
        if found := _COMPUTATION.match(line):
            current = "ENTRY" if found[1] else found[2]
            computations[current] = []
        elif found := _LINE.match(line):
            root, name, shape, kind, rest = found.groups()
            computations[current].append(Operation(name, kind, shape, rest, bool(root)))
    return computations


def _counted(name: str, computations: _Computations) -> Counts:
    kernels = moved = 0
    sizes = {each.name: _bytes(each.shape) for each in computations[name]}
    same = {each.name: each.operands[0] for each in computations[name] if each.kind == "bitcast"}
    for operation in computations[name]:
        if operation.kind in _NO_KERNEL or operation.kind.endswith("-done"):
            continue
        if operation.kind not in _CALLS:
            kernels += 1  # a fusion's own computation is inside of its kernel
            moved += _moved(operation, sizes, same, computations)
            continue
        names = _CALLED.findall(operation.rest)
        for branches in _BRANCHES.findall(operation.rest):
            names += [branch.strip().lstrip("%") for branch in branches.split(",")]
        called = [_counted(each, computations) for each in names]
        longest = max(called, key=lambda counts: counts.kernels, default=Counts(1))
        trips = _TRIPS.search(operation.rest)
        times = int(trips[1]) if trips else 1
        kernels, moved = kernels + times * longest.kernels, moved + times * longest.bytes
    return Counts(kernels, moved)


def _moved(
    operation: Operation, sizes: dict[str, int], same: dict[str, str], computations: _Computations
) -> int:
    """Bytes that a kernel reads and writes: its operands, each once, and results, of a slice the part that is
    read, and of an array that is changed in place the part that is written. `same` has the operand of each
    bitcast.
    """
    result, operands = sizes[operation.name], operation.operands
    if operation.kind in _SLICES:
        return 2 * result
    if operation.kind.endswith("-start"):  # (to, from, ...) of a copy; ((operands), result, ...) of others
        (_, first), (size, second), *_ = _arrays(operation.shape)
        return first + second if operation.kind == "copy-start" else size + second
    if operation.kind in _WRITES:
        return 2 * sizes.get(operands[_WRITES[operation.kind]], 0)
    taken = [sizes.get(name, 0) for name in operands]
    if operation.kind == "fusion":
        inside = computations[operation.called]
        for place, part in _partly_read(inside).items():
            taken[place] = min(taken[place], part)
        result -= sum(_spared(inside))
    elif aliases := re.search(r"output_to_operand_aliasing=\{(.*?)\}(?:, |$)", operation.rest):
        for place in map(int, re.findall(r"\((\d+), \{", aliases[1])):
            result -= taken[place]
            taken[place] = taken[place] if _READS_ALL in operation.rest else 0
    read: dict[str, int] = {}
    for name, part in zip(operands, taken, strict=True):
        whole = sizes.get(name, 0)
        while name in same:
            name = same[name]
        read[name] = min(read.get(name, 0) + part, whole)
    return result + sum(read.values())


def _partly_read(inside: list[Operation]) -> dict[int, int]:
    """Bytes that a fusion reads of its parameters, some of which it only takes slices of, or writes into."""
    sizes, read = {each.name: _bytes(each.shape) for each in inside}, {}
    for parameter in inside:
        if parameter.kind != "parameter":
            continue
        taken, names = 0, [parameter.name]
        while names:
            name = names.pop()
            for user in (each for each in inside if name in each.operands):
                if user.kind == "bitcast":
                    names.append(user.name)
                elif user.kind in _SLICES:
                    taken += sizes[user.name]
                elif user.kind not in _WRITES or user.operands[0] != name:
                    taken += sizes[parameter.name]
        read[int(parameter.rest.partition(")")[0])] = taken
    return read


def _spared(inside: list[Operation]) -> list[int]:
    """Bytes of a fusion's results that it leaves as they are, since it writes into them in place."""
    by_name = {each.name: each for each in inside}
    root = next(each for each in inside if each.is_root)
    results = [by_name[name] for name in root.operands] if root.kind == "tuple" else [root]
    spared = []
    for each in results:
        while each.kind == "bitcast":
            each = by_name[each.operands[0]]
        if each.kind in _WRITES:
            written = by_name[each.operands[_WRITES[each.kind]]]
            spared.append(_bytes(each.shape) - _bytes(written.shape))
    return spared


def _arrays(shape: str) -> list[tuple[int, int]]:
    """Returns, for each array of a type's text, its bytes and how many of them are in the device's memory: on
    a TPU it may be in the core's, `S(1)`.
    """
    arrays = []
    for kind, sizes, layout in _SHAPE.findall(shape):
        item = 1 if kind == "pred" else int(re.search(r"\d+", kind)[0]) / 8
        size = int(item * math.prod(int(extent) for extent in sizes.split(",") if extent))
        arrays.append((size, 0 if "S(1)" in layout else size))
    return arrays


def _bytes(shape: str) -> int:
    return sum(in_memory for _, in_memory in _arrays(shape))
