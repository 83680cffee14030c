"""The fault register and the tests agree: what is closed has a test, what is open has none, every id has a row."""

from __future__ import annotations

import gc
import re
from dataclasses import dataclass, field

import pytest
from from_tree import ROOT, fault_id, fault_order, proofs

REGISTER = ROOT / "docs" / "contributing" / "faults.md"
STATUSES = ("open", "partly", "closed")
NOTHING = "—"


@dataclass(frozen=True)
class Fault:
    id: str
    status: str
    what: str
    classes: tuple[str, ...]
    why: str
    looked_at: str


@dataclass
class Register:
    faults: dict[str, Fault] = field(default_factory=dict)
    classes: list[str] = field(default_factory=list)


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip().removeprefix("|").removesuffix("|").split(" | ")]


def read(text: str) -> Register:
    """The rows of the register; a row that has another form is an error, so that none is overlooked."""
    register = Register()
    section = ""
    for line in text.splitlines():
        if line.startswith("## "):
            section = line.removeprefix("## ")
        if not line.startswith("| ") or re.match(r"\| (id|class) \|", line):
            continue
        if section == "The classes":
            register.classes.append(cells(line)[0])
        elif re.match(r"(BQ|DQ|EX|IN|[CDXSW]): ", section):
            found = cells(line)
            assert len(found) == 6, f"a row has 6 cells, this one {len(found)}: {line}"
            fault = Fault(found[0], found[1], found[2], tuple(found[3].split("; ")), *found[4:])
            assert fault.id.startswith(section.partition(":")[0] + "-"), f"{fault.id} stands under {section!r}"
            assert fault.id not in register.faults, f"{fault.id} has two rows"
            register.faults[fault.id] = fault
    return register


def disagreements(register: Register, tests: dict[str, list[str]]) -> list[str]:
    """What the register and the tests say differently, each with what to write."""
    wrong: list[str] = []
    page = REGISTER.relative_to(ROOT).as_posix()
    for fault in register.faults.values():
        named = tests.get(fault.id, [])
        prefix = f"test_{fault.id.lower().replace('-', '_')}_"
        if fault.status not in STATUSES:
            wrong.append(f"{fault.id}: its status is {fault.status!r}; write one of {', '.join(STATUSES)} in {page}")
        elif fault.status == "open" and named:
            wrong.append(
                f"{fault.id} is open, and has tests ({', '.join(named)}): in its row of {page} write `closed` for "
                "`open` (or `partly`, if some of it is left), and in the last column where else you looked"
            )
        elif fault.status != "open" and not named:
            wrong.append(
                f"{fault.id} is {fault.status}, and no test has a name that starts with {prefix}: write the test, "
                f"or `open` in its row of {page}"
            )
        elif fault.status != "open" and fault.looked_at in {"", NOTHING}:
            wrong.append(
                f"{fault.id} is {fault.status}: say in the last column of its row in {page} where else you looked"
            )
        wrong += [
            f"{fault.id}: {name!r} is not in the list of classes of {page}; take one of them, or add a row there"
            for name in fault.classes
            if name not in register.classes
        ]
    wrong += [
        f"{identity} has tests ({', '.join(tests[identity])}) and no row in {page}: add the row, or correct the names"
        for identity in sorted(tests, key=fault_order)
        if identity not in register.faults
    ]
    return wrong


@pytest.fixture(autouse=True, scope="module")
def _collected():
    """Python 3.11 can't parse while the collector, amid it, logs what an earlier test left: that parses as well."""
    gc.collect()


def test_the_register_agrees_with_the_tests():
    tests = {identity: [name for names in files.values() for name in names] for identity, files in proofs().items()}
    wrong = disagreements(read(REGISTER.read_text()), tests)
    assert not wrong, "\n".join(wrong)


def test_every_list_is_whole_and_in_its_order():
    ids = list(read(REGISTER.read_text()).faults)
    first = [*(f"BQ-{chr(ord('a') + at)}" for at in range(22))]
    for letters, least in (("DQ", 16), ("EX", 10), ("C", 18), ("D", 29), ("X", 28), ("S", 16), ("IN", 60), ("W", 4)):
        count = max(least, sum(each.startswith(f"{letters}-") for each in ids))
        first += [f"{letters}-{number}" for number in range(1, count + 1)]
    assert ids == first


def test_every_class_is_of_use():
    register = read(REGISTER.read_text())
    used = {name for fault in register.faults.values() for name in fault.classes}
    assert [name for name in register.classes if name not in used] == []
    assert len(set(register.classes)) == len(register.classes)


# --- the comparison itself

PAGE = """
## The classes

| class | what |
|---|---|
| no owner | it |

## C: core

| id | status | fault | class | why it matters | looked at |
|---|---|---|---|---|---|
| C-1 | {status} | it | {kind} | it | {looked} |
"""


def wrong_with(names: dict[str, list[str]], status="closed", kind="no owner", looked="everywhere"):
    return disagreements(read(PAGE.format(status=status, kind=kind, looked=looked)), names)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"status": "open"}, "C-1 is open, and has tests"),
        ({"status": "done"}, "its status is 'done'"),
        ({"looked": NOTHING}, "say in the last column"),
        ({"kind": "no idea"}, "'no idea' is not in the list of classes"),
        ({"kind": "no owner; no idea"}, "'no idea' is not in the list of classes"),
    ],
)
def test_a_row_that_is_wrong_is_named_with_what_to_write(options, message):
    (found,) = wrong_with({"C-1": ["test_c_1_x"]}, **options)
    assert message in found


def test_rows_that_are_right_pass():
    assert wrong_with({"C-1": ["test_c_1_x"]}) == wrong_with({"C-1": ["test_c_1_x"]}, status="partly") == []
    assert wrong_with({}, status="open", looked=NOTHING) == []


def test_a_closed_fault_without_a_test_and_a_test_without_a_row_are_found():
    assert "no test has a name that starts with test_c_1_" in wrong_with({})[0]
    assert "C-2 has tests (test_c_2_x) and no row" in wrong_with({"C-1": ["y"], "C-2": ["test_c_2_x"]})[0]


def test_a_row_of_another_form_is_no_row_that_is_passed_over():
    with pytest.raises(AssertionError, match="a row has 6 cells"):
        read(PAGE.replace(" | {looked}", ""))
    with pytest.raises(AssertionError, match="D-1 stands under"):
        read(PAGE.replace("C-1", "D-1"))


@pytest.mark.parametrize(
    ("name", "identity"),
    [
        ("test_bq_a_no_item_is_lost", "BQ-a"),
        ("test_c_1_x", "C-1"),
        ("test_c_18_x", "C-18"),
        ("test_ex_10_x", "EX-10"),
        ("test_c_language", None),
        ("test_bq_ab_x", None),
        ("test_s_3", None),
    ],
)
def test_the_id_is_read_from_the_name(name, identity):
    assert fault_id(name) == identity
