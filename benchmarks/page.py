"""The page of all benchmarks, benchmarks/results.md: one section for each script, replaced when that script runs."""

import os
import platform
import re
import subprocess
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "benchmarks" / "results.md"
HEAD = "# Benchmarks\n\nEach section is written by the script that it names; `make bench` runs them all.\n"


def where() -> str:
    """Machine, versions and commit of a measurement."""
    asked = ["git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"]
    commit = subprocess.run(asked, capture_output=True, text=True, check=False).stdout.strip() or "unknown"
    return f"{_processor()}, {os.cpu_count()} cores; torch {torch.__version__}; commit {commit}."


def _processor() -> str:
    try:
        names = re.findall(r"^model name\s*: (.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    except OSError:
        names = []
    return names[0] if names else platform.processor() or platform.machine()


def table(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> list[str]:
    """Lines of a Markdown table."""
    return [f"| {' | '.join(map(str, row))} |" for row in (columns, ["---"] * len(columns), *rows)]


def write(title: str, lines: Sequence[str]) -> None:
    """Put a section into the page, in place of the one of its title, and print it."""
    text = "\n".join([f"## {title}", "", *lines])
    print(f"\n{text}", flush=True)
    sections = re.split(r"\n(?=## )", PAGE.read_text())[1:] if PAGE.exists() else []
    kept = {section.splitlines()[0]: section.strip() for section in sections}
    kept[f"## {title}"] = text
    PAGE.write_text("\n".join([HEAD, *(f"{section}\n" for section in kept.values())]))
