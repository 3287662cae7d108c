"""The command line: what it says, and how it ends."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from tests.facts import CPU, H200, batch, judgement, latency, report, saved, sessions, timing, with_figures

from pytest_cudagraph.baseline import JsonStore
from pytest_cudagraph.cli import main
from pytest_cudagraph.report import document, json_text
from pytest_cudagraph.values import Verdict

MLP, GPT = "tests/test_a.py::test_mlp[fp16]", "tests/test_b.py::test_gpt"


@pytest.fixture(autouse=True)
def workplace(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def said(capsys):
    """Run a command; gives the exit code, stdout and stderr."""

    def run(*argv):
        try:
            code = main([str(argument) for argument in argv])
        except SystemExit as ended:
            code = ended.code
        out, err = capsys.readouterr()
        return code, out, err

    return run


def write(folder, *entries, device=H200):
    store = JsonStore(folder, device)
    store.merge(entries, commit_info={})
    return store.path


@pytest.fixture
def folder(workplace):
    made = workplace / ".cudagraph"
    generated = with_figures(saved(GPT, 8, kernels=None), ttft=900.0, itl=60.5, time_per_token=50.0)
    write(made, saved(MLP, 1), saved(MLP, 8, compiled=latency(80.0)), generated)
    write(made, saved(GPT, 1, device=CPU), device=CPU)
    return made


@pytest.mark.parametrize(
    "command",
    [
        [],
        ["baseline"],
        ["baseline", "prune"],
        ["baseline", "merge"],
        ["compare"],
        ["check"],
        ["explain"],
        ["report"],
        ["suite"],
        ["doctor"],
    ],
)
def test_every_help_ends_with_the_exit_codes(said, command):
    code, out, _ = said(*command, "--help")
    told = (
        "exit codes: 0 success; 1 a regression (compare), a failed model (check), or a machine unfit to judge speed "
        "(doctor); 2 an entry could not be judged (compare --strict); 4 a usage error, such as an unreadable file"
    )
    assert (code, " ".join(out.split()).endswith(told)) == (0, True)


def test_list_names_the_files_of_a_folder(said, folder, golden):
    code, out, _ = said("baseline", "list")

    assert code == 0
    golden("cli/list.txt", out)
    assert said("baseline", "list", folder) == (0, out, "")


def test_list_says_that_there_is_nothing(said, workplace):
    assert said("baseline", "list", workplace) == (0, f"no baseline in {workplace}\n", "")


def test_list_of_no_folder_is_a_mistake(said):
    assert said("baseline", "list") == (4, "", "pytest-cudagraph: .cudagraph is not a folder\n")


@pytest.mark.parametrize("name", [".cudagraph/nvidia-h200.json", "nvidia-h200", "nvidia-h200.json"])
def test_show_tells_a_file_by_path_or_name(said, folder, golden, name):
    code, out, _ = said("baseline", "show", name)

    assert code == 0
    golden("cli/show.txt", out)


def test_show_of_an_unknown_name_is_a_mistake(said, folder):
    assert said("baseline", "show", "nvidia-h100") == (
        4,
        "",
        "pytest-cudagraph: .cudagraph/nvidia-h100.json: no such file\n",
    )


def test_prune_removes_by_name_in_all_files_and_says_so(said, folder):
    code, out, _ = said("baseline", "prune", folder, "--name", "*::test_gpt")

    assert code == 0
    assert out == (
        f"removed from {folder}/cpu-amd-epyc-9b45.json: {GPT}, batch 1\n"
        f"removed from {folder}/nvidia-h200.json: {GPT}, batch 8\n"
    )
    assert not (folder / "cpu-amd-epyc-9b45.json").exists()
    assert sorted(JsonStore(folder, H200).load()) == [(MLP, 1), (MLP, 8)]


def test_prune_looks_where_list_looks(said, folder):
    said("baseline", "prune", "--name", "*::test_gpt")

    assert sorted(JsonStore(folder, H200).load()) == [(MLP, 1), (MLP, 8)]


def test_prune_of_a_batch_size_in_a_file_leaves_the_others(said, folder):
    said("baseline", "prune", folder / "nvidia-h200.json", "--name", "*", "--batch-size", "1", "7")

    assert sorted(JsonStore(folder, H200).load()) == [(MLP, 8), (GPT, 8)]
    assert (folder / "cpu-amd-epyc-9b45.json").exists()


def test_prune_takes_brackets_as_they_are(said, folder):
    said("baseline", "prune", folder, "--name", "nothing", MLP)

    assert sorted(JsonStore(folder, H200).load()) == [(GPT, 8)]


def test_prune_takes_what_is_the_name_of_an_entry_as_that_name(said, tmp_path):
    """What strict prints names stale entries; a star in one of them must not reach others."""
    names = ("t.py::test_a[x*y]", "t.py::test_a[xzy]")
    JsonStore(tmp_path, H200).merge([saved(name) for name in names], commit_info={})
    said("baseline", "prune", tmp_path, "--name", names[0])
    assert list(JsonStore(tmp_path, H200).load()) == [(names[1], 8)]


@pytest.mark.parametrize("inputs", [("one", "two/nvidia-h200.json"), ("two", "one")])
def test_merge_joins_histories_and_takes_the_newest_of_what_differs(said, workplace, inputs, golden):
    first, second, third = sessions(60.0, 60.5, 60.2)
    slower = saved(GPT, replay=latency(90.0), sessions=(sessions(0, 0, 0, 90.0)[3],))
    write(workplace / "one", saved(MLP, sessions=(first, second)), slower)
    write(workplace / "one", saved(GPT, 1, device=CPU), device=CPU)
    write(workplace / "two", saved(MLP, sessions=(first, third)), saved(GPT, sessions=(third,)))
    write(workplace / "all", saved(MLP, 1))
    code, out, _ = said("baseline", "merge", *inputs, "-o", "all")

    assert code == 0
    golden("cli/merge.txt", out)
    merged = JsonStore(workplace / "all", H200).load()
    medians_ns = {key: [each.median_ns for each in entry.sessions] for key, entry in merged.items()}
    assert medians_ns == {(GPT, 8): [90000], (MLP, 1): [60000], (MLP, 8): [60000, 60500, 60200]}


def test_merge_writes_nothing_if_it_cannot_read_all(said, folder, workplace):
    (workplace / "broken.json").write_text("{}", encoding="utf-8")
    code, _, err = said("baseline", "merge", folder, "broken.json", "-o", "all")

    assert (code, err.startswith("pytest-cudagraph: broken.json: not a baseline")) == (4, True)
    assert not (workplace / "all").exists()


def test_prune_says_when_nothing_has_such_a_name(said, folder):
    assert said("baseline", "prune", folder, "--name", "test_mlp") == (
        0,
        f"removed nothing: no entry in {folder} has such a name and batch size\n",
        "",
    )
    assert len(JsonStore(folder, H200).load()) == 3


@pytest.fixture
def two(workplace):
    """A function that writes two baseline files and gives their paths, relative to the current folder."""

    def make(old, new):
        write(workplace / "a", *old)
        write(workplace / "b", *new)
        return "a/nvidia-h200.json", "b/nvidia-h200.json"

    return make


SLOWER = saved(replay=latency(72.0), speedup=saved().speedup)
UNCERTAIN = saved(replay=latency(68.0))
MORE = saved(kernels=62, kernel_names={"aten.mul": 57, "aten.bmm": 5})


def test_compare_reads_as_reviewed(said, two, golden):
    speech = with_figures(saved("speech"), ttft=900.0, itl=60.5, time_per_token=50.0)
    old = [
        speech,
        saved("same"),
        saved("busy"),
        saved(GPT),
        saved(MLP),
        saved("gone"),
        saved("gpu", eager=latency(500.0)),
    ]
    new = [
        with_figures(saved("speech"), ttft=1350.0, itl=60.5, time_per_token=62.5),
        saved("same"),
        replace(UNCERTAIN, name="busy", sessions=(replace(*sessions(68.0, reference_us=100.0), unrest_log=0.4),)),
        saved(GPT, replay=latency(72.0), eager=latency(119.0)),
        saved(MLP, kernels=62, kernel_names={"aten.mul": 57, "aten.bmm": 5}),
        saved("new"),
        saved("gpu", device=CPU, eager=latency(50.0)),
    ]
    code, out, _ = said("compare", *two(old, new))

    golden("cli/compare.txt", out)
    assert code == 1


@pytest.mark.parametrize(
    ("new", "options", "code"),
    [
        ([saved()], [], 0),
        ([saved()], ["--strict"], 0),
        ([SLOWER], [], 1),
        ([SLOWER], ["--fail-on", "slower"], 1),
        ([SLOWER], ["--fail-on", "any"], 1),
        ([SLOWER], ["--fail-on", "kernels"], 0),
        ([SLOWER], ["--max-slowdown", "0.2"], 0),
        ([saved(replay=latency(66.0))], ["--max-slowdown", "0"], 1),
        ([MORE], [], 0),
        ([MORE], ["--fail-on", "kernels"], 1),
        ([MORE], ["--fail-on", "any"], 1),
        ([saved(kernels=30)], ["--fail-on", "any"], 0),
        ([saved(kernels=None)], ["--strict"], 0),
        ([saved(kernels=None)], ["--fail-on", "kernels"], 0),
        ([saved(kernels=None)], ["--fail-on", "kernels", "--strict"], 2),
        ([saved(kernels=None)], ["--fail-on", "any", "--strict"], 2),
        ([UNCERTAIN], [], 0),
        ([UNCERTAIN], ["--strict"], 2),
        ([saved(), saved("new")], [], 0),
        ([saved(), saved("new")], ["--strict"], 2),
        ([saved("other")], [], 0),
        ([saved("other")], ["--strict"], 2),
        ([SLOWER, saved("new")], ["--strict"], 1),
    ],
)
def test_compare_ends_with_its_verdict(said, two, new, options, code):
    assert said("compare", *two([saved()], new), *options)[0] == code


def test_report_shows_the_table_of_a_document(said, workplace, golden):
    wrong = judgement(Verdict.WRONG, gate="check", reason="replay differs from eager in output[0]")
    reports = [report(MLP, batch(1), batch(8, timing=timing(120.0, 112.1))), report(GPT, batch(8, wrong), device=H200)]
    (workplace / "run.json").write_text(json_text(document(reports, H200, {})), encoding="utf-8")
    code, out, _ = said("report", "run.json")

    assert code == 0
    golden("cli/report.txt", out)


def test_report_calls_a_cpu_one(said, workplace):
    (workplace / "run.json").write_text(json_text(document([report(MLP, device=CPU)], CPU, {})), encoding="utf-8")

    assert said("report", "run.json")[1].splitlines()[0] == "cpu: AMD EPYC 9B45, torch 2.13.0+cpu"


@pytest.mark.parametrize("command", [["report"], ["baseline", "show"], ["compare", "run.json"]])
@pytest.mark.parametrize("text", ["{", "[]", '{"schema": 7}', '{"benchmarks": [1]}', "\x00", "[" * 100_000])
def test_bad_files_are_one_line_and_exit_4(said, workplace, command, text):
    (workplace / "run.json").write_text(text)
    code, out, err = said(*command, "run.json")

    assert (code, out) == (4, "")
    assert re.fullmatch(r"pytest-cudagraph: run\.json: [^\n]+\n", err)


def test_a_document_where_a_baseline_is_wanted_is_called_what_it_is(said, workplace):
    (workplace / "run.json").write_text(json_text(document([report(MLP)], H200, {})), encoding="utf-8")

    assert said("baseline", "merge", "-o", "joined", "run.json") == (
        4,
        "",
        "pytest-cudagraph: run.json: a document of --cudagraph-json, which pytest-cudagraph report shows, and no "
        "baseline; --cudagraph-update writes baselines, to .cudagraph\n",
    )


def test_compare_takes_documents_of_two_runs_and_judges_them_by_the_same_bound(said, workplace):
    slow = timing(120.0, 90.0)
    runs = {
        "old": [report(MLP, batch(1), batch(8))],
        "new": [report(MLP, batch(1), batch(8, timing=slow)), report(GPT)],
    }
    for name, reports in runs.items():
        text = json_text(document(reports, H200, {}, date="2026-11-20T10:00:00+00:00"))
        (workplace / f"{name}.json").write_text(text, encoding="utf-8")
    write(workplace / "saved", saved(MLP, 1), saved(MLP, 8))

    code, out, _ = said("compare", "old.json", "new.json")
    rows = [" ".join(line.split()) for line in out.splitlines()]
    assert code == 1
    assert rows[0] == "old.json -> new.json"
    assert rows[2].startswith(f"{MLP} 1 60.0 µs 60.0 µs +0.0 % +0.0 %")
    assert re.fullmatch(re.escape(MLP) + r" 8 60.0 µs 90.0 µs \+50 % \+0.0 % \d+ slower", rows[3])
    assert rows[4].endswith(" new")
    assert said("compare", "saved/nvidia-h200.json", "new.json")[0] == 1


def test_compare_of_a_baseline_with_a_document_says_nothing_of_kernels_that_the_document_does_not_name(said, workplace):
    write(workplace / "saved", saved(MLP, 1, kernels=46), saved(MLP, 8, kernels=40))
    text = json_text(document([report(MLP, batch(1), batch(8))], H200, {}, date="2026-11-20T10:00:00+00:00"))
    (workplace / "run.json").write_text(text, encoding="utf-8")

    lines = said("compare", "saved/nvidia-h200.json", "run.json")[1].splitlines()
    assert [line.split()[-2] for line in lines[2:4]] == ["46", "46"]
    assert lines[4:] == ["2 same, 1 with other kernels"]


def test_strict_compare_of_nothing_is_undecided(said, workplace):
    text = json_text(document([], H200, {}))
    (workplace / "run.json").write_text(text, encoding="utf-8")

    assert said("compare", "run.json", "run.json")[:2] == (0, "run.json -> run.json\nnothing to compare\n")
    assert said("compare", "run.json", "run.json", "--strict")[0] == 2


def test_compare_refuses_a_damaged_document(said, workplace):
    found = document([report(MLP)], H200, {})
    del found["tests"][0]["batches"][0]["replay"]["q75"]
    (workplace / "run.json").write_text(json_text(found), encoding="utf-8")
    told = "pytest-cudagraph: run.json: damaged: tests: 0: batches: 0: timing: replay: q75 is missing\n"
    assert said("compare", "run.json", "run.json") == (4, "", told)


@pytest.mark.parametrize("page", ["folder", "run.json/page.html", "x" * 300])
def test_a_page_that_cannot_be_written_is_one_line_and_exit_4(said, workplace, page):
    (workplace / "run.json").write_text(json_text(document([report(MLP)], H200, {})), encoding="utf-8")
    (workplace / "folder").mkdir()
    code, out, err = said("report", "run.json", "--html", page)

    assert (code, out) == (4, "")
    assert re.fullmatch(
        r"pytest-cudagraph: [^\n]+: the page could not be written \([^\n]+\); nothing was changed\n", err
    )
    assert {each.name for each in workplace.iterdir()} == {"folder", "run.json"}


def test_a_page_never_replaces_its_document(said, workplace):
    text = json_text(document([report(MLP)], H200, {}))
    (workplace / "run.json").write_text(text, encoding="utf-8")
    told = "pytest-cudagraph: ./run.json: the page would replace the document; nothing was changed\n"
    assert said("report", "run.json", "--html", "./run.json") == (4, "", told.replace("./", ""))
    assert (workplace / "run.json").read_text(encoding="utf-8") == text


def test_a_folder_with_too_long_a_name_is_one_line_and_exit_4(said):
    code, out, err = said("baseline", "list", "x" * 300)
    assert (code, out, err.count("\n")) == (4, "", 1)


def test_a_page_never_replaces_its_document_through_a_link(said, workplace):
    text = json_text(document([report(MLP)], H200, {}))
    (workplace / "run.json").write_text(text, encoding="utf-8")
    (workplace / "link").symlink_to("run.json")
    told = "pytest-cudagraph: link: the page would replace the document; nothing was changed\n"
    assert said("report", "run.json", "--html", "link") == (4, "", told)
    assert (workplace / "run.json").read_text(encoding="utf-8") == text


def test_a_document_among_the_baselines_is_named_and_never_listed_as_one(said, folder, workplace):
    (workplace / folder / "run.json").write_text(json_text(document([report(MLP)], H200, {})), encoding="utf-8")
    code, out, err = said("baseline", "list", folder)
    assert (code, out) == (4, "")
    assert err.startswith(f"pytest-cudagraph: {folder}/run.json: a document of --cudagraph-json, which ")


def test_a_closed_output_is_one_line_and_exit_4(monkeypatch, capsys):
    monkeypatch.setattr(sys, "stdout", None)
    assert main(["explain"]) == 4
    assert capsys.readouterr().err == "pytest-cudagraph: the output cannot be written (stdout is closed)\n"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="only Linux has a full device")
def test_an_output_that_cannot_be_written_is_one_line_and_exit_4():
    with Path("/dev/full").open("w") as full:
        command = [sys.executable, "-m", "pytest_cudagraph", "explain"]
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    told = "pytest-cudagraph: the output cannot be written (No space left on device)\n"
    assert (done.returncode, done.stderr) == (4, told)


@pytest.mark.parametrize("command", [["report"], ["baseline", "show"], ["compare", "a.json"]])
def test_missing_files_are_one_line_and_exit_4(said, command):
    code, out, err = said(*command, "./a.json")

    assert (code, out) == (4, "")
    assert err.startswith("pytest-cudagraph: a.json: ")
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        ([], "the following arguments are required: COMMAND"),
        (["benchmark"], "invalid choice: 'benchmark'"),
        (["baseline", "prune", "."], "the following arguments are required: --name"),
        (["compare", "a"], "the following arguments are required: B"),
        (["compare", "a", "b", "--fail-on", "all"], "invalid choice: 'all'"),
        (["compare", "a", "b", "--max-slowdown", "10%"], "10% is not a fraction from 0 to 1 (10 % is 0.1)"),
        (["compare", "a", "b", "--max-slowdown", "-1"], "-1 is not a fraction from 0 to 1 (10 % is 0.1)"),
        (["compare", "a", "b", "--max-slowdown", "10"], "10 is not a fraction from 0 to 1 (10 % is 0.1)"),
        (["compare", "a", "b", "--max-slowdown", "nan"], "nan is not a fraction from 0 to 1 (10 % is 0.1)"),
    ],
)
def test_mistakes_of_use_exit_4_not_2(said, argv, words):
    code, _, err = said(*argv)

    assert code == 4
    assert words in err


def test_no_text_of_a_file_or_an_argument_is_a_command_to_the_terminal(said, workplace):
    loud = f"{MLP}\x1b[2J\ud800"
    device = replace(H200, name="NVIDIA\x1b[2J", driver="1\x1b[2J")
    path = write(workplace / ".cudagraph", saved(loud, 1, device=device, kernel_names={"mul\x1b[2J": 1}), device=device)
    other = write(workplace / "other", saved(loud, 1, device=device, kernel_names={"add\x1b[2J": 1}), device=device)
    commands = [
        ("baseline", "list"), ("baseline", "show", path), ("compare", path, other), ("compare", path, "no\x1b[2J"),
        ("explain", "no\x1b[2J"), ("compare", path, other, "--no\x1b[2J"), ("baseline", "prune", "--name", loud),
    ]  # fmt: skip
    for command in commands:
        _, out, err = said(*command)
        assert "?[2J" in out + err
        assert "\x1b" not in out + err


@pytest.mark.skipif(sys.platform == "win32", reason="pipes of POSIX")
@pytest.mark.parametrize("command", [["report"], ["baseline", "show"], ["compare", "old.json"]])
@pytest.mark.parametrize("make", [os.mkfifo, lambda path: Path(path).symlink_to("/dev/zero")], ids=["pipe", "device"])
def test_what_is_no_regular_file_is_refused_and_not_waited_for(said, workplace, command, make):
    make("run.json")
    write(workplace / "x", saved(MLP, 1)).rename("old.json")
    code, _, err = said(*command, "run.json")

    assert code == 4
    assert err == "pytest-cudagraph: run.json: cannot be read (only a regular file is read)\n"


def test_explain_prints_the_page_of_a_hazard(said):
    code, out, err = said("explain", "baked-scalar")

    assert (code, err) == (0, "")
    assert out.startswith("# baked-scalar\n\nSilent: a Python number differs between equal calls,")
    assert "## The fix\n" in out


def test_explain_takes_several_ids_in_their_order(said):
    both = said("explain", "rng", "host-sync")[1]

    assert both == said("explain", "rng")[1] + "\n" + said("explain", "host-sync")[1]


def test_explain_without_an_id_lists_all(said, golden):
    code, out, _ = said("explain")

    assert code == 0
    assert max(map(len, out.splitlines())) <= 100
    golden("cli/explain.txt", out)


@pytest.mark.parametrize(
    ("id_", "words"),
    [
        ("baked_scaler", "nearest: baked-scalar (explain without an id lists all)"),
        ("Host-Sync", "nearest: host-sync"),
        ("zzz", "there are: baked-scalar, collective, control-flow, dynamic-shape"),
        ("README", "no hazard is called README"),
        ("../twin", "no hazard is called ../twin"),
        ("", "no hazard is called ;"),
    ],
)
def test_explain_of_an_unknown_id_names_the_nearest_and_exits_4(said, id_, words):
    code, out, err = said("explain", "rng", id_)

    assert (code, out) == (4, "")
    assert words in err
    assert err.count("\n") == 1


def run(*command, **rest):
    return subprocess.run([sys.executable, *command], capture_output=True, timeout=60, **rest)


@pytest.mark.slow
def test_the_module_is_the_command(folder):
    done = run(
        "-m", "pytest_cudagraph", "baseline", "show", "nvidia-h200", env=os.environ | {"PYTHONIOENCODING": "ascii"}
    )

    assert done.returncode == 0, done.stderr
    assert b"120.0 ?s" in done.stdout


@pytest.mark.slow
def test_the_command_does_not_load_torch(folder):
    code = (
        "import sys; from pytest_cudagraph.cli import main; "
        "main(['baseline', 'list']); sys.exit('torch' in sys.modules or 'pytest' in sys.modules)"
    )

    assert run("-c", code).returncode == 0


@pytest.mark.slow
def test_a_reader_that_has_seen_enough_is_no_error():
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "pytest_cudagraph", "explain", "rng"]
    found = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, timeout=60, check=False)
    os.close(writer)
    assert (found.returncode, found.stderr) == (0, b"")


def run_of(path, name, replay_us):
    marked = [{"nodeid": name, "group": "decoder", "name": "gpt2", "error": None}]
    found = document([report(name, batch(8, timing=timing(120.0, replay_us)))], H200, {}, workloads=marked)
    path.write_text(json_text(found), encoding="utf-8")
    return path.name


def test_suite_shows_the_rankings_of_a_run_and_what_moved_in_another(said, workplace, golden):
    old, new = run_of(workplace / "old.json", GPT, 60.0), run_of(workplace / "new.json", GPT, 80.0)
    rankings, moved = said("suite", old), said("suite", old, new)
    assert (rankings[0], moved[0]) == (0, 0)
    golden("cli/suite.txt", f"{rankings[1]}\n{moved[1]}")


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (None, "cannot be read"),
        ("[", "Expecting value"),
        ("{}", "not a document of schema 1"),
        (json_text(document([], None, {})), "no test of this run has the mark workload"),
        (json_text(document([], None, {}) | {"workloads": [3]}), "damaged: workloads: 0: a mapping is needed, not 3"),
        ("[" * 100_000, "nested too deeply"),
    ],
)
def test_suite_refuses_what_is_no_run_with_workloads(said, workplace, text, told):
    if text is not None:
        (workplace / "run.json").write_text(text, encoding="utf-8")
    code, out, error = said("suite", "run.json")
    assert (code, out) == (4, "")
    assert error.startswith("pytest-cudagraph: run.json: ")
    assert told in error
