"""The command `undrift`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from .errors import BadInput, UndriftError

app = typer.Typer(
    help="Federated learning that stays on course: simulate, compare and check federated optimisation methods.",
    no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None,
)  # fmt: skip

Toml = Annotated[Path, typer.Argument(help="the experiment, a TOML file", metavar="EXP.toml", show_default=False)]
Sets = Annotated[
    list[str] | None,
    typer.Option(
        "--set", metavar="path=value", help="change a setting, as in local.lr=0.05; may be repeated", show_default=False
    ),
]
Out = Annotated[
    Path | None,
    typer.Option("--out", metavar="DIR", help="where the results go (runs/NAME of the TOML)", show_default=False),
]
Resume = Annotated[bool, typer.Option("--resume", help="go on from the last checkpoint in the folder")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="say nothing but errors")]
Seeds = Annotated[int, typer.Option("--seeds", min=1, max=10_000, help="how many seeds: run.seed, +1, ...")]


@app.command()
def run(toml: Toml, set_: Sets = None, out: Out = None, resume: Resume = False, quiet: Quiet = False) -> None:
    """Run an experiment: rounds, evaluations, checkpoints, a report."""
    from . import config
    from .progress import RunProgress
    from .run import run as play

    experiment = config.read(toml, set_ or ())
    out = out or Path("runs") / toml.stem
    with RunProgress(experiment.run.rounds, quiet) as progress:
        result = play(experiment, out, resume, on_round=progress.round, notice=progress.notice)
    if result.played:
        from .report import write_report

        progress.say(f"{result.folder / 'metrics.jsonl'}, {write_report(result.folder)}")


@app.command()
def compare(
    toml: Toml,
    algorithms: Annotated[
        str | None,
        typer.Option(
            "--algorithms", metavar="A,B,...", help="labels of [compare] or names of methods", show_default=False
        ),
    ] = None,
    baseline: Annotated[
        str | None,
        typer.Option(
            "--baseline", metavar="LABEL", help="what the others are measured against (the first)", show_default=False
        ),
    ] = None,
    seeds: Seeds = 5,
    set_: Sets = None,
    out: Out = None,
    resume: Resume = False,
    quiet: Quiet = False,
) -> None:
    """Compare methods on the same draws at several seeds: a table and a report."""
    names = [name.strip() for name in algorithms.split(",")] if algorithms is not None else None
    if names is not None and not all(names):
        raise BadInput("--algorithms must be names with commas between them, as in fedavg,fedcm")
    _compare(toml, names, baseline, seeds, set_, out or Path("runs") / toml.stem, resume, quiet)


@app.command()
def demo(
    seeds: Seeds = 3, set_: Sets = None, out: Out = Path("runs/demo"), resume: Resume = False, quiet: Quiet = False
) -> None:
    """The comparison of the README: seven methods on MNIST, each client with the digits of one class."""
    if (out / "comparison.json").exists() and not resume:
        import shutil

        shutil.rmtree(out)  # its own folder: the demo can be shown again
    _compare(Path(__file__).parent / "demo.toml", None, None, seeds, set_, out, resume, quiet)


def _compare(toml: Path, algorithms, baseline, seeds: int, sets, out: Path, resume: bool, quiet: bool) -> None:
    from . import config
    from .compare import compare as play
    from .compare import jobs
    from .progress import CompareProgress
    from .report import console_table, summary, write_report, write_summary

    document = config.load(toml)
    for text in sets or ():
        document = config.assign(document, text)
    folder = str(toml.resolve().parent)
    todo = jobs(document, folder, algorithms, seeds)
    with CompareProgress(todo, quiet) as progress:
        failed = play(todo, folder, out, baseline, resume, heard=progress.heard)
    rows = summary([out])
    write_summary(out, rows)
    report = write_report(out)
    if not quiet:
        progress.console.print(console_table(rows))
        progress.say(str(report))
    if failed:
        more = f" (and {len(failed) - 1} more)" if len(failed) > 1 else ""
        raise UndriftError(f"{failed[0]}{more}; the others are done, --resume tries again")


@app.command()
def report(
    folder: Annotated[Path, typer.Argument(help="a run's or a comparison's folder", metavar="DIR", show_default=False)],
) -> None:
    """Write report.html of a run or a comparison, also of one that is still going."""
    from .report import console_table, summary, write_report, write_summary

    rows = summary([folder])
    if (folder / "comparison.json").exists():
        write_summary(folder, rows)
    path = write_report(folder)
    from rich.console import Console

    Console().print(console_table(rows))
    print(path)


@app.command()
def verify(
    files: Annotated[
        list[Path] | None,
        typer.Argument(
            help="files of conformance vectors (the ones that come with undrift)",
            metavar="FILE.json",
            show_default=False,
        ),
    ] = None,
    strict: Annotated[
        bool, typer.Option("--strict", help="fail on runs of methods that this version does not have")
    ] = False,
    quiet: Quiet = False,
) -> None:
    """Replay conformance vectors on this installation: every method's trajectory to 1e-9, and the floats that
    travel."""
    from .verify import verify as replay_all

    raise typer.Exit(replay_all(files or [], strict, quiet))


def main() -> None:
    """Runs the command; every failure is one plain sentence and an exit code."""
    try:
        code = app(standalone_mode=False)
        sys.exit(code or 0)
    except (typer.Exit, SystemExit) as ended:
        sys.exit(getattr(ended, "exit_code", getattr(ended, "code", 0)))
    except (typer.Abort, KeyboardInterrupt):
        sys.exit(130)
    except BrokenPipeError:
        sys.exit(1)
    except Exception as error:
        _end(error)


def _end(error: Exception) -> None:
    if hasattr(error, "format_message"):  # the command line itself is wrong
        print(f"undrift: {error.format_message()}", file=sys.stderr)
        sys.exit(2)
    from .failures import as_ours

    ours = as_ours(error)
    print(f"undrift: {ours}", file=sys.stderr)
    sys.exit(ours.exit_code)


if __name__ == "__main__":
    main()
