"""Tasks: drawing, splitting, settings, reasoning-gym grading and math data. Math answers are tested in test_answers.py.

The numbers in the test names are those of the reported faults of other projects that each check guards against.
"""

import json
import os
import re
import subprocess
import sys
from datetime import date
from decimal import Decimal
from itertools import islice
from pathlib import Path

import pytest

os.environ["HF_HUB_OFFLINE"] = "1"

from logra_core.rl import tasks  # noqa: E402
from logra_core.rl.answers import final_answer, gym_job, number, oracle_answer  # noqa: E402
from logra_core.rl.settings import TaskConfig  # noqa: E402
from logra_core.rl.tasks import Problem, make_task, messages  # noqa: E402
from logra_core.settings import ConfigError  # noqa: E402

ROOT = Path(__file__).resolve().parent.parent
TWO_TERMS = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 2}


def problem(answer, **meta):
    return Problem("q", answer, "u", meta)


def write_rows(path, rows):
    path.write_text("".join(json.dumps(r) + "\n" for r in rows))
    return str(path)


@pytest.fixture(scope="module")
def chain():
    task = make_task(TaskConfig(name="chain_sum", options=TWO_TERMS))
    yield task
    task.close()


# ---------------------------------------------------------------- drawing and splitting


def test_train_is_a_function_of_seeds_and_update(chain):
    again = make_task(TaskConfig(name="chain_sum", options=TWO_TERMS))
    assert [chain.train(u, 8, 1) for u in (5, 2)] == [again.train(u, 8, 1) for u in (5, 2)]
    draws = [chain.train(2, 8, 1), chain.train(3, 8, 1), chain.train(2, 8, 2)]
    draws.append(make_task(TaskConfig(name="chain_sum", options=TWO_TERMS, seed=1)).train(2, 8, 1))
    prompts = [tuple(p.prompt for p in d) for d in draws]
    assert len(set(prompts)) == 4


def test_train_is_the_same_in_another_process(chain):
    code = f"""
from logra_core.rl.settings import TaskConfig; from logra_core.rl.tasks import make_task
print([p.prompt for p in make_task(TaskConfig(name="chain_sum", options={TWO_TERMS!r})).train(7, 5, 3)])"""
    env = dict(os.environ, PYTHONHASHSEED="77", PYTHONPATH=str(ROOT))
    out = subprocess.run([sys.executable, "-c", code], env=env, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert out.strip() == str([p.prompt for p in chain.train(7, 5, 3)])


def test_heldout_is_fixed_and_never_trained_on(chain):
    held = chain.heldout(500)
    assert chain.heldout(128) == held[:128] == make_task(TaskConfig(options=TWO_TERMS, seed=9)).heldout(128)
    assert len({p.prompt for p in held[:128]}) > 80
    trained = [p for u in range(400) for p in chain.train(u, 48, 0)]
    assert len({p.prompt for p in trained}) > 5000  # a good part of all that there are
    assert not {p.prompt for p in trained} & {p.prompt for p in chain.heldout(2000)}
    one_digit = [sum(p.meta["entry"]["metadata"]["num_digits"] == 1 for p in ps) / len(ps) for ps in (held, trained)]
    assert abs(one_digit[0] - one_digit[1]) < 0.1, f"held-out problems must be as hard as those trained on: {one_digit}"


def test_no_question_left_is_an_error(monkeypatch):
    task = make_task(TaskConfig(options={"min_terms": 1, "max_terms": 1, "min_digits": 1, "max_digits": 1}))  # ten questions
    monkeypatch.setattr(tasks, "HELDOUT_SHARE", 10**9)
    with pytest.raises(ConfigError, match="too few questions"):
        task.heldout(1)


def test_mixture_takes_equal_shares_and_grades_each_by_its_own_rule():
    task = make_task(TaskConfig(name="gcd+caesar_cipher+chain_sum", options={"chain_sum": TWO_TERMS}))
    problems = task.train(1, 10, 0)
    assert sorted(sum(p.meta["dataset"] == n for p in problems) for n in task.parts) == [3, 3, 4]
    assert all(g.correct for g in task.grade([p.answer for p in problems], problems))
    assert not any(g.correct for g in task.grade([p.answer + "1" for p in problems], problems))


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"name": "chain_sun"}, "close matches: chain_sum"),
        ({"name": "gcd+mth"}, "'mth'"),
        ({"name": "gcd+gcd"}, "twice"),
        ({"name": "math+gcd"}, "no task 'math'"),
        ({"options": {"terms": 2}}, "no option terms; allowed: .*max_terms"),
        ({"options": {"seed": 2}}, "no option seed"),
        ({"options": {"min_terms": 5, "max_terms": 2}}, "refuses"),
        ({"name": "gcd+lcm", "options": {"min_numbers": 2}}, "mixture takes"),
        ({"name": "boxnet"}, "oracle answer"),  # gives none: nothing to check its scorer with
        ({"name": "math", "train_data": "nowhere/at_all"}, "train_data = 'nowhere/at_all'"),
        ({"name": "math", "options": {"a": 1}}, "no options"),
    ],
)
def test_bad_settings_are_refused_at_load(fields, message):
    with pytest.raises(ConfigError, match=message):
        make_task(TaskConfig(**fields))


def test_hash_dependent_datasets_are_refused_unless_hashing_is_fixed():
    code = "from logra_core.rl.settings import TaskConfig; from logra_core.rl.tasks import make_task; make_task(TaskConfig(name='ransom_note'))"
    env = dict(os.environ, PYTHONPATH=str(ROOT))
    random_, fixed = (
        subprocess.run([sys.executable, "-c", code], env={**env, "PYTHONHASHSEED": seed}, cwd=ROOT, capture_output=True, text=True)
        for seed in ("random", "0")
    )
    assert fixed.returncode == 0 and "PYTHONHASHSEED" in random_.stderr


def test_oracle_self_test_finds_a_scorer_that_refuses_its_own_answers(monkeypatch):
    from reasoning_gym.arithmetic.gcd import GCDDataset

    real = GCDDataset.__getitem__
    monkeypatch.setattr(GCDDataset, "__getitem__", lambda self, i: {**real(self, i), "answer": "<answer>"})
    with pytest.raises(ConfigError, match="oracle answers of gcd are not graded correct"):
        make_task(TaskConfig(name="gcd"))


@pytest.mark.parametrize(
    "name, decoy",
    [("game_of_life_halting", "banana"), ("puzzle24", r"6\*4\*1\*1"), ("coin_flip", "0"), ("complex_arithmetic", "banana|nan|0|True")],
)
def test_self_test_finds_a_scorer_that_pays_wrong_answers(name, decoy):
    with pytest.raises(ConfigError, match=f"scorer of {name} pays one answer, '({decoy})'"):
        make_task(TaskConfig(name="gcd+" + name))


def test_self_test_accepts_an_answer_that_is_right_for_most_problems(monkeypatch):
    from reasoning_gym.games.countdown import CountdownDataset

    make_task(TaskConfig(name="syllogism")).close()  # Yes or No
    real = CountdownDataset.__getitem__
    monkeypatch.setattr(CountdownDataset, "__getitem__", lambda self, i: real(self, 0))  # one question, one right answer
    make_task(TaskConfig(name="countdown")).close()


@pytest.mark.parametrize(
    "pays, decoy",
    [
        (lambda answer, gold: gold in answer, "0.980 or 7"),
        (lambda answer, gold: answer.lstrip("-") == gold.lstrip("-"), "-0.980"),
        (lambda answer, gold: gold.startswith(answer), "0.98"),
    ],
)
def test_self_test_finds_a_scorer_that_pays_a_guess_a_sign_or_a_cut_number(monkeypatch, pays, decoy):
    verdict = lambda self, answer, problem: "correct" if pays(final_answer(answer), problem.answer) else "wrong"  # noqa: E731
    monkeypatch.setattr(tasks.GymTask, "_verdict", verdict)
    with pytest.raises(ConfigError, match="scorer of advanced_geometry pays .*, where the oracle's answer is"):
        make_task(TaskConfig(name="advanced_geometry"))


def _spoilt(name, gold):
    """Answers that are wrong, though the dataset's own scorer pays some: the oracle's with a guess, a sign, fewer digits, or more."""
    made = [gold + " or 7", "7 or " + gold, gold + ", 7", gold + "\n7", f"{gold} or {gold}"]
    made += [f"I think {gold}", f"{gold} not", f"({gold})!"]
    if name in ("kakurasu", "quantum_lock", "sokoban", "tower_of_hanoi", "number_sorting", "time_intervals"):
        made.append("-" + gold)
    made.append(re.sub(r"(\.\d*)[1-9](?!\d)", r"\1", gold))
    if name == "graph_color":
        made += [gold[:-1] + ', "99": 1}', '{"0": 9, ' + gold[1:]]
    return [answer for answer in made if answer != gold]


LENIENT = (
    "advanced_geometry countdown fraction_simplification graph_color intermediate_integration kakurasu knights_knaves number_sorting "
    "polynomial_multiplication power_function quantum_lock rubiks_cube simple_integration sokoban time_intervals tower_of_hanoi word_sorting"
)


@pytest.mark.parametrize("name", LENIENT.split())
def test_lenient_scorers_see_only_answers_of_the_form_asked_for(name):
    import reasoning_gym

    for entry in islice(reasoning_gym.create_dataset(name, seed=11, size=8), 8):
        gold = oracle_answer(entry)
        assert gym_job(name, {}, [gold], entry) == "correct"
        paid = [answer for answer in _spoilt(name, gold) if gym_job(name, {}, [answer], entry) == "correct"]
        assert paid == [], f"where the oracle's answer is {gold!r}"


@pytest.mark.parametrize(
    "name, gold, metadata, right, wrong",
    [
        ("countdown", None, {"numbers": [3, 4, 5], "target": 17}, ["3*4+5", "5 + (4*3)"], ["3*4+5*1", "(3**1)*4+5", "3!+4+7"]),
        ("countdown", None, {"numbers": [3, 4, 5], "target": 15}, [], ["3!+4+5", "3! + 5 + 4"]),
        ("graph_color", '{"0": 1, "1": 2}', {"puzzle": {"vertices": [0, 1], "edges": [(0, 1)], "color_options": [1, 2]}},
         ['{"1": 1, "0": 2}'], ['{"0": 1}', '{"0": 1, "1": 1}', '{"0": 1, "1": 2, "2": 1}', '{"0": 1, "1": 1, "1": 2}', "[]", "{"]),
        ("number_sorting", "['-1.5', '2.0', '3']", {"direction": "ascending"},
         ['["-1.5", "2.0", "3"]', "[-1.5, 2, 3]"], ["['-1.0', '2.0', '3']", "['-1.5', '2.0', '3', '3']", "['-1.5', '2.0']", "-1.5 2.0 3"]),
        ("power_function", "6769988418200343.0", {}, ["6.77e+15", "6.77E15", "6769988418200343.0"], ["6.7651e15", "6.76e15", "6.77e+14", "6.77"]),
        ("time_intervals", "99 days", {"task_type": "date"}, ["99 days", "99"], ["99 days, 12:00", "99 days or 98", "98 days", "99.5 days"]),
        ("time_intervals", "01:45:29.050", {"task_type": "time_ms"}, ["1:45:29.050"], ["01:45:29.50", "01:45:29", "01:45:29.051"]),
        ("time_intervals", "67 days, 01:04", {"task_type": "datetime"}, ["67 days, 1:04"], ["67 days, 01:04, 7", "67 days", "67 days, 01:05"]),
        ("knights_knaves", "Liam is a sage, and Ella is a fool.", {},
         ["Ella is a fool and Liam is a sage", "liam is a sage. Ella is a fool"],
         ["Liam is a sage", "Liam is a sage, and Ella is a sage, or a fool."]),
        ("advanced_geometry", "(6.073, -2.122)", {"task_type": "orthocenter", "ortho": ("6.073", "-2.122")},
         ["(6.073, -2.122)", "6.073, -2.122"], ["(6.073, -2.122), (1, 2)", "(6.073, -2.122, 5)", "(-2.122, 6.073)"]),
        ("fraction_simplification", r"$\frac{46}{81}$",
         {"simplified_numerator": 46, "simplified_denominator": 81, "numerator": 92, "denominator": 162},
         ["46/81", r"\frac{46}{81}", r"$\dfrac{46}{81}$"], ["92/162", r"\frac{46}{81}3", "-46/81", r"\frac{46}{8}1"]),
        ("quantum_lock", "A → B", {}, ["A -> B", "a → b"], ["AB, or B", "A → B → ?", "A or B"]),
        ("simple_integration", "x**2/2 + C", {"variable": "x", "integrand": "x"},
         ["x**2/2", "0.5*x**2 + C", "(x**2)/2 + 5"], ["x**2/2 + C or 7", "x**2/2 + C if True else 0", "x**2/2 or x**2", "x**2"]),
    ],
)  # fmt: skip
def test_right_answers_in_other_words_pay_and_near_ones_do_not(name, gold, metadata, right, wrong):
    entry = {"answer": gold, "metadata": {"example_answer": gold, **metadata}}
    assert {a: gym_job(name, {}, [a], entry) for a in right} == {a: "correct" for a in right}
    assert "correct" not in {gym_job(name, {}, [a], entry) for a in wrong}, {a: gym_job(name, {}, [a], entry) for a in wrong}


def test_messages_and_instruction():
    task = make_task(TaskConfig(system_prompt="Be brief.", instruction="Answer with a number only.", options=TWO_TERMS))
    p = task.train(0, 1, 0)[0]
    assert p.prompt.endswith("=\nAnswer with a number only.")
    assert messages(p) == [{"role": "system", "content": "Be brief."}, {"role": "user", "content": p.prompt}]
    assert messages(make_task(TaskConfig()).train(0, 1, 0)[0])[0]["role"] == "user"


def test_as_many_responses_as_problems(chain):
    with pytest.raises(ValueError, match="2 responses for 1 problems"):
        chain.grade(["1", "2"], chain.heldout(1))


# ---------------------------------------------------------------- reasoning-gym answers


@pytest.mark.parametrize(
    "response, status",
    [
        ("19", "correct"),
        (" 19.\n", "correct"),
        ("$19$", "correct"),
        (r"\boxed{19}", "correct"),
        ("**19**", "correct"),
        ("`19`", "correct"),
        ("```\n19\n```", "correct"),
        ("19.0", "correct"),
        ("1.9e1", "correct"),
        ("- 19", "wrong"),
        ("+019", "correct"),
        ("12 + 7 = 19", "correct"),
        ("12 + 7 = **19**.", "correct"),
        ("The final answer is: **19**", "correct"),
        ("The answer to this problem is 19.", "correct"),
        ("<answer>19</answer>", "correct"),
        ("thus <answer> 12 + 7 = 19 </answer> done", "correct"),
        ("<think>18?</think>19", "correct"),
        ("-19", "wrong"),
        ("190", "wrong"),
        ("1 9", "wrong"),
        ("1_9", "wrong"),
        ("17 18 19", "wrong"),  # no number is searched for in lists of guesses ...
        ("19 is the answer", "wrong"),  # ... nor in prose
        ("The answer is 18 or 19", "wrong"),
        ("The answer is 19. Or is it 20?", "wrong"),
        ("This 19", "wrong"),
        ("18, 19", "wrong"),
        ("12 + 7 = 18, or = 19, or = 20", "wrong"),
        ("12 + 7 = 18 or 19", "wrong"),
        ("19 = 12 + 7", "wrong"),
        ("<answer>19</answer><answer>20</answer>", "wrong"),
        ("<answer></answer>", "no_answer"),
        ("", "no_answer"),
        ("<answer>19", "no_answer"),
        ("<think>so <answer>19</answer>", "no_answer"),
    ],
)
def test_number_answers_strict_and_fair(chain, response, status):
    assert chain.grade([response], [problem("19", dataset="chain_sum")])[0].status == status


def test_fault_13_partial_credit_never_pays():
    task = make_task(TaskConfig(name="gcd+lcm"))
    gold = [problem(a, dataset=d) for a, d in (("2", "gcd"), ("2", "gcd"), ("858", "lcm"), ("2", "gcd"), ("2", "gcd"))]
    assert [g.status for g in task.grade(["12", "1 2 3", "1858", " 2", "2"], gold)] == ["wrong"] * 3 + ["correct"] * 2
    text = make_task(TaskConfig(name="caesar_cipher"))
    p = text.train(0, 1, 0)[0]
    assert [g.correct for g in text.grade([p.answer + " X", p.answer.lower(), f" {p.answer}\n"], [p] * 3)] == [False, False, True]


def test_numbers_whose_own_scorers_allow_an_error_are_compared_exactly():
    task = make_task(TaskConfig(name="decimal_arithmetic+number_format+letter_jumble"))
    decimal, large, words = "7.4534002448", "268995695.594", "Most people start"
    cases = [(decimal, "7.4534", False), (decimal, "7.45340024480", True), (large, "2.689956955940000e+08", True)]
    cases += [(large, "268,995,695.594", True), (large, "268995695.595", False), (large, "-268995695.594", False)]
    cases += [(words, words + " or 7", False), (words, f" {words}\n", True)]
    names = ["decimal_arithmetic"] * 2 + ["number_format"] * 4 + ["letter_jumble"] * 2
    grades = task.grade([a for _, a, _ in cases], [problem(g, dataset=n) for n, (g, _, _) in zip(names, cases)])
    assert [g.correct for g in grades] == [right for _, _, right in cases]


def test_fault_14_scorers_that_raise_are_counted_and_the_rest_goes_on():
    task = make_task(TaskConfig(name="prime_factorization+game_of_life+countdown"))
    a, b, c = task.train(0, 3, 0)
    grades = task.grade(["garbage", "{}", "(((", a.answer, b.answer, c.answer], [a, b, c, a, b, c])
    assert [g.status for g in grades[:2]] == ["grader_error"] * 2 and not grades[2].correct
    assert all(g.correct for g in grades[3:])
    task.close()


def test_fault_16_last_complete_tag_wins(chain):
    assert chain.grade(["- 4"], [problem("-4", dataset="chain_sum")])[0].correct
    assert chain.grade(["<answer>-4</answer>"], [problem("-4", dataset="chain_sum")])[0].correct
    assert final_answer("<answer>5") is None
    assert final_answer("<answer>a<answer>5</answer>") == "5"
    assert final_answer("<answer>1</answer> no: <answer>\n2\n</answer> <answer>3") == "2"
    assert number("1,234.50") == number("1234.5") and number("1,23") is None and number("9" * 5000) is None


# ---------------------------------------------------------------- math data


def test_dapo_columns_one_row_per_prompt_conflicts_dropped(tmp_path):
    import datasets

    before = "Solve the following math problem step by step. The last line of your response should be of the form Answer: $Answer "
    before += "(without quotes) where $Answer is the answer to the problem.\n\n"
    after = '\n\nRemember to put your answer on its own line after "Answer:".'

    def row(question, gold):
        return {"prompt": [{"role": "user", "content": before + question + after}], "reward_model": {"ground_truth": gold, "style": "rule"}}

    rows = [row(f"What is ${i} \\cdot 2$?", str(2 * i)) for i in range(30)] * 4 + [row("Odd one", "1"), row("Odd one", "2")]
    datasets.Dataset.from_list(rows).to_parquet(str(tmp_path / "train.parquet"))
    held = write_rows(tmp_path / "held.jsonl", [{"problem": "What is $3 \\cdot 2$?", "answer": "6"}])
    task = make_task(TaskConfig(name="math", train_data=str(tmp_path / "train.parquet"), eval_data=held))
    counts = {k: task.counts["train_" + k] for k in ("rows", "duplicates", "gold_conflicts", "kept")}
    assert counts == {"rows": 122, "duplicates": 91, "gold_conflicts": 1, "kept": 29} and task.counts["train_in_eval"] == 1
    epoch = [p for u in range(3) for p in task.train(u, 10, 0)][:29]
    assert len({p.uid for p in epoch}) == 29  # each once before any comes again
    assert all(re.fullmatch(r"What is \$\d+ \\cdot 2\$\?", p.prompt) for p in epoch)
    assert task.train(1, 10, 0) == epoch[10:20] and task.train(1, 10, 1) != epoch[10:20]


def _golds(path, **fields):
    held = write_rows(Path(path).parent / "held_out_rows.jsonl", [{"problem": "another", "answer": "1"}])
    task = make_task(TaskConfig(name="math", train_data=str(path), eval_data=held, **fields))
    return {p.prompt: p.answer for p in task.train(0, task.counts["train_kept"], 0)}, task.counts


FACTORIALS = ("2432902008176640000", "51090942171709440000")  # 20! fits in 64 bits, 21! does not: one such row makes a column float


def test_answers_are_the_text_in_the_file(tmp_path):
    literals = ["1e-05", "0.00001", "1.50", *FACTORIALS, "0.1000000000000000055", "true", '"007"', '"2024-01-05"', '"1,234"']
    rows = [f'{{"problem": "p{i}", "answer": {text}}}' for i, text in enumerate(literals)]
    bad = ["null", "NaN", "[1]", '""', '"\\ud800"', "{}"]  # half a surrogate pair is no text
    rows += [f'{{"problem": "bad {i}", "answer": {text}}}' for i, text in enumerate(bad)]
    rows += ["", '{"problem": "no answer"}']
    expected = [text.strip('"') for text in literals]
    expected[expected.index("true")] = "True"
    for name, text in (("a.jsonl", "\ufeff" + "\n".join(rows)), ("a.json", "[" + ",\n".join(filter(None, rows)) + "]")):
        (tmp_path / name).write_text(text)
        golds, counts = _golds(tmp_path / name)
        assert [golds[f"p{i}"] for i in range(len(literals))] == expected
        assert counts["train_empty"] == len(bad) + 1 and counts["train_kept"] == len(literals)
    (tmp_path / "folder").mkdir()  # read by `datasets`, but for the text
    (tmp_path / "folder" / "train.jsonl").write_text("\n".join(rows))
    (tmp_path / "table").mkdir()
    cells = ["0.50", "007", "2024-01-05", "NA"]
    (tmp_path / "table" / "train.csv").write_text("problem,answer\n" + "".join(f"p{i},{text}\n" for i, text in enumerate(cells)))
    assert [_golds(tmp_path / "folder")[0][f"p{i}"] for i in range(len(literals))] == expected
    assert list(dict(sorted(_golds(tmp_path / "table")[0].items())).values()) == cells


def test_dates_alone_in_a_column_stay_dates(tmp_path):
    path = write_rows(tmp_path / "dates.jsonl", [{"problem": f"p{i}", "answer": f"2024-01-0{i}"} for i in (5, 6)])
    assert _golds(path)[0] == {"p5": "2024-01-05", "p6": "2024-01-06"}


def test_answers_of_a_parquet_file_are_exact(tmp_path):
    import pyarrow as pa
    import pyarrow.parquet as pq

    columns = {
        "integer": (pa.array([2432902008176640000, 9007199254740993]), ["2432902008176640000", "9007199254740993"]),
        "float": (pa.array([0.00001, 1e22, float("nan")]), ["0.00001", "10000000000000000000000"]),
        "decimal": (pa.array([Decimal("51090942171709440000.5")]), ["51090942171709440000.5"]),
        "date": (pa.array([date(2024, 1, 5)]), ["2024-01-05"]),
    }
    for name, (values, expected) in columns.items():
        pq.write_table(pa.table({"problem": [f"p{i}" for i in range(len(values))], "answer": values}), tmp_path / f"{name}.parquet")
        golds, counts = _golds(tmp_path / f"{name}.parquet")
        assert [golds[f"p{i}"] for i in range(len(expected))] == expected
        assert counts["train_empty"] == len(values) - len(expected)


@pytest.mark.parametrize(
    "content, row, cause",
    [
        (b'{"problem": "a", "answer": "1"}\n{"problem": "b", "ans', 2, "Unterminated string"),
        (b'{"problem": "a", "answer": "1"}\n\n{"problem": "b\xff", "answer": "2"}\n', 3, "can't decode byte 0xff"),
        (b'{"problem": "a", "answer": "1"}\n[1, 2]\n', 2, "a row must be a JSON object"),
        (b'{"problem": "a", "answer": "1"} {"problem": "b"}\n', 1, "Extra data"),
        (b'[{"problem": "a", "answer": "1"}, 7]', 2, "a row must be a JSON object"),
    ],
)
def test_a_damaged_file_is_named_with_row_and_cause(tmp_path, content, row, cause):
    (tmp_path / "a.jsonl").write_bytes(content)
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "train.jsonl").write_bytes(content)
    for path in (tmp_path / "a.jsonl", tmp_path / "folder"):
        with pytest.raises(ConfigError, match=rf"train_data = .*\.jsonl, row {row}: .*{cause}"):
            make_task(TaskConfig(name="math", train_data=str(path), eval_data=str(path)))


def test_a_truncated_parquet_file_is_named_with_its_cause(tmp_path):
    (tmp_path / "a.parquet").write_bytes(b"PAR1 and no more")
    with pytest.raises(ConfigError, match=r"a\.parquet.: cannot be read \(.*[Pp]arquet"):
        make_task(TaskConfig(name="math", train_data=str(tmp_path / "a.parquet"), eval_data=str(tmp_path / "a.parquet")))
