"""The command `undrift`."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from . import signals
from .errors import BadInput, Interrupted, RunFailed

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
    typer.Option("--out", metavar="DIR", help="where the results go (for EXP.toml: runs/EXP)", show_default=False),
]
Resume = Annotated[bool, typer.Option("--resume", help="go on with what is in the folder, from its last checkpoint")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="say nothing but errors")]
Seeds = Annotated[
    int, typer.Option("--seeds", metavar="N", min=1, max=10_000, help="how many seeds: run.seed, run.seed + 1, ...")
]
Tune = Annotated[
    list[str] | None,
    typer.Option(
        "--tune",
        metavar="path=value,value",
        help="try every label at these values, as in local.lr=0.01,0.1; may be repeated, for all combinations",
        show_default=False,
    ),
]

DEMO = Path("runs/demo")


@app.command()
def run(toml: Toml, set_: Sets = None, out: Out = None, resume: Resume = False, quiet: Quiet = False) -> None:
    """Run an experiment and write its report.

    The folder gets metrics.jsonl (a line per round), report.html, config.toml (all settings) and checkpoint/. A run
    that was stopped, by Ctrl-C or a kill, goes on with --resume.
    """
    from . import config

    experiment = config.read(toml, set_ or ())  # before torch is loaded, so that a slip is answered at once
    from .failures import bound_memory
    from .progress import RunProgress
    from .running import run as play

    out = out or Path("runs") / toml.stem
    bound_memory()
    with RunProgress(experiment.run.rounds, quiet) as progress:
        result = play(experiment, out, resume, on_round=progress.round, notice=progress.notice)
    if result.played:
        from .report import write_report

        progress.ended(result.records)
        progress.say(f"{result.folder / 'metrics.jsonl'}, {write_report(result.folder)}")
    else:
        progress.say(f"{result.folder} is done: there is nothing left to do")


@app.command()
def compare(
    toml: Toml,
    algorithms: Annotated[
        str | None,
        typer.Option(
            "--algorithms",
            metavar="A,B,...",
            help="labels of [compare] and names of methods (all labels)",
            show_default=False,
        ),
    ] = None,
    baseline: Annotated[
        str | None,
        typer.Option(
            "--baseline", metavar="LABEL", help="what the others are measured against (the first)", show_default=False
        ),
    ] = None,
    seeds: Seeds = 5,
    tune: Tune = None,
    tune_seeds: Annotated[
        int, typer.Option("--tune-seeds", metavar="N", min=1, max=10_000, help="how many seeds a setting is tried with")
    ] = 1,
    set_: Sets = None,
    out: Out = None,
    resume: Resume = False,
    quiet: Quiet = False,
) -> None:
    """Compare methods on the same draws.

    Every [compare.LABEL] of the TOML, or every one of --algorithms, is run at every seed, side by side on the cores of
    this machine. With --tune each runs at the setting that is best on a validation share, searched for with other
    seeds. The folder gets a folder for each run, report.html, summary.csv and comparison.json.
    """
    names = [name.strip() for name in algorithms.split(",")] if algorithms is not None else None
    if names is not None and not all(names):
        raise BadInput("--algorithms must be names with commas between them, as in fedavg,fedcm")
    _compare(toml, names, baseline, seeds, set_, out or Path("runs") / toml.stem, resume, quiet, tune, tune_seeds)


@app.command()
def demo(
    seeds: Seeds = 3,
    set_: Sets = None,
    out: Annotated[Path, typer.Option("--out", metavar="DIR", help="where the results go")] = DEMO,
    resume: Resume = False,
    quiet: Quiet = False,
) -> None:
    """Show the README's comparison.

    Seven methods on MNIST, each client with the digits of one class. A demo that is done is shown anew.
    """
    if out == DEMO and not resume:
        from .comparison import clear

        clear(out)
    _compare(Path(__file__).parent / "demo.toml", None, None, seeds, set_, out, resume, quiet)


def _compare(
    toml: Path, algorithms, baseline, seeds: int, sets, out: Path, resume: bool, quiet: bool, tune=None, tune_seeds=1
) -> None:
    from . import config
    from .comparison import grids, jobs, play_all
    from .progress import CompareProgress
    from .tuning import search

    document = config.load(toml)
    for text in sets or ():
        document = config.assign(document, text)
    folder = str(toml.resolve().parent)
    todo = jobs(document, folder, algorithms, seeds)
    tried = search(todo, grids(document, folder), config.grid(tune or ()), tune_seeds, folder)
    runs = [*(tried.jobs if tried else ()), *todo]
    with CompareProgress(runs, quiet) as progress:
        failed = play_all(todo, folder, out, baseline, resume, heard=progress.heard, search=tried)
    if len(failed) < len(todo) and not any(run.tuning for run in failed):
        _summarise(out, quiet)
    if failed:
        all_bad_input = all(run.exit_code == BadInput.exit_code for run in failed)
        more = f"; {len(failed)} of {len(runs)} runs failed, --resume tries them again" if len(runs) > 1 else ""
        raise (BadInput if all_bad_input else RunFailed)(f"{failed[0].why}{more}")


def _summarise(out: Path, quiet: bool = False) -> None:
    """Writes summary.csv of a comparison and report.html, and shows the table."""
    from rich.console import Console

    from .report import console_table, contrasts, summary, write_report, write_summary

    rows = summary([out])
    if (out / "comparison.json").exists():
        write_summary(out, rows, contrasts(out))
    path = write_report(out)
    if not quiet:
        Console().print(console_table(rows))
        print(path)


@app.command()
def report(
    folder: Annotated[Path, typer.Argument(help="a run's or a comparison's folder", metavar="DIR", show_default=False)],
) -> None:
    """Write the report of a run or a comparison.

    Also of one that is still going. The table is printed, report.html goes into the folder.
    """
    _summarise(folder)


@app.command()
def plan(
    toml: Toml,
    set_: Sets = None,
    partition: Annotated[
        Path | None,
        typer.Option(
            "--partition", metavar="FILE", show_default=False,
            help="write the clients' index lists, which partition = {file = FILE} reads back",
        ),
    ] = None,
) -> None:  # fmt: skip
    """Say what a run will take, before it runs.

    Bytes, gradients, memory, how often a client is seen: from the shapes of the model and the sizes of the clients,
    without training.
    """
    from . import config

    experiment = config.read(toml, set_ or ())
    from .forecast import forecast, write_partition

    if partition is not None:
        write_partition(experiment, partition)
    print("\n".join(forecast(experiment).lines()))


@app.command()
def check(
    name: Annotated[
        str, typer.Argument(help="a method or part: my_file:Mine, or a name", metavar="NAME", show_default=False)
    ],
) -> None:
    """Check a method or part of one's own.

    The suite that every method of undrift passes: chunking, ragged steps, sweeps, lost clients, resume, bytes; alone
    and inside other parts. Exit code 1: something fails.
    """
    from .check import check as all_checks

    failed = False
    for found in all_checks(name):
        print(found, flush=True)
        failed |= found.failed
    raise typer.Exit(1 if failed else 0)


new = typer.Typer(no_args_is_help=True, help="Write a file to begin with.", rich_markup_mode=None)
app.add_typer(new, name="new")


@new.callback()
def _new() -> None:
    """Write a file to begin with."""


@new.command()
def method(name: Annotated[str, typer.Argument(metavar="NAME", help="as in slow-pull", show_default=False)]) -> None:
    """Write a method that runs, and its test, into the current folder."""
    from .template import new_method

    path, test = new_method(name, Path())
    cls = next(line for line in path.read_text().splitlines() if line.startswith("class ")).split()[1].partition("(")[0]
    print(f"{path}, {test}")
    print(f"undrift check {path.stem}:{cls}")
    print(f"undrift run EXP.toml --set algorithm.name={path.stem}:{cls}")


@app.command("list")
def list_(
    kind: Annotated[
        str | None,
        typer.Argument(
            help="algorithms, parts, datasets, models, partitions, losses, metrics or participations; or a name",
            metavar="KIND", show_default=False,
        ),
    ] = None,
    name: Annotated[str | None, typer.Argument(metavar="NAME", help="one of them", show_default=False)] = None,
) -> None:  # fmt: skip
    """List what there is by name, a line each.

    Of one name everything: its settings, and of an algorithm the parts that it is made of, with their updates.
    """
    from .listing import listing

    print("\n".join(listing(kind, name)))


@app.command()
def export(
    folder: Annotated[Path, typer.Argument(help="a run's folder", metavar="DIR", show_default=False)],
    best: Annotated[bool, typer.Option("--best", help="the best model by validation, not the last one")] = False,
    to: Annotated[
        Path | None,
        typer.Option("--to", metavar="FILE", help="where it goes (DIR/model.safetensors)", show_default=False),
    ] = None,
) -> None:
    """Write a run's trained model as a state_dict.

    A safetensors file that loads with strict=True into the plain module, frozen and tied weights and buffers included;
    [model] weights = FILE starts from it.
    """
    from .results import export as write_out

    print(write_out(folder, best, to))


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
    """Replay conformance vectors.

    Every method's trajectory is to be what it should be, to 1e-9, on this installation, and the floats that travel as
    many. Exit code 1: something differs.
    """
    from .verify import verify as replay_all

    raise typer.Exit(replay_all(files or [], strict, quiet))


def main() -> None:
    """Runs the command; every failure is one plain sentence and an exit code."""
    signals.interrupt()
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # else threads that spin make a busy machine 20 times slower
    try:
        code = app(prog_name="undrift", standalone_mode=False) or 0
        if code == Interrupted.exit_code:  # what typer makes of a KeyboardInterrupt
            raise KeyboardInterrupt
    except (typer.Abort, KeyboardInterrupt):
        print("undrift: interrupted; what was saved is whole", file=sys.stderr)
        code = Interrupted.exit_code
    except (Exception, SystemExit) as error:
        piped = isinstance(error.__context__, BrokenPipeError)  # typer's answer to `undrift verify | head`
        code = 1 if piped else _told(error)  # any other SystemExit is from a user's code
    signals.ignore()
    sys.exit(code)


def _told(error: BaseException) -> int:
    """Prints what went wrong; -> the exit code."""
    if type(error).__name__ == "NoArgsIsHelpError":  # `undrift` alone
        print(error.format_message(), file=sys.stderr)
        return BadInput.exit_code
    if hasattr(error, "format_message"):  # the command line itself is wrong
        print(f"undrift: {error.format_message()}", file=sys.stderr)
        return BadInput.exit_code
    from .failures import as_ours

    ours = as_ours(error)
    print(f"undrift: {ours}", file=sys.stderr)
    return ours.exit_code


if __name__ == "__main__":
    main()
