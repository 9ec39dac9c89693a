"""Lines of small real processes on slots: order, no slot twice, failures, a rerun, signals."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from cache.errors import DataError, PipelineError, StoppedError
from cache.processes import Child
from pipeline.allocation import Failure, Line, Step, failure_of, run_lines
from pipeline.exit import StopRequest

# Notes when it begins and ends, so that overlaps can be seen; ends with the code of its argument.
WORK = """
import os, sys, time
def note(what):
    with open(os.environ["NOTES"], "a") as file:
        file.write(f"{os.environ['SLOT']} {sys.argv[1]} {what}\\n")
note("begins")
time.sleep(float(sys.argv[3]))
print("a line of", sys.argv[1])
note("ends")
sys.exit(int(sys.argv[2]))
"""
# Ends as a verb does: at the next safe point, with 128 + the signal.
PATIENT = """
import os, signal, sys, time
seen = []
for number in (signal.SIGTERM, signal.SIGUSR1):
    signal.signal(number, lambda number, frame: seen.append(number))
open(os.environ["NOTES"], "a").write("ready\\n")
while not seen:
    time.sleep(0.02)
open(os.environ["NOTES"], "a").write(f"checkpoint {len(seen)}\\n")
sys.exit(128 + seen[0])
"""


@dataclass
class Desk:
    """Makes lines, and reads what their processes noted."""

    folder: Path
    done: set[str] = field(default_factory=set)

    @property
    def notes(self) -> list[str]:
        file = self.folder / "notes"
        return file.read_text().splitlines() if file.exists() else []

    def step(self, name: str, code: int = 0, seconds: float = 0.0, program: str = WORK) -> Step:
        def child(slot: str) -> Child:
            environment = {"NOTES": str(self.folder / "notes"), "SLOT": slot or "-"}
            command = (sys.executable, "-S", "-c", program, name, str(code), str(seconds))
            return Child(name, command, environment, self.folder / "logs" / f"{name}.log")

        return Step(name, child, lambda: name in self.done)

    def line(self, name: str, size: float, *steps: Step) -> Line:
        return Line(name, steps or (self.step(name),), size)


@pytest.fixture
def desk(tmp_path: Path) -> Desk:
    return Desk(tmp_path)


def test_the_longest_goes_first_onto_the_next_free_slot(desk: Desk) -> None:
    long = desk.line("long", 9, desk.step("long", seconds=1.5))
    lines = [desk.line("short", 1), desk.line("middle", 5), long]

    assert run_lines(lines, ["0", "1"], StopRequest()) == []

    # While the long one keeps the first slot, the others follow one another on the second.
    assert [note for note in desk.notes if note.startswith("1 ")] == [
        "1 middle begins",
        "1 middle ends",
        "1 short begins",
        "1 short ends",
    ]
    assert sorted(note for note in desk.notes if note.startswith("0 ")) == ["0 long begins", "0 long ends"]


def test_no_slot_has_two_processes_at_once_and_steps_come_in_order(desk: Desk) -> None:
    def line(number: int) -> Line:
        # Those of odd numbers fail in their second step.
        steps = [desk.step(f"e{number}s{step}", code=step * number % 2, seconds=0.05) for step in range(3)]
        return desk.line(f"e{number}", number % 3, *steps)

    failures = run_lines([line(number) for number in range(6)], ["a", "b"], StopRequest())

    assert sorted(failure.step for failure in failures) == ["e1s1", "e3s1", "e5s1"]
    busy: dict[str, str] = {}
    for note in desk.notes:
        slot, name, what = note.split()
        assert (busy.pop(slot, None) == name) if what == "ends" else (slot not in busy)
        if what == "begins":
            busy[slot] = name
    for number in range(6):
        begun = [note.split()[1] for note in desk.notes if note.endswith("begins") and f" e{number}s" in note]
        assert begun == [f"e{number}s{step}" for step in range(2 if number % 2 else 3)]


def test_a_failure_ends_its_line_only_and_is_told_with_its_log(desk: Desk) -> None:
    bad = desk.line("bad", 9, desk.step("one"), desk.step("two", code=3), desk.step("three"))

    failures = run_lines([bad, desk.line("good", 1)], ["0"], StopRequest())

    assert [(failure.line, failure.step, failure.code) for failure in failures] == [("bad", "two", 3)]
    assert [note.split()[1] for note in desk.notes if note.endswith("ends")] == ["one", "two", "good"]
    error = failure_of(failures, 2)
    assert isinstance(error, DataError)  # the exit code of the whole is that of the first failure
    assert error.what.startswith("1 of 2 experiments failed:\n  two (exit code 3); the end of ")
    assert error.what.endswith("two.log:\n      a line of two")


def test_every_failure_is_told(desk: Desk) -> None:
    failures = run_lines([desk.line(n, 1, desk.step(n, code=1)) for n in ("x", "y")], ["0"], StopRequest())

    error = failure_of(failures, 2)
    assert type(error) is PipelineError
    assert [f"a line of {name}" in error.what for name in ("x", "y")] == [True, True]


def test_a_rerun_takes_up_only_what_is_missing_and_keeps_the_logs(desk: Desk) -> None:
    def line(code: int) -> Line:
        return desk.line("e", 1, desk.step("one"), desk.step("two", code=code))

    assert [type(one) for one in run_lines([line(5)], ["0"], StopRequest())] == [Failure]
    desk.done.add("one")

    assert run_lines([line(0)], ["0"], StopRequest()) == []

    assert [note.split()[1] for note in desk.notes if note.endswith("ends")] == ["one", "two", "two"]
    assert (desk.folder / "logs" / "two.log").read_text() == "a line of two\n" * 2


def test_a_line_that_is_done_takes_no_slot(desk: Desk) -> None:
    desk.done |= {"a", "b"}

    assert run_lines([desk.line("a", 2), desk.line("b", 1), desk.line("c", 0)], ["0"], StopRequest()) == []

    assert desk.notes == ["0 c begins", "0 c ends"]


def _wait_for(condition: Callable[[], bool], then: Callable[[], None]) -> threading.Thread:
    def watch() -> None:
        while not condition():
            threading.Event().wait(0.02)
        then()

    thread = threading.Thread(target=watch)
    thread.start()
    return thread


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_is_handed_to_the_children_and_nothing_more_is_started(desk: Desk, number: signal.Signals) -> None:
    stop = StopRequest()
    lines = [desk.line(n, 9, desk.step(n, program=PATIENT), desk.step(f"{n}-next")) for n in ("a", "b")]
    thread = _wait_for(lambda: desk.notes == ["ready"] * 2, lambda: setattr(stop, "received", number))

    with pytest.raises(StoppedError, match=r"stopped; what is finished is kept\n  What to do: [^\n]*$"):
        run_lines([*lines, desk.line("waiting", 1)], ["0", "1"], stop)

    thread.join()
    assert desk.notes == ["ready", "ready", "checkpoint 1", "checkpoint 1"]
    assert stop.exit_code == 128 + number


def test_a_failure_while_stopping_is_still_told(desk: Desk) -> None:
    stop = StopRequest()
    broken = PATIENT.replace("sys.exit(128 + seen[0])", "sys.exit('no disk')")
    thread = _wait_for(lambda: desk.notes == ["ready"], lambda: setattr(stop, "received", signal.SIGTERM))

    with pytest.raises(StoppedError, match=r"a \(exit code 1\); the end of .*\n      no disk"):
        run_lines([desk.line("a", 1, desk.step("a", program=broken))], ["0"], stop)

    thread.join()


def test_no_child_is_left_behind_when_the_run_is_cut_short(desk: Desk) -> None:
    class Impatient(StopRequest):
        def __call__(self) -> bool:
            if desk.notes == ["ready"]:
                raise KeyboardInterrupt
            return False

    with pytest.raises(KeyboardInterrupt):
        run_lines([desk.line("a", 1, desk.step("a", program=PATIENT))], ["0"], Impatient())

    assert desk.notes == ["ready", "checkpoint 1"]
