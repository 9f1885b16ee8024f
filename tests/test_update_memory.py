"""The table of an update's memory in docs/gpu.md against the file that it is from."""

import json

from tests.scripts import SCRIPTS

COLUMNS = {
    "exact": ["exact"],
    "fast, padded": ["fast", "padded"],
    "slabs": ["slabs of 64", "slabs of 256"],
    "fast, padded, without remat": ["fast, without remat", "padded, without remat"],
    "slabs, without remat": ["slabs of 64, without remat", "slabs of 256, without remat"],
}


POLICIES = {"smollm2": "SmolLM2", "Qwen3-1.7B": "Qwen3-1.7B"}
PAGE = (SCRIPTS.parent / "docs/gpu.md").read_text()


_FILE = json.loads((SCRIPTS.parent / "benchmarks/results/update-layers.json").read_text())
ROWS = {row["name"].partition("/")[2].replace("update of 1 sequences/", ""): row for row in _FILE["rows"]}
"""By policy and variant; all are of an H100."""


def test_the_page_says_what_the_file_does():
    assert f"| H100, one sequence | {' | '.join(COLUMNS)} |" in PAGE
    for policy, name in POLICIES.items():
        cells = []
        for variants in COLUMNS.values():
            of = [ROWS[f"{policy}/{variant}"] for variant in variants]
            figures = [(row["temporary_bytes_of_layer"], row["temporary_bytes"]) for row in of]
            (said,) = {f"{layer / 1e6:.1f}, {whole / 1e6:,.0f}" for layer, whole in figures}
            cells.append(said)
        assert f"| {name} | {' | '.join(cells)} |" in PAGE
        both = (ROWS[f"{policy}/{variant}"] for variant in ("exact", "fast"))
        kernels = (f"{row['loops']}, {row['value']}; {row['kernels']:,} kernels" for row in both)
        assert f"{' | '.join(kernels)} |" in PAGE


def test_the_page_says_what_casting_once_saves():
    assert "| H100, fast | kernels | MB a layer read and written | weights and temporaries |" in PAGE

    def figures(row):
        held = row["argument_bytes_of_layer"] + row["temporary_bytes_of_layer"]
        return row["kernels"], row["bytes_of_layer"] / 1e6, held / 1e6

    for policy, name in POLICIES.items():
        for remat, more in ((", remat", ""), ("", ", without remat")):
            once, anew = (figures(ROWS[f"{policy}/fast{more}{cast}"]) for cast in ("", ", cast anew"))
            cells = [
                f"{ours:,.0f} in place of {theirs:,.0f}" for ours, theirs in zip(once, anew, strict=True)
            ]
            assert f"| {name}{remat} | {' | '.join(cells)} |" in PAGE
