"""colo doctor: under a minute, before a long job: what would make it fail, and what to do about it."""

import json
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

from colo.commands.arguments import Parser, whole_number
from colo.commands.doctor_checks import Cards, Finding, note, wrong
from colo.commands.launch import RANKS_WITHOUT_GPU, check_ranks, torchrun_command
from colo.recipe import load_config

LIVE = "colo.commands.doctor_live"
LIMIT_S = 600.0
"""Of the live check: a rank that hangs is ended."""
END_S = 45.0
"""torchrun takes 30 s to end a rank that does not end by itself."""
FAILURE = re.compile(r"(?:\[rank\d+\]: )?((?:refused: |[\w.]*(?:Error|Exception)\b).*)")
NUM_LINES = 40
"""Of what a failed live check wrote on stderr, that are shown."""


def doctor_command(arguments: list[str]) -> None:
    """Examine a recipe on this host, a line a check; end with exit status 1 where a job would fail.

    Raises:
        ValueError: a word of the command line is wrong.
    """
    parser = _parser()
    if {"-h", "--help"} & set(arguments):
        parser.print_help()
        return
    given, rest = parser.parse_known_args(arguments)
    if given.json and not Path(given.json).absolute().parent.is_dir():
        raise ValueError(f"--json must be a file in a folder that exists, got {given.json!r}")
    asked = whole_number("--ranks", given.ranks) if given.ranks else None
    _check_words(rest)
    from colo.commands.doctor_cards import read_cards  # noqa: PLC0415 - it imports torch, after what is refused

    cards = read_cards()
    num_ranks = asked or len(cards.cards) or RANKS_WITHOUT_GPU
    check_ranks(num_ranks, len(cards.cards))
    started, found = time.monotonic(), _examine(rest, num_ranks, cards, is_live=not given.no_live)
    num_wrong = sum(one.level == "wrong" for one in found)
    verdict = f"{num_wrong} wrong: a job would fail" if num_wrong else "a job can start"
    sys.stdout.write(f"{verdict} ({time.monotonic() - started:.0f} s)\n")
    if given.json:
        report = {"arguments": arguments, "num_ranks": num_ranks, "findings": [vars(one) for one in found]}
        Path(given.json).write_text(json.dumps(report, indent=1) + "\n")
    if num_wrong:
        sys.exit(1)


def _parser() -> Parser:
    parser = Parser("colo doctor", "Whether a job with a recipe can run on this host, before it does.")
    parser.usage = "colo doctor --config-name RECIPE [option=value ...] [--ranks N] [--no-live] [--json FILE]"
    parser.add_argument("--ranks", default="", metavar="N", help="processes on this host (default: its GPUs, or 2)")
    parser.add_argument("--no-live", action="store_true", help="build no engine")
    parser.add_argument("--json", default="", metavar="FILE", help="write every finding there too")
    return parser


def _check_words(words: list[str]) -> None:
    """Refuse what is no recipe; what is wrong with a recipe is a finding."""
    try:
        load_config(words)
    except ValueError as error:
        if str(error).startswith(("-", "an override must be")):
            raise


def _examine(arguments: list[str], num_ranks: int, cards: Cards, *, is_live: bool) -> list[Finding]:
    from colo.commands.doctor_recipe import Subject, examine  # noqa: PLC0415 - it imports transformers

    found: list[Finding] = []

    def tell(finding: Finding) -> None:
        found.append(finding)
        sys.stdout.write(f"{finding.line}\n")
        sys.stdout.flush()

    with tempfile.TemporaryDirectory(prefix="colo-doctor-") as made:
        run_dir = Path(made) / "run"
        can_build = examine(Subject(arguments=arguments, num_ranks=num_ranks, cards=cards, made=run_dir, tell=tell))
        if is_live and can_build:
            own = [f"--ranks={num_ranks}", *arguments, f"run_dir={run_dir}", "resume=never"]
            own += ["reload.proof=every", "engine.vllm.enforce_eager=true"]
            run_live(torchrun_command(LIVE, own, len(cards.cards)), Path(made), tell)
        elif is_live:
            tell(note("live", "not tried", "correct what is wrong above first"))
    return found


def run_live(command: list[str], made: Path, tell: Callable[[Finding], None], limit_s: float = LIMIT_S) -> None:
    """Run the live check, and tell what it finds as it comes; what it writes beside that is shown where it fails.

    Args:
        command: torchrun's.
        made: A folder for what it writes.
        tell: Called with each finding.
        limit_s: After which it is ended.
    """
    from colo.commands.doctor_live import DOING, FOUND  # noqa: PLC0415 - it imports torch

    environment = {"TORCH_CPP_LOG_LEVEL": "ERROR"} | os.environ
    if "--nproc-per-node=1" not in command:
        environment = {"OMP_NUM_THREADS": "1"} | environment
    doing, log = "starting", made / "live.log"
    with log.open("w") as errors:
        process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=errors, text=True)
    timer = threading.Timer(limit_s, process.terminate)
    timer.start()
    try:
        assert process.stdout is not None, "the pipe was asked for"
        for line in process.stdout:
            if line.startswith(FOUND):
                tell(Finding(**json.loads(line.removeprefix(FOUND))))
            elif line.startswith(DOING):
                doing = line.removeprefix(DOING).strip()
        status = process.wait()
    finally:
        is_late = timer.finished.is_set()
        timer.cancel()
        _end(process)
    if status:
        lines = log.read_text(errors="replace").splitlines()
        causes = [match.group(1) for line in lines if (match := FAILURE.match(line))]
        cause = f"no end within {limit_s:g} s" if is_late else causes[0] if causes else f"exit status {status}"
        sys.stderr.write("\n".join(lines[-NUM_LINES:]) + "\n")
        tell(wrong("live", f"{doing}: {cause}", "its last words are on stderr"))


def _end(process: "subprocess.Popen[str]") -> None:
    """End what an interruption left running; torchrun ends its ranks."""
    if process.poll() is not None:
        return
    process.terminate()
    try:
        process.wait(END_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
