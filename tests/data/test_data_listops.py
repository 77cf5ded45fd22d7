"""The generator against an evaluator and a sampler of another kind: a stack, and a recursion."""

import random
import statistics

import numpy as np
import pytest

from fastrpb.data import DataError, listops, load
from fastrpb.data.listops import Grammar, generate

OPERATIONS = {
    "[MIN": min,
    "[MAX": max,
    "[MED": lambda values: int(statistics.median(values)),
    "[SM": lambda values: sum(values) % 10,
}


def evaluate(expression):
    """By a stack of open lists, word by word; the generator works level by level."""
    stack = [[]]
    for word in expression.split():
        if word in OPERATIONS:
            stack.append([word])
        elif word == "]":
            operation, *values = stack.pop()
            stack[-1].append(OPERATIONS[operation](values))
        else:
            stack[-1].append(int(word))
    ((value,),) = stack
    return value


def rows(folder):
    return {
        split: [
            (source, int(target))
            for source, target in (
                line.split("\t") for line in (folder / name).read_text().splitlines()[1:]
            )
        ]
        for split, name in listops.FILES.items()
    }


def test_the_evaluator():
    assert evaluate("[MAX 4 3 [MIN 2 3 ] 1 [MED 1 5 8 9 2 ] ]") == 5
    assert evaluate("[MED 3 4 ]") == 3
    assert evaluate("[SM 9 8 [SM 1 2 ] ]") == 0


def test_values_lengths_and_grammar_of_the_real_task(tmp_path):
    generate(tmp_path, seed=3, sizes=(1500, 200, 200), workers=1)
    lines = [row for part in rows(tmp_path).values() for row in part]
    assert [len(part) for part in rows(tmp_path).values()] == [1500, 200, 200]
    assert len({source for source, _ in lines}) == 1900
    for source, value in lines:
        assert evaluate(source) == value
        assert 500 < len(source.split()) < 2000
    arguments, depth = shape_of(source for source, _ in lines)
    assert set(arguments) == set(range(2, 11))
    assert max(depth) == 9  # operators at depths 1 to 9, digits down to 10
    assert {value for _, value in lines} == set(range(10))


def shape_of(expressions):
    """The numbers of arguments of all operators, and how deep operators nest in each."""
    arguments, depths = [], []
    for expression in expressions:
        stack, deepest = [0], 0
        for word in expression.split():
            if word == "]":
                arguments.append(stack.pop())
            else:
                stack[-1] += 1
                if word in OPERATIONS:
                    stack.append(0)
                    deepest = max(deepest, len(stack) - 1)
        depths.append(deepest)
    return arguments, depths


def test_the_probabilities_are_those_of_the_grammar(tmp_path):
    """Without a bound on the length nothing is selected, so the plain probabilities must show."""
    small = Grammar(min_length=0, max_length=10**6, max_depth=3)
    lines = [line for chunk in range(6) for line in listops._chunk(0, small, chunk)]
    expressions = [line.split(b"\t")[0].decode() for line in lines]
    assert len(expressions) == 120_000
    assert all(
        evaluate(e) == int(line.split(b"\t")[1]) for e, line in zip(expressions, lines, strict=True)
    )
    words = [e.split() for e in expressions]
    operators = [w[0] for w in words if len(w) > 1]
    near(len(operators) / len(words), 0.25, len(words))
    for operator in OPERATIONS:
        near(operators.count(operator) / len(operators), 0.25, len(operators))
    digits = [w[0] for w in words if len(w) == 1]
    for digit in "0123456789":
        near(digits.count(digit) / len(digits), 0.1, len(digits))
    arguments, depths = shape_of(expressions)
    for number in range(2, 11):
        near(arguments.count(number) / len(arguments), 1 / 9, len(arguments))
    assert max(depths) == 2


def near(share, probability, count):
    """Within five standard deviations of a binomial."""
    assert abs(share - probability) < 5 * (probability * (1 - probability) / count) ** 0.5


def recursive_length(generator, depth, limit):
    """The length of a random tree, node by node; over `limit` it does not matter."""
    if depth == 10 or generator.random() > 0.25:
        return 1
    length = 2
    for _ in range(generator.randint(2, 10)):
        length += recursive_length(generator, depth + 1, limit - length)
        if length > limit:
            break
    return length


def test_lengths_are_distributed_as_by_recursion():
    ours = [
        len(line.split()) - 1 for chunk in range(2) for line in listops._chunk(1, Grammar(), chunk)
    ]
    generator, theirs, tries = random.Random(0), [], 0
    while len(theirs) < 300:
        length = recursive_length(generator, 1, 2000)
        tries += 1
        if 500 < length < 2000:
            theirs.append(length)
    error = np.std(theirs) / len(theirs) ** 0.5
    assert abs(np.mean(ours) - np.mean(theirs)) < 4 * error
    near(len(theirs) / tries, len(ours) / 40_000, tries)


def test_files_depend_on_the_seed_and_not_on_the_workers(tmp_path):
    for name, seed, workers in (("a", 7, 1), ("b", 7, 2), ("c", 8, 1)):
        generate(tmp_path / name, seed, sizes=(1500, 20, 20), workers=workers)
    for name in listops.FILES.values():
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()
        assert (tmp_path / "a" / name).read_bytes() != (tmp_path / "c" / name).read_bytes()


def test_no_expression_is_in_two_places(tmp_path):
    """Where duplicates abound: few expressions are this short."""
    short = Grammar(min_length=1, max_length=5)
    generate(tmp_path, seed=0, sizes=(300, 40, 40), grammar=short, workers=1)
    sources = [source for part in rows(tmp_path).values() for source, _ in part]
    assert len(sources) == len(set(sources)) == 380
    with pytest.raises(DataError, match="only 400 distinct expressions came out"):
        generate(tmp_path / "more", sizes=(399, 1, 1), grammar=short, workers=1)
    assert list((tmp_path / "more").iterdir()) == []


def test_what_is_generated_is_read_back(tmp_path):
    generate(tmp_path, sizes=(20, 5, 5), workers=1)
    dataset = load("listops", tmp_path)
    for split, lines in rows(tmp_path).items():
        part = getattr(dataset, split)
        assert [(dataset.task.show(part[i][0][0]), part[i][1]) for i in range(len(part))] == lines
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(listops.FILES.values())


def test_files_that_are_there_are_not_replaced(tmp_path):
    (tmp_path / "basic_test.tsv").write_text("mine")
    with pytest.raises(DataError, match=r"has basic_test\.tsv already; remove them or choose"):
        generate(tmp_path, sizes=(20, 5, 5), workers=1)
    assert [path.name for path in tmp_path.iterdir()] == ["basic_test.tsv"]
    assert (tmp_path / "basic_test.tsv").read_text() == "mine"


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"sizes": (5, 0, 5)}, "sizes=.5, 0, 5. must be three numbers of at least 1"),
        ({"sizes": (5, 5)}, "sizes=.5, 5. must be three numbers"),
        ({"seed": -1}, "seed=-1 must be from 0"),
    ],
)
def test_impossible_requests(tmp_path, options, reason):
    with pytest.raises(DataError, match=reason):
        generate(tmp_path, **options)


def test_of_two_at_once_the_first_is_kept_whole(tmp_path, monkeypatch):
    claim = listops._claim

    def meanwhile(out):
        monkeypatch.setattr(listops, "_claim", claim)
        generate(tmp_path, seed=0, sizes=(20, 5, 5), workers=1)
        claim(out)

    monkeypatch.setattr(listops, "_claim", meanwhile)
    with pytest.raises(DataError, match=r"has basic_train.tsv, .* already"):
        generate(tmp_path, seed=1, sizes=(30, 5, 5), workers=1)
    assert len((tmp_path / "basic_train.tsv").read_text().splitlines()) == 21


def test_files_that_would_not_be_read(tmp_path):
    generate(tmp_path / "listops", sizes=(20, 5, 5), workers=1)
    with pytest.raises(DataError, match="has files in listops already, which would be read"):
        generate(tmp_path, sizes=(30, 5, 5), workers=1)
    assert [path.name for path in tmp_path.iterdir()] == ["listops"]
