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


def test_the_page_says_what_the_file_does():
    root, names = SCRIPTS.parent, {"smollm2": "SmolLM2", "Qwen3-1.7B": "Qwen3-1.7B"}
    page = (root / "docs/gpu.md").read_text()
    rows = json.loads((root / "benchmarks/results/update-layers.json").read_text())["rows"]
    found = {row["name"]: row for row in rows}
    assert f"| H100, one sequence | {' | '.join(COLUMNS)} |" in page
    for policy, name in names.items():
        cells = []
        for variants in COLUMNS.values():
            of = [found[f"h100/{policy}/update of 1 sequences/{variant}"] for variant in variants]
            figures = [(row["temporary_bytes_of_layer"], row["temporary_bytes"]) for row in of]
            said = {f"{layer / 1e6:.1f}, {whole / 1e6:,.0f}" for layer, whole in figures}
            cells += said
            assert len(said) == 1
        assert f"| {name} | {' | '.join(cells)} |" in page
        exact, flash = (found[f"h100/{policy}/update of 1 sequences/{name}"] for name in ("exact", "fast"))
        kernels = (f"{row['loops']}, {row['value']}; {row['kernels']:,} kernels" for row in (exact, flash))
        assert f"{' | '.join(kernels)} |" in page


def test_the_page_says_what_casting_once_saves():
    root = SCRIPTS.parent
    page = (root / "docs/gpu.md").read_text()
    rows = json.loads((root / "benchmarks/results/update-layers.json").read_text())["rows"]
    found = {row["name"].partition("/")[2].replace("update of 1 sequences/", ""): row for row in rows}
    assert "| H100, fast | kernels | MB a layer read and written | weights and temporaries |" in page
    for policy, name in (("smollm2", "SmolLM2"), ("Qwen3-1.7B", "Qwen3-1.7B")):
        for remat, more in ((", remat", ""), ("", ", without remat")):
            once, anew = (
                (
                    row["kernels"],
                    row["bytes_of_layer"] / 1e6,
                    (row["argument_bytes_of_layer"] + row["temporary_bytes_of_layer"]) / 1e6,
                )
                for row in (found[f"{policy}/fast{more}{cast}"] for cast in ("", ", cast anew"))
            )
            cells = [
                f"{ours:,.0f} in place of {theirs:,.0f}" for ours, theirs in zip(once, anew, strict=True)
            ]
            assert f"| {name}{remat} | {' | '.join(cells)} |" in page
