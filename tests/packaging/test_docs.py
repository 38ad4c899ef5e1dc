"""The pages name what there is: a command, file, setting, limit, kind, metric or path that is gone fails here."""

from __future__ import annotations

import ast
import importlib
import inspect
import json
import re
import shlex
import tomllib
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from textwrap import dedent
from typing import Any

import msgspec
import pytest
import typer

import rankwatch
from rankwatch.kafka.producer import Producer
from rankwatch.kafka.settings import KafkaSettings
from rankwatch.watch import Watch
from rankwatch_service.api.kafka_intake import ProducerCollector
from rankwatch_service.api.routes.policy import Policy
from rankwatch_service.cli.app import app
from rankwatch_service.settings import Settings
from rankwatch_service.telemetry.validate import JsonBatch, from_json
from tests.packaging.pages import PAGES, ROOT, Code, all_code, blocks, files, prose, rest_description, words
from tests.support.service.api import running_api
from tests.support.service.process import free_port

RUNBOOKS = ROOT / "docs" / "incidents"
ROOMS = (
    *("", "docs", "detectors", "tests"),
    *("service/rankwatch_service", "collectors/rankwatch", "detectors/rankwatch_detectors"),
)
"""Folders that a page may leave out of a path."""
OUTSIDE = {
    *(
        "--nproc-per-node",
        "--max-restarts",
        "--rdzv-id",
        "--master-port",
        "--standalone",
        "--format",
        "--alter",
        "--add-config",
    ),
    *("--group", "--topic", "--clean", "--index-url", "--requeue", "--http"),
}
"""Options of other programs."""
NAMES_OUTSIDE = {
    *("loss_cls", "val_loss"),
    *("limit_conn", "pg_dump", "pg_restore", "sqlite3", "torchfrtrace", "rankwatch.toml", "Secure"),
    *("alert_relabel_configs", "http_headers", "path_prefix"),
    *("logging_nan_inf_filter", "save_top_k", "save_total_limit", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"),
}
"""Names of other programs and of the user's own files."""
WIDTH = 120
LOAD = re.compile(r"torch\.load\((?:[^()]|\([^()]*\))*\)")
"""A call of torch.load, up to its closing parenthesis."""


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_between_pages_lead_somewhere(page: Path) -> None:
    for number, line in enumerate(page.read_text().splitlines(), 1):
        for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", line):
            assert (page.parent / target).exists(), f"{page.name}:{number} links to {target}"


@pytest.mark.parametrize("page", sorted(RUNBOOKS.glob("*.md")), ids=lambda page: page.stem)
def test_a_runbook_says_what_to_do_first(page: Path) -> None:
    assert re.search(r"^## .*[Dd]o first", page.read_text(), re.MULTILINE)


# ---- commands --------------------------------------------------------------------------------------------------------


def shell_words(text: str) -> list[str]:
    """A command line as words, without its prompt and comment."""
    try:
        return shlex.split(text.removeprefix("$ "), comments=True)
    except ValueError:
        return text.split()


def called(program: str) -> Iterator[tuple[Code, list[str]]]:
    """Where pages call a program: the words that follow it, up to the end of the command."""
    for code in all_code():
        if code.fence in {None, "", "console"}:
            words_of_line = shell_words(code.text)
            for place, word in enumerate(words_of_line):
                first = place == 0 or code.fence == "console"
                if first and word.rpartition("/")[2] == program:
                    yield code, words_of_line[place + 1 :]


@cache
def command_line() -> Any:
    """The commands as click has them: a group has `commands`."""
    return typer.main.get_command(app)


def below(command: Any) -> dict[str, Any]:
    """The commands of a group; none below a command."""
    return getattr(command, "commands", {})


def options(command: Any) -> set[str]:
    return {name for parameter in command.params for name in (*parameter.opts, *parameter.secondary_opts)} | {"--help"}


def wrong_with(arguments: list[str]) -> str:
    """What a call of `rankwatch` names that is not there; "" if all of it is."""
    if set(arguments) <= options(command_line()):
        return ""
    verbs = arguments[0].split("|") if arguments else []
    arguments = arguments[: arguments.index("--")] if "--" in arguments else arguments  # the rest is another program's
    for verb in verbs:
        command, rest = below(command_line()).get(verb), arguments[1:]
        if command is None:
            return f"there is no command {verb!r}"
        if rest and rest[0] in below(command):
            command, rest = below(command)[rest[0]], rest[1:]
        elif below(command) and rest and not rest[0].startswith("-"):
            return f"there is no command {verb} {rest[0]!r}"
        given = {word.partition("=")[0].rstrip(",") for word in rest if re.match(r"--?[a-z]", word)}
        if verb != "agent" and (unknown := given - options(command)):
            return f"{verb} has no option {sorted(unknown)}"
    return ""


def test_every_call_of_the_command_line_is_one_that_it_takes() -> None:
    problems = [f"{code}: {wrong}" for code, arguments in called("rankwatch") if (wrong := wrong_with(arguments))]
    assert not problems, "\n".join(problems)


def test_every_make_target_and_variable_exists() -> None:
    makefile = (ROOT / "Makefile").read_text()
    problems = []
    for code, arguments in called("make"):
        for word in arguments:
            variable, assigned, _ = word.partition("=")
            pattern = rf"^{re.escape(variable)} \?=" if assigned else rf"^{re.escape(word)}:"
            if not re.search(pattern, makefile, re.MULTILINE):
                problems.append(f"{code}: {word}")
    assert not problems, "\n".join(problems)


def test_every_benchmark_exists_with_its_options() -> None:
    problems = []
    for code, arguments in called("python"):
        script = next((word for word in arguments if word.endswith(".py")), None)
        if script is None:
            continue
        if script == "train.py":  # the user's own
            continue
        source = (ROOT / script).read_text() if (ROOT / script).exists() else ""
        named = [word.partition("=")[0] for word in arguments if word.startswith("--")]
        problems += [f"{code}: {word}" for word in (script, *named) if word != script and f'"{word}"' not in source]
        problems += [] if source else [f"{code}: there is no {script}"]
    assert not problems, "\n".join(problems)


def test_an_option_that_is_named_alone_belongs_to_a_command_a_benchmark_or_another_program() -> None:
    verbs = below(command_line()).values()
    known = OUTSIDE.union(*(options(command) for verb in verbs for command in (verb, *below(verb).values())))
    scripts = [path.read_text() for path in [*(ROOT / "benchmarks").rglob("*.py"), *(ROOT / "tests").glob("**/*.py")]]
    known |= {option for text in scripts for option in re.findall(r'"(--[a-z-]+)"', text)}
    problems = [
        str(code)
        for code in all_code()
        for option in re.findall(r"^--[a-z][a-z-]+", code.text if code.fence is None else "")
        if option not in known
    ]
    assert not problems, "\n".join(problems)


# ---- files and names -------------------------------------------------------------------------------------------------


def exists(path: str) -> bool:
    path = path.rstrip("/")
    return any(f"{room}/{path}".lstrip("/") in files() for room in ROOMS)


def test_every_file_and_folder_exists() -> None:
    names = {path.rpartition("/")[2] for path in files()}
    problems = []
    for code in all_code():
        for path in re.findall(
            r"(?<![\w/.:{-])(?:[\w.-]+/)*[\w-]+(?:\.(?:py|md|yml|toml|svg)|/(?=$|[\s,;`]))", code.text
        ):
            known = exists(path) or ("/" not in path and path in names | NAMES_OUTSIDE)
            if not known and code.fence != "python" and not re.search(r"[A-Z]{3}|^(?:train|run|policy|tmp)\b", path):
                problems.append(f"{code}: {path}")
    assert not problems, "\n".join(problems)


def module_problem(dotted: str) -> str:
    """What of a dotted name under our packages does not exist; "" if all does."""
    parts = dotted.split(".")
    folder = next(
        ROOT / place for place in ("collectors", "detectors", "service") if (ROOT / place / parts[0]).exists()
    )
    for place, part in enumerate(parts):
        if (folder / part).is_dir():
            folder /= part
        else:
            file = folder / f"{part}.py" if (folder / f"{part}.py").exists() else folder / "__init__.py"
            names = parts[place + 1 :] if file.stem == part else parts[place:]
            return next((name for name in names if not re.search(rf"\b{name}\b", file.read_text())), "")
    return ""


def test_every_module_class_and_function_exists_where_it_is_said_to_be() -> None:
    problems = [
        f"{code}: {missing} in {dotted}"
        for code in all_code()
        for dotted in re.findall(r"\brankwatch(?:_service|_detectors)?(?:\.[A-Za-z_]\w*)+", code.text)
        if not dotted.endswith((".toml", ".db", ".dump", ".telemetry")) and (missing := module_problem(dotted))
    ]
    assert not problems, "\n".join(problems)


def test_every_setting_exists() -> None:
    named = [(code, name) for code in all_code() for name in re.findall(r"\bRANKWATCH_[A-Z][A-Z_]*\b", code.text)]
    folders = ("collectors", "service", "tests")
    sources = "".join(path.read_text() for folder in folders for path in (ROOT / folder).rglob("*.py"))
    from rankwatch_service.settings import Settings

    known = set(re.findall(r"RANKWATCH_[A-Z_]+", sources)) | {
        f"RANKWATCH_{name.upper()}" for name in Settings.model_fields
    }
    problems = [str(code) for code, name in named if name not in known]
    assert not problems, "\n".join(problems)


def test_every_limit_kind_metric_field_and_name_is_one_of_the_code() -> None:
    """A name in code type with an underscore, or one that is called, stands somewhere in the sources.

    The names of `docs/logs.md` are those of other projects, which `tests/follow/test_page.py` looks at.
    """
    known = NAMES_OUTSIDE | words() | {Path(path).stem for path in files()}
    problems = []
    for code in all_code():
        if (
            code.fence is None
            and not str(code).startswith("docs/logs.md")
            and not re.search(r"[/$|]|\.\w{2,4}$", code.text)
        ):
            names = re.findall(r"\b[A-Za-z]\w*_\w+\b(?!\*)|\b[A-Za-z_]\w*(?=\()", code.text)
            problems += [f"{code}: {name}" for name in names if name not in known and not name.startswith("RANKWATCH_")]
    assert not problems, "\n".join(problems)


def test_every_path_of_the_rest_interface_exists() -> None:
    paths = rest_description()["paths"]
    known = {re.sub(r"\{[^}]*\}", "*", path) for path in paths}
    problems = []
    for code in all_code():
        for path in re.findall(r"/api/v1[/\w.{}-]*", code.text):
            wanted = re.sub(r"\{[^}]*\}|\b[A-Z]{2,}\b", "*", path).rstrip("/.")
            if wanted not in known and wanted != "/api/v1":
                problems.append(f"{code}: {path}")
    assert not problems, "\n".join(problems)


# ---- examples --------------------------------------------------------------------------------------------------------


def every_block(language: str) -> Iterable[tuple[Path, int, str]]:
    return [(page, line, dedent(text)) for page in PAGES for line, text in blocks(page, language)]


def wrong_call(call: ast.Call) -> str:
    """What a call of the SDK names that it does not take; "" if there is nothing, or it is no call of the SDK."""
    if not isinstance(call.func, ast.Attribute) or not isinstance(call.func.value, ast.Name):
        return ""
    owner = {"watch": Watch, "rankwatch": rankwatch}.get(call.func.value.id)
    if owner is None:
        return ""
    called = getattr(owner, call.func.attr, None)
    if called is None:
        return f"there is no {ast.unparse(call.func)}"
    try:
        given = [*([None] if owner is Watch else []), *call.args]
        inspect.signature(called).bind(*given, **{word.arg: None for word in call.keywords if word.arg})
    except TypeError as error:
        return f"{ast.unparse(call)}: {error}"
    return ""


def test_every_example_calls_the_sdk_as_it_is() -> None:
    problems = []
    for page, line, text in every_block("python"):
        calls = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Call)]
        found = [(call.lineno, wrong_call(call)) for call in calls]
        problems += [f"{page.name}:{line + offset - 1}: {wrong}" for offset, wrong in found if wrong]
    assert not problems, "\n".join(problems)


def test_every_example_in_json_can_be_parsed() -> None:
    assert all(json.loads(text) for _, _, text in every_block("json"))


def test_every_extra_that_is_installed_exists() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    problems = [
        str(code)
        for code in all_code()
        for names in re.findall(r"(?:rankwatch|'\.)\[([a-z,]+)\]", code.text)
        if not set(names.split(",")) <= set(extras)
    ]
    assert not problems, "\n".join(problems)


def test_the_policy_of_the_page_is_one_that_the_service_takes() -> None:
    ((_, _, text),) = [one for one in every_block("json") if one[0].name == "policy.md"]
    assert len(Policy.model_validate_json(text).rules) == 3


def test_the_batch_of_the_page_is_one_that_the_service_takes() -> None:
    ((_, _, text),) = [one for one in every_block("json") if one[0].name == "design.md"]
    assert from_json(msgspec.json.decode(text, type=JsonBatch)).steps.rows == 2


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_prose_is_wrapped_but_no_span_of_code(page: Path) -> None:
    lines = list(prose(page))
    problems = [f"{page.name}:{number}: wrap at {WIDTH}" for number, line in lines if len(line) > WIDTH]
    problems += [
        f"{page.name}:{number}: code goes on in the next line" for number, line in lines if line.count("`") % 2
    ]
    assert not problems, "\n".join(problems)


def test_the_threat_model_names_every_attack_that_is_tried() -> None:
    page = (ROOT / "docs" / "security.md").read_text()
    attacks = {str(path.relative_to(ROOT)) for path in (ROOT / "tests" / "attacks").glob("test_*.py")}
    assert attacks == set(re.findall(r"tests/attacks/test_\w+\.py", page))


def test_nothing_that_we_ship_unpickles_a_checkpoint() -> None:
    files = [path for kind in ("*.py", "*.md") for path in ROOT.rglob(kind) if ".venv" not in path.parts]
    calls = [(path, call) for path in files if path != Path(__file__) for call in LOAD.findall(path.read_text())]
    assert {path.name for path, _ in calls} >= {"train_gpt.py", "training.py", "ddp_loop.py", "sdk.md"}
    assert [(path, call) for path, call in calls if "weights_only=True" not in call] == []


ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs" / "architecture.md").read_text()
FUNCTIONS = re.findall(r"`((?:rankwatch|rankwatch_service|rankwatch_detectors)(?:\.\w+)+)`", TEXT)
PATHS = re.findall(r"`((?:collectors|detectors|service|docs|tests)/[\w./]+)`", TEXT)
HOPS_MAX = 18
FILES_MAX = 6


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_function_on_the_way_of_a_batch_exists(name):
    parts = name.split(".")
    module = next(length for length in range(len(parts), 0, -1) if is_defined(parts[:length]))
    found = importlib.import_module(".".join(parts[:module]))
    for part in parts[module:]:
        found = getattr(found, part)
    assert callable(found)


def is_defined(parts: list[str]) -> bool:
    path = ROOT / {"rankwatch": "collectors"}.get(parts[0], "service") / Path(*parts)
    return path.is_dir() or path.with_suffix(".py").is_file()


@pytest.mark.parametrize("path", sorted({path for path in PATHS if "NAME" not in path and "KIND" not in path}))
def test_a_path_exists(path):
    assert (ROOT / path.partition("…")[0]).exists()


@pytest.mark.parametrize(
    "folder", ["collectors/rankwatch", "detectors/rankwatch_detectors", "service/rankwatch_service"]
)
def test_each_package_is_named(folder):
    packages = [entry.name for entry in (ROOT / folder).iterdir() if (entry / "__init__.py").exists()]
    assert [name for name in packages if f"{name}/" not in TEXT] == []


def test_a_step_passes_no_more_functions_than_a_newcomer_can_follow():
    assert 0 < len(re.findall(r"^\| \d+ \| `", TEXT, re.MULTILINE)) <= HOPS_MAX


@pytest.mark.parametrize("recipe", re.split(r"^\*\*(?=A )", TEXT.partition("## How to add")[2], flags=re.MULTILINE)[1:])
def test_a_recipe_is_short(recipe):
    assert 0 < len(re.findall(r"^\d+\. ", recipe, re.MULTILINE)) <= FILES_MAX


PAGE = (Path(__file__).parents[2] / "docs" / "operations.md").read_text()


def section(title: str) -> str:
    """The text between a heading and the next."""
    return PAGE.partition(f"\n## {title}\n")[2].partition("\n## ")[0]


def first_column(title: str) -> list[str]:
    return re.findall(r"^\| `([^`]+)`", section(title), re.MULTILINE)


def test_every_setting_stands_in_the_table_and_nothing_else() -> None:
    assert sorted(first_column("Settings")) == sorted(f"RANKWATCH_{name.upper()}" for name in Settings.model_fields)


@pytest.mark.parametrize(
    ("name", "field"), [(f"RANKWATCH_{name.upper()}", field) for name, field in Settings.model_fields.items()]
)
def test_a_default_that_is_a_plain_value_is_the_one_of_the_page(name: str, field) -> None:
    (row,) = (line for line in section("Settings").splitlines() if line.startswith(f"| `{name}`"))
    default = row.split("|")[2].strip()
    if isinstance(field.default, bool | int) or (isinstance(field.default, str) and field.default):
        assert default == str(field.default).replace("True", "true").replace("False", "false")


def test_every_metric_of_the_real_page_is_explained_and_no_other(tmp_path: Path) -> None:
    with running_api(tmp_path) as api:
        text = api.get("/metrics").text
    real = re.findall(r"^# TYPE (\w+) ", text, re.MULTILINE)
    # With Kafka there are those of the producer besides.
    producer = Producer(KafkaSettings(f"127.0.0.1:{free_port()}"))
    real += [family.name for family in ProducerCollector(producer).collect()]
    producer.close(0.0)
    assert sorted(first_column("What each metric means")) == sorted(real)


@pytest.mark.parametrize("row", [line for line in section("Limits").splitlines() if line.startswith("| `")])
def test_a_limit_has_the_figure_and_the_place_that_the_page_gives(row: str) -> None:
    name, figure, place = (part.strip().strip("`") for part in row.split("|")[1:4])
    assert getattr(importlib.import_module(place), name) == int(figure)


def test_metrics_that_are_named_elsewhere_on_the_page_exist() -> None:
    assert set(re.findall(r"rankwatch_[a-z_]+_[a-z]+(?=`)", PAGE)) <= set(first_column("What each metric means")) | {
        "rankwatch_service"
    }
