"""Names of objects, pods and hosts: valid and unique for any program."""

import re

import pytest
from hypothesis import given, strategies as st

from launchers.kubernetes._names import Names

DNS_1035 = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")
LABEL_VALUE = re.compile(r"[A-Za-z0-9]([-_.A-Za-z0-9]*[A-Za-z0-9])?")
LARGEST_INDEX = 99_999
RANDOM_END = "-abcde"

#: Whatever a text may be, and what is likely to be alike when only plain characters are left.
TEXTS = st.text(max_size=80) | st.text(alphabet="aA_-. 0é学", max_size=6)
RUNS = st.none() | st.from_regex(r"[a-z]([a-z0-9-]{0,38}[a-z0-9])?", fullmatch=True)
LABELS = st.lists(TEXTS | st.sampled_from(["order", "trust", "work-0", "supervisor"]), max_size=12)


@given(TEXTS, LABELS, RUNS, st.booleans())
def test_every_name_is_valid_and_that_of_one_thing_each_time_and_in_any_order(
    program: str, labels: list[str], run: str | None, jobset: bool
) -> None:
    names = Names.of(program, labels, run, jobset=jobset)
    assert DNS_1035.fullmatch(names.run)
    assert len(names.run) <= 40
    assert LABEL_VALUE.fullmatch(names.program)
    assert len(names.program) <= 63
    jobs = [names.supervisor_job, *(names.job(label) for label in labels)]
    services = [names.run, *names.groups.values()]
    secrets = [names.trust, names.order, names.work(999)]
    for name in (*jobs, *services, *secrets):
        assert DNS_1035.fullmatch(name)
        assert len(name) <= 63
    for label in labels:
        assert LABEL_VALUE.fullmatch(names.slug(label))
        host = names.host(label, LARGEST_INDEX)
        assert DNS_1035.fullmatch(host)
        assert len(host + RANDOM_END) <= 63  # so the pod's name begins with its host name
        assert names.address(label, LARGEST_INDEX) == f"{host}.{names.groups[label]}"
    assert len(names.supervisor_job + "-0" + RANDOM_END) <= 63
    assert Names.of(program, reversed(labels), names.run, jobset=jobset) == names
    labels = list(dict.fromkeys(labels))
    assert list(names.groups) == labels
    others = [names.run, f"{names.run}-supervisor", names.trust, names.order]
    others += [names.work(part) for part in range(3)]
    services = [names.groups[label] for label in labels]
    assert len({*others, *services}) == len(others) + len(labels)
    hosts = [names.host(label, replica) for label in labels for replica in (0, 1, 10)]
    assert len({*hosts}) == len(hosts)
    assert len({names.job(label) for label in labels} | {names.supervisor_job}) == len(labels) + 1


def test_plain_names_stay_as_they_are() -> None:
    names = Names.of("actor_learner", ["actor", "replay-buffer"], "demo")
    assert names.program == "actor_learner"
    assert names.groups == {"actor": "demo-actor", "replay-buffer": "demo-replay-buffer"}
    assert names.run == names.supervisor_job == "demo"
    assert (names.trust, names.order, names.work(0)) == ("demo-trust", "demo-order", "demo-work-0")
    assert names.address("actor", 3) == "demo-actor-3.demo-actor"


def test_names_that_lose_something_say_so_with_a_digest() -> None:
    names = Names.of("p", ["Actor", "actor", "a_b", "a-b", "学習者", "x" * 80], "demo")
    assert names.slug("actor") == "actor"
    assert names.slug("a-b") == "a-b"
    assert re.fullmatch(r"actor-[0-9a-f]{6}", names.slug("Actor"))
    assert re.fullmatch(r"a-b-[0-9a-f]{6}", names.slug("a_b"))
    assert re.fullmatch(r"g-[0-9a-f]{6}", names.slug("学習者"))
    assert re.fullmatch(r"x{37}-[0-9a-f]{6}", names.slug("x" * 80))
    assert len(names.groups["x" * 80]) == 49


def test_a_name_that_looks_like_another_with_its_digest_is_still_its_own() -> None:
    shortened = Names.of("p", ["Actor"], "demo").slug("Actor")
    both = Names.of("p", ["Actor", shortened], "demo")
    assert both.slug("Actor") == shortened != both.slug(shortened)


def test_a_group_called_like_one_of_our_objects_gets_another_name() -> None:
    names = Names.of("p", ["order", "trust", "work-12", "supervisor"], "demo")
    assert all(re.search(r"-[0-9a-f]{6}$", name) for name in names.groups.values())
    assert Names.of("p", ["worker", "orders"], "demo").groups == {
        "worker": "demo-worker",
        "orders": "demo-orders",
    }


def test_a_run_is_named_after_its_program_and_like_no_other() -> None:
    runs = {Names.of("Actor/Learner № 1", []).run for _ in range(50)}
    assert len(runs) == 50
    assert all(re.fullmatch(r"actor-learner-no-1-[b-df-hj-np-tv-xz2-9]{5}", run) for run in runs)
    assert Names.of("3d", []).run.startswith("p-3d-")
    assert Names.of("élan", []).run.startswith("elan-")
    assert Names.of("x" * 23 + " y", []).run[:24] == "x" * 23 + "-"
    assert len(Names.of("x" * 23 + " y", []).run) == 29
    assert Names.of("学習", []).run.startswith("program-")
    assert len(Names.of("x" * 90, []).run) == 30


def test_a_jobset_names_jobs_and_hosts_by_its_own_rules() -> None:
    names = Names.of("p", ["actor"], "demo", jobset=True)
    assert names.groups == {"actor": "demo-actor"}
    assert names.job("actor") == "demo-actor-0"
    assert names.host("actor", 2) == "demo-actor-0-2"
    assert names.address("actor", 2) == "demo-actor-0-2.demo-actor"
    assert names.run == "demo"
    assert names.supervisor_job == "demo-supervisor-0"


@pytest.mark.parametrize("run", ["", "Demo", "1st", "a_b", "ends-", "x" * 41, "a.b", "demo\n"])
def test_a_run_that_no_object_can_be_called_is_refused(run: str) -> None:
    with pytest.raises(ValueError, match="at most 40 lower-case letters"):
        Names.of("p", [], run)
