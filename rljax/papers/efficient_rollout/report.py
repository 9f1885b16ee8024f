"""The measurement of `scripts/calibrate.py`, and how constants and gates are reported."""

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path

import jax
from rich.console import Console
from rich.table import Table

from drafters.quantized import WeightFormat, default_format
from rljax.benchmarking import Interference, Row, print_table, results_console, write_results
from rljax.config import ExperimentConfig
from rljax.engine.engine import DecodeEngine
from rljax.errors import UserError
from rljax.papers.efficient_rollout.calibration import (
    Calibration,
    calibrate,
    calibration_key,
    calibration_path,
    load_calibration,
    save_calibration,
)
from rljax.papers.efficient_rollout.fit import ERROR_GATE, SIGN_GATE, gates, held_out
from rljax.papers.efficient_rollout.roofline import Point, Roofline
from rljax.provenance import command_line
from rljax.training.training_run import TrainingRun

_MUCH_INTERFERENCE = 0.05
_DRAFTERS = ((True, "self-drafting"), (False, "drafts from the host"))  # whether the policy drafts itself


def calibrate_run(
    run: TrainingRun,
    config: ExperimentConfig,
    rounds: int,
    repeats: int,
    output: Path,
    again: bool,
    progress: Callable[[str], None],
) -> None:
    """Measures the constants of a run's policy unless they are kept, and prints them.

    Args:
      run: the run of `config`, without drafts.
      config: where the constants are kept, and for which verifying passes.
      rounds, repeats, progress: as of `measure`.
      output: file of what was measured.
      again: measure although constants are kept.

    Raises:
      UserError: nothing could be verified, or nothing is left to check the fit with.
    """
    console, fmt, directory = results_console(), _format(config), config.speculation.calibration_dir
    key = calibration_key(run.engine.config, run.engine.numerics, fmt, config.mesh.num_devices)
    path = calibration_path(directory, key)
    known = None if again else load_calibration(directory, key)
    if known is not None:
        _print(calibration_rows(known), known, console)
        console.print(f"from {path}; --again measures again", soft_wrap=True)
        return
    engine = _verifying(config, run.engine)
    shapes = [Point("plain", b, s, b, b, 1.0) for b in engine.buckets.batch for s in engine.buckets.cache]
    if not all(held_out(shapes)):
        raise UserError(
            f"engine.batch_buckets, engine.cache_buckets: {list(engine.buckets.batch)} and"
            f" {list(engine.buckets.cache)} leave no third to check the fit with; use at least two of one"
        )
    params = engine.load_params(run.state.params)
    with Interference() as interference:
        calibration = calibrate(engine, params, fmt, rounds, repeats, progress)
    save_calibration(directory, key, calibration)
    rows = calibration_rows(calibration, interference.share, rounds * repeats)
    _print(rows, calibration, console)
    write_results(output, rows, command_line())
    if interference.share is not None and interference.share > _MUCH_INTERFERENCE:
        console.print(
            f"[yellow]other processes took {interference.share:.0%} of the cores:"
            " repeat on a quiet machine, with --again[/yellow]"
        )
    console.print(f"constants are in {path}, measurements in {output}", soft_wrap=True)


def _format(config: ExperimentConfig) -> WeightFormat:
    """Returns the format of the self-drafter's weights: the config's if it uses them, else the device's
    default.
    """
    bits = config.speculation.args.get("bits") if config.speculation.drafter == "quantized" else None
    return default_format(bits or (8 if jax.default_backend() == "cpu" else 4))


def _verifying(config: ExperimentConfig, engine: DecodeEngine) -> DecodeEngine:
    """The run's engine, with the config's verifying passes whatever drafts; no token ends a sequence."""
    speculation = config.speculation
    buckets = dataclasses.replace(
        engine.buckets, verify=speculation.verify_buckets, max_drafts=speculation.max_drafts
    )
    if not any(buckets.passes(batch) for batch in buckets.batch):
        raise UserError(
            f"speculation.verify_buckets: {list(buckets.verify)} are all too few for"
            f" {buckets.batch[0]} slots; nothing could be verified"
        )
    return DecodeEngine(
        engine.config,
        engine.numerics,
        engine.sampling,
        buckets,
        (),
        engine.decode_steps_per_sync,
        engine.pool,
        engine.mesh,
        engine.verification,
        weights=engine.weights,
    )


def calibration_rows(
    calibration: Calibration, interference: float | None = None, measurements: int | None = None
) -> list[Row]:
    """Returns one row per point, measured against predicted, and one row per gate."""
    roofline, rows = calibration.roofline, []
    _, kept = held_out(calibration.points)
    for point in calibration.points:
        predicted = roofline.seconds(point)
        what = f"{point.kind} of {point.rows}" if point.kind == "verify" else point.kind
        rows.append(
            Row(
                name=f"calibration/batch {point.batch}/cache {point.context}/{what}",
                value=1e3 * point.seconds,
                unit="ms",
                baseline="predicted, held out" if point in kept else "predicted",
                baseline_value=1e3 * predicted,
                ratio=predicted / point.seconds,
                details={
                    **dataclasses.asdict(point),
                    "held_out": point in kept,
                    "measurements": measurements,
                    "interference": interference,
                },
            )
        )
    return rows + _gate_rows(roofline, kept)


def _gate_rows(roofline: Roofline, points: Sequence[Point]) -> list[Row]:
    rows = []
    for drafts_itself, drafter in _DRAFTERS:
        reached = gates(roofline, points, drafts_itself)
        details = {**dataclasses.asdict(reached), "passed": reached.passed}
        if reached.sign is not None:
            rows.append(_gate_row(f"sign, {drafter}", reached.sign, SIGN_GATE, details))
    if reached.target_error is not None:  # the same for both
        details = {**details, "constants": roofline.as_json()}
        rows.append(_gate_row("target time error", reached.target_error, ERROR_GATE, details))
    return rows


def _gate_row(name: str, value: float, gate: float, details: dict) -> Row:
    # An error that is 0 is infinitely better than its gate; JSON has no such number.
    ratio = value / gate if gate == SIGN_GATE else gate / max(value, 1e-6)
    return Row(f"calibration/{name}", 100 * value, "%", "EfficientRollout's gate", 100 * gate, ratio, details)


def _print(rows: Sequence[Row], calibration: Calibration, console: Console) -> None:
    print_table(rows, "seconds of passes, measured and predicted", console)
    console.print(_constants(calibration.roofline))
    _, kept = held_out(calibration.points)
    for drafts_itself, drafter in _DRAFTERS:
        reached = gates(calibration.roofline, kept, drafts_itself)
        judged = reached.sign is not None and reached.target_error is not None
        verdict = (
            "passed" if reached.passed else "NOT passed" if judged else "not judged: no pass was held out"
        )
        console.print(f"{drafter}: gates {verdict}")


def _constants(roofline: Roofline) -> Table:
    """The constants in the units of data sheets."""

    def rate(seconds: float, unit: str) -> str:
        return f"{1e-9 / seconds:.1f} {unit}" if seconds else "no limit seen"

    table = Table(title="constants", title_justify="left", show_header=False)
    for name, value in (
        ("bandwidth, weights", rate(roofline.byte, "GB/s")),
        ("bandwidth, keys and values", rate(roofline.kv_byte, "GB/s")),
        ("bandwidth, drafter's weights", rate(roofline.draft_byte, "GB/s")),
        ("arithmetic, weights", rate(roofline.flop, "GFLOP/s")),
        ("arithmetic, attention", rate(roofline.attention_flop, "GFLOP/s")),
        ("arithmetic, drafter's weights", rate(roofline.draft_flop, "GFLOP/s")),
        ("a slot adds to a plain step", f"{1e3 * roofline.slot:.3f} ms"),
        ("to a verifying pass", f"{1e3 * roofline.verified_slot:.3f} ms"),
        ("to a draft step", f"{1e3 * roofline.draft_slot:.3f} ms"),
        ("any verifying pass", f"{1e3 * roofline.verifying:.3f} ms"),
        ("reading and computing overlap", f"{roofline.overlap:.0%}"),
    ):
        table.add_row(name, value)
    return table
