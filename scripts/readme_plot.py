"""Writes the README's plot: python scripts/readme_plot.py runs/demo docs/demo.svg"""

import sys
from pathlib import Path

from undrift import report


def main(folder: Path, svg: Path) -> None:
    runs = report.read_runs(folder)
    drawn = report.draw(runs, report.plots(runs)[0])
    svg.write_text(drawn.replace("<svg", '<svg xmlns="http://www.w3.org/2000/svg" style="background: white"', 1))


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
