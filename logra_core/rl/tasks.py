"""Problems with verifiable answers: any reasoning-gym dataset or mixture of them, and math with a gold answer.

What belongs here: loading, splitting, drawing and grading problems. The rules of equality are in answers.py, the bounded worker
processes in grader_pool.py. A task keeps no state between updates: the problems of an update are a function of the task's seed, the
run's seed and the update's number, so a resumed run sees what the unbroken one saw. Held-out problems are the same for every seed, and
none of their prompts is ever a training prompt.
"""

from __future__ import annotations

import codecs
import csv
import difflib
import hashlib
import json
import math
import os
import random
import re
import sys
from dataclasses import dataclass, field
from decimal import Decimal
from itertools import islice
from pathlib import Path
from typing import Callable, Iterator, Protocol

from tqdm.auto import tqdm

from ..settings import ConfigError
from .answers import NUMERIC, TEXT, bare, boxed_answer, final_answer, gold_parses_quickly, oracle_answer, quick_equal, same_number
from .grader_pool import GraderPool
from .settings import TaskConfig

HELDOUT_SHARE = 4  # one question in four, by the hash of its text, is held out
CHUNK = 64  # items per generated reasoning-gym dataset
MAX_BARREN_CHUNKS = 40  # chunks in a row without a usable item before a dataset counts as exhausted
SAMPLE = 6  # problems of a dataset that are graded at load
DECOYS = ("banana", "0", "nan", "True", "6*4*1*1")  # wrong nearly everywhere; some scorers of reasoning-gym 0.1.25 pay them
HEDGES = ("{} or 7", "{}, 7", "7 or {}", "{}\n7")  # the oracle's answer beside a guess: never right

# The questions of these follow Python's string hashing, so a new process would see other problems (measured on reasoning-gym 0.1.25).
HASH_DEPENDENT = frozenset("codeio isomorphic_strings list_functions polynomial_multiplication ransom_note".split())

# DAPO-Math-17k wraps every question in instructions to end with "Answer: ..."; here a box decides, so they go.
_DAPO = re.compile(
    r"^Solve the following math problem step by step\. The last line of your response should be of the form Answer: .*?\n\n(.*?)"
    r"\s*Remember to put your answer on its own line after \"Answer:\"\.\s*$",
    re.DOTALL,
)


@dataclass(frozen=True)
class Problem:
    """prompt: the user message. answer: the oracle's or gold answer. uid: the same for the same question, in every run."""

    prompt: str
    answer: str
    uid: str
    meta: dict = field(default_factory=dict)


@dataclass(frozen=True)
class Grade:
    """status: "correct" | "wrong" | "no_answer" | "timeout" | "grader_error"; only the first is correct."""

    correct: bool
    status: str


class Task(Protocol):
    """What the training loop needs of a task. counts: dropped and kept rows at load."""

    name: str
    system_prompt: str | None
    counts: dict

    def train(self, update: int, n: int, seed: int) -> list[Problem]: ...
    def heldout(self, n: int) -> list[Problem]: ...
    def grade(self, responses: list[str], problems: list[Problem]) -> list[Grade]: ...
    def close(self) -> None: ...


def make_task(cfg: TaskConfig) -> Task:
    """The task that `cfg.name` asks for; `ConfigError` if there is none, or its data or oracle fails the check at load."""
    return MathTask(cfg) if cfg.name == "math" else GymTask(cfg)


def messages(problem: Problem) -> list[dict]:
    """Chat messages for `tokenizer.apply_chat_template`; without a system prompt of ours, the template's default stands."""
    system = problem.meta.get("system_prompt")
    return ([{"role": "system", "content": system}] if system else []) + [{"role": "user", "content": problem.prompt}]


def _digest(*values: object) -> int:
    return int.from_bytes(hashlib.sha256("\0".join(map(str, values)).encode()).digest()[:8], "big")


def _question_key(text: str) -> str:
    return " ".join(text.split())


def _positions(update: int, n: int) -> range:
    if update < 0 or n < 0:
        raise ValueError(f"train: update {update} and n {n} must both be >= 0")
    return range(update * n, update * n + n)


class _TaskBase:
    """A subclass gives `kind`, that of its workers' jobs, and `_verdict(response, problem)` -> a status, or the arguments of a job."""

    kind = ""

    def __init__(self, cfg: TaskConfig) -> None:
        self.cfg, self.name, self.system_prompt = cfg, cfg.name, cfg.system_prompt or None
        self.counts: dict[str, int] = {}
        self._pool = GraderPool(self.kind, cfg.grader_workers, cfg.grader_seconds)

    def _problem(self, question: str, answer: str, source: str, **meta) -> Problem:
        prompt = f"{question}\n{self.cfg.instruction}" if self.cfg.instruction else question
        uid = f"{source}:{_digest(_question_key(question)):016x}"
        return Problem(prompt, answer, uid, {"system_prompt": self.system_prompt, **meta})

    def grade(self, responses: list[str], problems: list[Problem]) -> list[Grade]:
        """One grade a response, in order. Never raises for what a response says."""
        if len(responses) != len(problems):
            raise ValueError(f"grade: {len(responses)} responses for {len(problems)} problems")
        statuses = [self._verdict(response, problem) for response, problem in zip(responses, problems)]
        jobs = {i: verdict for i, verdict in enumerate(statuses) if isinstance(verdict, tuple)}
        for i, status in zip(jobs, self._pool.run(list(jobs.values()))):
            statuses[i] = status
        return [Grade(status == "correct", status) for status in statuses]

    def close(self) -> None:
        """Stop the grader processes; a later `grade` starts new ones."""
        self._pool.close()


# ---------------------------------------------------------------- reasoning-gym


class GymTask(_TaskBase):
    """reasoning-gym. Equal shares of the datasets named; graded exactly, or by a dataset's own scorer where that says 1 and not less.

    Datasets with the library's base scorer (which pays part for a wrong answer) and number tasks are compared here; own scorers, which may
    evaluate what the model wrote, run in worker processes. Raises `ConfigError` for an unknown name or option, an oracle that fails, or a
    scorer that pays wrong answers.
    """

    kind = "gym"

    def __init__(self, cfg: TaskConfig) -> None:
        super().__init__(cfg)
        import reasoning_gym
        from reasoning_gym.dataset import ProceduralDataset
        from reasoning_gym.factory import DATASETS

        self._create, self.parts = reasoning_gym.create_dataset, cfg.name.split("+")
        self._check_names(sorted(set(DATASETS) - {"composite"}))
        self.options = {self.parts[0]: cfg.options} if len(self.parts) == 1 else cfg.options
        if set(self.options) - set(self.parts) or not all(isinstance(v, dict) for v in self.options.values()):
            raise ConfigError(f"TaskConfig.options = {cfg.options!r}: a mixture takes {{dataset name: dict}} for {', '.join(self.parts)}")
        for name, options in self.options.items():
            allowed = sorted(set(DATASETS[name][1].__dataclass_fields__) - {"seed", "size"})
            if unknown := sorted(set(options) - set(allowed)):
                raise ConfigError(f"TaskConfig.options: {name} has no option {', '.join(unknown)}; allowed: {', '.join(allowed)}")
        self._exact = {n for n in self.parts if n in NUMERIC | TEXT or DATASETS[n][0].score_answer is ProceduralDataset.score_answer}
        self._heldout: list[Problem] = []
        self._self_test()

    def _check_names(self, known: list[str]) -> None:
        here = f"TaskConfig.name = {self.name!r}"
        for name in self.parts:
            if self.parts.count(name) > 1:
                raise ConfigError(f"{here}: {name!r} is there twice")
            if name not in known:
                close = ", ".join(difflib.get_close_matches(name, known + ["math"], n=5, cutoff=0.4)) or "none"
                allowed = "math, a reasoning-gym dataset, or several of these datasets joined by +"
                raise ConfigError(f"{here}: no task {name!r}; close matches: {close}. Allowed: {allowed}")
            if name in HASH_DEPENDENT and sys.flags.hash_randomization:
                raise ConfigError(f"{here}: the questions of {name} follow Python's string hashing; start Python with PYTHONHASHSEED=0")

    def _self_test(self) -> None:
        for j, name in enumerate(self.parts):
            problems = list(islice(self._stream(j, ("self-test",), None), SAMPLE))
            answers = [p.answer for p in problems] + [f"<answer>\n{p.answer}</answer>" for p in problems]
            grades = self.grade(answers, problems * 2)
            if bad := [f"{a!r}: {g.status}" for a, g in zip(answers, grades) if not g.correct]:
                raise ConfigError(f"TaskConfig.name = {self.name!r}: oracle answers of {name} are not graded correct: {'; '.join(bad[:3])}")
            if name not in self._exact:
                self._test_decoys(name, problems)

    def _test_decoys(self, name: str, problems: list[Problem]) -> None:
        """ConfigError if one and the same answer is paid for most of the problems, and is not the oracle's for most (as a Yes may be), or
        if an oracle's answer is paid with a guess beside it, a digit less or a sign before it."""
        decoys = list(dict.fromkeys([*DECOYS, *(p.answer for p in problems)]))
        grades = iter(self.grade([d for d in decoys for _ in problems], problems * len(decoys)))
        for decoy in decoys:
            paid = sum(next(grades).correct for _ in problems)
            own = sum(decoy.casefold() == p.answer.casefold() or same_number(decoy, p.answer) for p in problems)
            if paid > len(problems) / 2 >= own:
                counts = f"{paid} of {len(problems)} problems, where it is the oracle's answer to {own}"
                raise ConfigError(f"TaskConfig.name = {self.name!r}: the scorer of {name} pays one answer, {decoy!r}, for {counts}")
        # a sign may be right by chance (-0, an integral's constant), a guess or a cut number never
        spoilt = [(hedge.format(p.answer), p, 0) for hedge in HEDGES for p in problems]
        spoilt += [(re.sub(r"(\.\d*)[1-9](?!\d)", r"\1", p.answer), p, 0) for p in problems if re.search(r"\.\d*[1-9](?!\d)", p.answer)]
        spoilt += [(f"-{p.answer}", p, len(problems) / 2) for p in problems]
        paid = [one for one, grade in zip(spoilt, self.grade([s[0] for s in spoilt], [s[1] for s in spoilt])) if grade.correct]
        for answer, problem, chance in paid:
            if sum(limit == chance for _, _, limit in paid) > chance:
                why = f"pays {answer!r}, where the oracle's answer is {problem.answer!r}"
                raise ConfigError(f"TaskConfig.name = {self.name!r}: the scorer of {name} {why}")

    def _stream(self, j: int, key: tuple, heldout: bool | None) -> Iterator[Problem]:
        """Problems of dataset j, endless, fixed by `key`; those held out, those not, or all (None). ConfigError when nothing comes."""
        name, chunk, barren = self.parts[j], 0, 0
        while barren < MAX_BARREN_CHUNKS:
            try:
                data = self._create(name, seed=_digest(name, chunk, *key) >> 33, size=CHUNK, **self.options.get(name, {}))
            except (AssertionError, ValueError, TypeError) as error:
                raise ConfigError(f"TaskConfig.options = {self.options.get(name)!r}: {name} refuses them: {error}") from error
            chunk, barren = chunk + 1, barren + 1
            for i in range(CHUNK):
                entry = data[i]
                answer, held = oracle_answer(entry), _digest("held out", _question_key(entry["question"])) % HELDOUT_SHARE == 0
                if answer and answer.strip() and heldout in (None, held):
                    yield self._problem(entry["question"], answer, name, dataset=name, entry=entry)
                    barren = 0
        options = self.options.get(name, {})
        raise ConfigError(f"TaskConfig.name = {self.name!r}: {name} with options {options!r} has too few questions with an oracle answer")

    def train(self, update: int, n: int, seed: int) -> list[Problem]:
        """n problems of an update (an integer from 0); questions may recur between updates."""
        streams = [self._stream(j, ("train", self.cfg.seed, seed, update), False) for j in range(len(self.parts))]
        return [next(streams[i % len(streams)]) for i in _positions(update, n)]

    def heldout(self, n: int) -> list[Problem]:
        """The first n of the fixed held-out problems, drawn as training ones are: in a small space of questions some recur."""
        if len(self._heldout) < n:
            streams = [self._stream(j, ("heldout",), True) for j in range(len(self.parts))]
            self._heldout = [next(streams[i % len(streams)]) for i in range(n)]
        return self._heldout[:n]

    def _verdict(self, response: str, problem: Problem) -> str | tuple:
        answer, name = final_answer(response), problem.meta["dataset"]
        if answer is None:
            return "no_answer"
        forms = list(dict.fromkeys([answer, bare(answer)]))
        if name not in self._exact:
            return name, self.options.get(name, {}), forms, problem.meta["entry"]
        gold = problem.answer.strip()
        equal = gold in forms or (name in NUMERIC and same_number(answer, gold))
        return "correct" if equal else "wrong"


# ---------------------------------------------------------------- math


def _read_json(path: str) -> Iterator[dict]:
    """Rows of a JSON Lines file, or of one JSON list. Numbers stay the text that they are in the file: a column of one type, as the readers
    of `datasets` make it, turns 20! into a float and dates into timestamps. ConfigError naming the row that cannot be read."""
    as_text = {"parse_int": str, "parse_float": str, "parse_constant": lambda name: None}
    with open(path, "rb") as file:
        start = file.read(64).removeprefix(codecs.BOM_UTF8).lstrip()
        file.seek(0)
        row = 0
        try:
            if start.startswith(b"["):
                rows = json.loads(file.read().decode("utf-8-sig"), **as_text)
                for row, value in enumerate(rows, 1):
                    yield _row(value)
                return
            for row, line in enumerate(file, 1):
                if line.strip():
                    yield _row(json.loads(line.decode("utf-8-sig" if row == 1 else "utf-8"), **as_text))
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"{path}, {f'row {row}' if row else 'no row'}: {error}") from error


def _row(value: object) -> dict:
    if not isinstance(value, dict):
        raise ValueError(f"a row must be a JSON object, not {json.dumps(value)[:60]}")
    return value


def _read_csv(path: str, delimiter: str) -> Iterator[dict]:
    with open(path, encoding="utf-8-sig", newline="") as file:
        reader = csv.DictReader(file, delimiter=delimiter)
        try:
            yield from reader
        except (ValueError, csv.Error) as error:
            raise ConfigError(f"{path}, row {reader.line_num + 1}: {error}") from error


def _load_rows(source: str, which: str, splits: tuple[str, ...]) -> tuple[list[str], int, Callable[[list[str]], Iterator[dict]]]:
    """(columns, number of rows, function of column names -> the rows with these) of a local .jsonl / .json / .parquet file, a folder, or a hub
    id; ConfigError saying what was tried, or the file, the row and the cause."""
    import datasets

    def pick(named: dict):
        return named[next((s for s in splits if s in named), next(iter(named)))]

    path, here = Path(source).expanduser(), f"TaskConfig.{which} = {source!r}"
    if path.is_file() and path.suffix not in (".jsonl", ".json", ".parquet"):
        raise ConfigError(f"{here}: allowed file types are .jsonl, .json, .parquet")
    try:
        rows = None
        if path.suffix in (".jsonl", ".json") and path.is_file():
            rows = list(_read_json(str(path)))
        elif path.is_file():
            table = datasets.load_dataset("parquet", data_files=str(path), split="train")
        elif any((path / f).is_file() for f in ("state.json", "dataset_dict.json")):
            table = datasets.load_from_disk(str(path))
        else:
            builder = datasets.load_dataset_builder(str(path) if path.is_dir() else source)
            kind = type(builder.config).__name__  # of files that hold text, the text is read here, not by column types
            if kind in ("JsonConfig", "CsvConfig"):
                files = datasets.DownloadManager().download_and_extract(list(pick(builder.config.data_files)))
                rows = [r for f in files for r in (_read_json(f) if kind == "JsonConfig" else _read_csv(f, builder.config.sep))]
            else:
                builder.download_and_prepare()
                table = builder.as_dataset()
    except ConfigError as error:
        raise ConfigError(f"{here}: {error}") from error
    except Exception as error:
        tried = "cannot be read" if path.is_file() else "no local file or folder, and not loadable as a hub id"
        raise ConfigError(f"{here}: {tried} ({error.__cause__ or error})") from error
    if rows is not None:
        return list(dict.fromkeys(name for row in rows for name in row)), len(rows), lambda names: iter(rows)
    table = pick(table) if isinstance(table, dict) else table
    return table.column_names, len(table), lambda names: (row for batch in table.select_columns(names).iter(1000) for row in _unbatched(batch))


def _unbatched(batch: dict) -> Iterator[dict]:
    return (dict(zip(batch, values)) for values in zip(*batch.values()))


def _question(value) -> str:
    """The question's text out of a string or a list of chat messages (DAPO), without DAPO's wrapper."""
    if isinstance(value, list):
        value = next((m["content"] for m in reversed(value) if m.get("role") == "user"), "")
    return _DAPO.sub(r"\1", str(value or "")).strip()


def _gold(value) -> str:
    """The gold answer out of a value, a reward_model dict (DAPO), a solution with a box, or `... #### 18` (GSM8K); "" if it cannot be read.

    A number (of a Parquet file) is written out exactly, without an exponent.
    """
    if isinstance(value, dict):
        value = value.get("ground_truth")
    if isinstance(value, bool):
        value = str(value)
    if isinstance(value, float):
        value = f"{Decimal(repr(value)):f}" if math.isfinite(value) else None
    if value is None or isinstance(value, (list, dict, bytes)):
        return ""
    text = str(value).rsplit("####", 1)[-1].strip()
    return (boxed_answer(text) or "") if re.search(r"\\(?:boxed|fbox)", text) else text


def _is_unicode(text: str) -> bool:
    """False for half a surrogate pair, which JSON can escape, but which no tokenizer or hash can take."""
    return not re.search("[\ud800-\udfff]", text)


class MathTask(_TaskBase):
    """Math with a gold answer: cfg.train_data to draw from, cfg.eval_data held out. The last \\boxed{} of a response decides.

    At load: one row a distinct question; questions with different golds, golds that do not parse and training questions that are held
    out are dropped; `empty` counts rows without a readable question and answer.
    counts: {train,eval}_{rows,duplicates,empty,gold_conflicts,kept}, gold_unparseable, train_in_eval.
    """

    kind = "math"

    def __init__(self, cfg: TaskConfig) -> None:
        super().__init__(cfg)
        if cfg.options:
            raise ConfigError(f"TaskConfig.options = {cfg.options!r}: the math task has no options")
        self.counts.update(gold_unparseable=0, train_in_eval=0)
        golds = {"train": self._read("train", ("train",)), "eval": self._read("eval", ("test", "validation", "train"))}
        for key in golds["train"].keys() & golds["eval"].keys():
            del golds["train"][key]
            self.counts["train_in_eval"] += 1
        self._problems = {}
        for which, rows in golds.items():
            doubtful = [key for key, (_, gold) in rows.items() if not gold_parses_quickly(gold)]
            for key, status in zip(doubtful, self._pool.run([(rows[key][1], None) for key in doubtful])):
                if status != "correct":
                    del rows[key]
                    self.counts["gold_unparseable"] += 1
            self.counts[which + "_kept"] = len(rows)
            if not rows:
                raise ConfigError(f"TaskConfig.{which}_data: no usable problem is left; counts: {self.counts}")
            self._problems[which] = [self._problem(question, gold, "math") for question, gold in rows.values()]
        random.Random(0).shuffle(self._problems["eval"])  # so that a part of it is a fair sample of files sorted by subject

    def _read(self, which: str, splits: tuple[str, ...]) -> dict[str, tuple[str, str]]:
        """Distinct questions of one source: text without regard to white space -> (question, gold)."""
        source, name = getattr(self.cfg, which + "_data"), which + "_data"
        columns, total, read = _load_rows(source, name, splits)
        prompt = next((c for c in (self.cfg.prompt_field, "problem", "question", "prompt") if c in columns), None)
        answer = next((c for c in (self.cfg.answer_field, "answer", "reward_model", "ground_truth", "solution") if c in columns), None)
        if prompt is None or answer is None:
            raise ConfigError(f"TaskConfig.{name} = {source!r}: prompt_field and answer_field must be two of {', '.join(columns)}")
        found: dict[str, tuple[str, str]] = {}
        empty, conflicts, rows = 0, set(), 0
        for row in tqdm(read(list({prompt, answer})), total=total, desc=f"read {os.path.basename(source)}", disable=total < 100_000):
            question, gold, rows = _question(row.get(prompt)), _gold(row.get(answer)), rows + 1
            if not question or not gold or not _is_unicode(question + gold):
                empty += 1
            elif found.setdefault(key := _question_key(question), (question, gold))[1] != gold:
                conflicts.add(key)
        self.counts.update({f"{which}_rows": rows, f"{which}_empty": empty, f"{which}_gold_conflicts": len(conflicts)})
        self.counts[f"{which}_duplicates"] = rows - empty - len(found)
        return {key: row for key, row in found.items() if key not in conflicts}

    def train(self, update: int, n: int, seed: int) -> list[Problem]:
        """n problems of an update (an integer from 0): consecutive pieces of one shuffle per epoch, so n must stay the same in a run."""
        pool, size = self._problems["train"], len(self._problems["train"])
        places = [divmod(position, size) for position in _positions(update, n)]
        seeds = {epoch: _digest("train", self.cfg.seed, seed, epoch) for epoch, _ in places}
        orders = {epoch: random.Random(value).sample(range(size), size) for epoch, value in seeds.items()}
        return [pool[orders[epoch][place]] for epoch, place in places]

    def heldout(self, n: int) -> list[Problem]:
        """The first n of the fixed order of eval_data; all of it if it has fewer."""
        return self._problems["eval"][:n]

    def _verdict(self, response: str, problem: Problem) -> str | tuple:
        answer = boxed_answer(response)
        if answer is None:
            return "no_answer"
        verdict = quick_equal(problem.answer, answer)
        return (problem.answer, answer) if verdict is None else "correct" if verdict else "wrong"
