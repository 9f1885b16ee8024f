"""The plan as text for a terminal and as JSON for programs."""

import dataclasses
from typing import Any

from rljax.planning.hardware import GIB
from rljax.planning.planner import Plan, summary_line


def as_text(plan: Plan) -> str:
    """Returns the whole plan as tables of at most 110 columns."""
    parts = [
        summary_line(plan),
        _memory(plan),
        _programs(plan),
        _passes(plan),
        _step(plan),
        *(f"note: {note}" for note in plan.notes),
    ]
    return "\n\n".join(parts) + "\n"


def _rows(rows: list[tuple[str, ...]], header: tuple[str, ...]) -> str:
    widths = [max(len(row[column]) for row in [header, *rows]) for column in range(len(header))]

    def line(row: tuple[str, ...]) -> str:
        cells = [row[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(row[1:], widths[1:], strict=True))]
        return "  " + "  ".join(cells).rstrip()

    return "\n".join(map(line, [header, *rows]))


def _memory(plan: Plan) -> str:
    memory, run = plan.memory, plan.run
    batch, length = run.state.batch, run.buckets.cache[-1]
    weights = "weights, float32"
    if run.train_state.factors is not None:
        weights = f"merged weights and base, {run.config.policy.compute_dtype}; LoRA's factors, float32"
    rows = [
        (weights, memory.weights),
        ("optimizer moments", memory.moments),
        ("reference weights", memory.reference),
        ("sums of gradients (update)", memory.gradients),
        (f"copies of matrices, {run.config.policy.compute_dtype} (update)", memory.copies),
        (f"weights to decode with, {run.config.policy.compute_dtype} (rollout)", memory.decode_weights),
        ("drafters' weights (rollout)", memory.draft_weights),
        ("heads in training", memory.draft_training),
        ("drafters' caches and unread features (rollout)", memory.draft_state),
        (f"cache of {batch} slots x {length} (rollout)", memory.cache),
        ("cache before it grew (rollout)", memory.cache_growth),
        ("temporaries of the rollout", memory.temporaries["rollout"]),
        ("temporaries of the update", memory.temporaries["update"]),
    ]
    text = [(name, _size(size)) for name, size in rows if size]
    for phase, (size, program) in memory.peaks.items():
        text.append((f"most at a time, {phase} ({program})", _size(size)))
    text.append(("there is", _size(memory.available)))
    return "memory of a device\n" + _rows(text, ("", "GiB"))


def _programs(plan: Plan) -> str:
    rows = [
        (each.name, f"{each.seconds:.1f}", *map(_size, (each.arguments, each.outputs, each.temporaries)))
        for each in plan.programs
    ]
    total = sum(plan.counts.values())
    table = _rows(rows, ("program", "seconds", "arguments", "results", "temporaries"))
    text = f"programs compiled for the plan (the largest shapes; GiB of a device)\n{table}\n"
    if plan.depths is not None:
        first, second = plan.depths
        text += (
            f"  All of these are extrapolated to {plan.run.model.num_layers} layers from compiles of {first}"
            f" and {second}; sizes of arrays\n  and the roofline are not.\n"
        )
    return (
        text + f"  The whole warm-up compiles {total} programs, in about {_time(plan.compile_seconds)} here."
    )


def _passes(plan: Plan) -> str:
    training = plan.run.config.training
    tokens = str(training.rows_per_microbatch * training.pack_length)
    timed = [("decode step", each) for each in plan.decoding]
    timed += [("verifying pass", each) for each in plan.verifying]
    named = [
        (name, str(each.slots), str(each.rows), str(each.length), each.work, each.seconds)
        for name, each in timed
    ]
    named.append(("gradients of a micro-batch", "", tokens, "", *plan.microbatch))
    rows = [
        (
            *sizes,
            f"{work.flops / 1e9:.2f}",
            f"{work.bytes / 1e9:.3f}",
            f"{(work.tensor_bytes + work.batch_bytes) / 1e6:.1f}",
            f"{1e3 * seconds:.2f}",
        )
        for *sizes, work, seconds in named
    ]
    header = ("roofline", "slots", "tokens", "cache", "GFLOP", "GB", "MB sent", "ms")
    figures = plan.hardware
    peak = figures.flops[plan.run.config.policy.compute_dtype]
    return (
        f"work and time, of a device with {peak / 1e12:.4g} TFLOP/s, {figures.bandwidth / 1e9:.4g} GB/s and"
        f" links of {figures.link / 1e9:.4g} GB/s\n" + _rows(rows, header)
    )


def _step(plan: Plan) -> str:
    step = plan.step
    rollout = plan.run.config.rollout
    rows = [("prefill", _time(step.prefill), "")]
    variants = [("plain", step.plain)] + ([("with drafts", step.drafted)] if step.drafted else [])
    for name, decoding in variants:
        rows.append(
            (f"decoding, {name}", _time(decoding.seconds), f"{decoding.tokens_per_second:,.0f} tokens/s")
        )
    if step.scoring:
        rows.append(("scoring", _time(step.scoring), ""))
    rows.append(("update", _time(step.update), f"{step.tokens / step.update:,.0f} tokens/s"))
    for name, decoding in variants:
        rows.append((f"rollout's share, {name}", f"{100 * step.rollout_share(decoding):.0f} %", ""))
    count = rollout.prompts_per_step * rollout.samples_per_prompt
    text = f"a step of {count} responses ({plan.lengths})\n" + _rows(rows, ("", "time", ""))
    if step.drafted:
        text += (
            f"\n  With drafts: chains whose drafts are accepted with probability {plan.acceptance:g};"
            " drafting is not counted."
        )
    return text


def _size(size: float) -> str:
    return f"{size / GIB:.3f}" if size < GIB else f"{size / GIB:.2f}"


def _time(seconds: float) -> str:
    if seconds < 0.1:
        return f"{1e3 * seconds:.2f} ms"
    return f"{seconds:.1f} s" if seconds < 120 else f"{seconds / 60:.1f} min"


def as_json(plan: Plan) -> dict[str, Any]:
    """Returns the plan as a tree of numbers and strings; bytes, seconds and FLOPs of one device."""
    mesh = plan.run.config.mesh
    variants = {"plain": plan.step.plain} | ({"drafted": plan.step.drafted} if plan.step.drafted else {})
    return {
        "topology": plan.topology.name,
        "devices": plan.topology.num_devices,
        "hardware": dataclasses.asdict(plan.hardware),
        "mesh": mesh.model_dump(),
        "model": dataclasses.asdict(plan.run.model),
        "memory": dataclasses.asdict(plan.memory),
        "programs": [dataclasses.asdict(program) for program in plan.programs],
        "extrapolated_from": plan.depths,
        "warm_up": {"programs": plan.counts, "seconds": plan.compile_seconds},
        "decoding": [dataclasses.asdict(timed) for timed in plan.decoding],
        "verifying": [dataclasses.asdict(timed) for timed in plan.verifying],
        "microbatch": {"work": dataclasses.asdict(plan.microbatch[0]), "seconds": plan.microbatch[1]},
        "step": {
            "lengths": dataclasses.asdict(plan.lengths),
            "acceptance": plan.acceptance,
            "prefill_seconds": plan.step.prefill,
            "update_seconds": plan.step.update,
            "scoring_seconds": plan.step.scoring,
            "rollout": {
                name: dataclasses.asdict(decoding)
                | {
                    "tokens_per_second": decoding.tokens_per_second,
                    "share": plan.step.rollout_share(decoding),
                }
                for name, decoding in variants.items()
            },
        },
        "notes": plan.notes,
    }
