"""The corpus: the same text in every process, batches that depend on nothing but seed and step."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "launch"))

from gpt.corpus import Corpus, docstring, load_corpus

LAUNCH = Path(__file__).parents[2] / "launch"
TEXT = bytes(range(256)) * 3


def default_corpus(tmp_path: Path, hash_seed: str) -> bytes:
    file = tmp_path / f"corpus-{hash_seed}"
    command = [sys.executable, str(LAUNCH / "gpt" / "corpus.py"), str(file)]
    done = subprocess.run(
        command, env=os.environ | {"PYTHONHASHSEED": hash_seed}, capture_output=True, timeout=60, check=True
    )
    assert done.stdout == b""  # no module of the list prints on import
    return file.read_bytes()


def test_default_corpus_is_large_and_equal_in_all_processes(tmp_path: Path) -> None:
    first, second = (default_corpus(tmp_path, seed) for seed in ("1", "2"))
    assert first == second
    assert len(first) > 1_000_000
    assert b" at 0x" not in first
    assert sum(byte < 128 for byte in first) > 0.99 * len(first)


def test_docstring_with_an_address_is_left_out() -> None:
    def function() -> None:
        pass

    function.__doc__ = wanted = "words " * 20
    assert docstring(function) == wanted
    function.__doc__ = f"{wanted} default={object()!r}"
    assert docstring(function) is None


def test_no_docstring_enters_twice(tmp_path: Path) -> None:
    # `os.path` and `posixpath` are one module, and most classes are exported by several.
    text = default_corpus(tmp_path, "0").decode()
    assert text.count("Join two or more pathname components") == 1


@pytest.mark.parametrize("step", [0, 1, 99])
def test_batch_is_windows_of_the_text_with_the_next_bytes_as_targets(step: int) -> None:
    batch = Corpus(TEXT).batch(step, batch=16, seq_len=8, seed=3)
    assert batch.inputs.shape == batch.targets.shape == (16, 8)
    for inputs, targets in zip(batch.inputs.tolist(), batch.targets.tolist(), strict=True):
        assert bytes([inputs[0], *targets]) in TEXT
        assert inputs[1:] == targets[:-1]


def test_batch_depends_on_seed_and_step_alone() -> None:
    corpus = Corpus(TEXT)
    wanted = corpus.batch(5, batch=4, seq_len=8, seed=1)
    corpus.batch(0, batch=64, seq_len=2, seed=9)  # drawn in between: must not matter
    again = Corpus(TEXT).batch(5, batch=4, seq_len=8, seed=1)
    assert wanted.inputs.equal(again.inputs)
    assert wanted.targets.equal(again.targets)
    for step, seed in ((6, 1), (5, 2)):
        assert not wanted.inputs.equal(corpus.batch(step, batch=4, seq_len=8, seed=seed).inputs)


def test_every_window_can_be_drawn_also_the_last() -> None:
    drawn = Corpus(b"abcde").batch(0, batch=100, seq_len=3, seed=0)
    assert {bytes(row) for row in drawn.targets.tolist()} == {b"bcd", b"cde"}


def test_shortest_corpus_is_one_sequence_and_its_last_target(tmp_path: Path) -> None:
    file = tmp_path / "text"
    file.write_bytes(b"123456789")
    corpus = load_corpus(file, seq_len=8)
    assert bytes(corpus.batch(0, batch=1, seq_len=8, seed=0).targets[0].tolist()) == b"23456789"
    with pytest.raises(ValueError, match=r"at least 10 bytes .*--seq-len 9.* but got 9 bytes"):
        load_corpus(file, seq_len=9)


@pytest.mark.parametrize("name", ["missing", "."])
def test_unreadable_corpus_is_refused_by_name(tmp_path: Path, name: str) -> None:
    with pytest.raises(ValueError, match=r"expected a readable corpus file .* but got .*; name a text file"):
        load_corpus(tmp_path / name, seq_len=8)
