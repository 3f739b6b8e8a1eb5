"""`eagle2 data`: what the target writes, whatever the batches and the interruptions."""

import json

import pytest
import torch
from tiny_models import tiny_model

from eagle2_kernels.training import DataConfig, generate, write_text
from eagle2_kernels.training.data import read_conversations

pytest.importorskip("transformers")


class Chat:
    """A tokenizer whose token i is one character, with a chat template of a few letters."""

    chat_template = "set"

    def __call__(self, text, add_special_tokens=True):
        assert not add_special_tokens
        return {"input_ids": [ord(c) - 40 for c in text]}

    def decode(self, ids, skip_special_tokens=True, clean_up_tokenization_spaces=False):
        return "".join(chr(i + 40) for i in ids if not (skip_special_tokens and i == 2))

    def apply_chat_template(self, chat, add_generation_prompt, tokenize):
        assert add_generation_prompt and not tokenize
        return "AB" + chat[0]["content"] + "CD"


@pytest.fixture(scope="module")
def target():
    # Long positions, and the marker of the template's message must be in the vocabulary.
    return tiny_model(vocab_size=96, max_position_embeddings=128)


@pytest.fixture
def write(target, monkeypatch, tmp_path):
    monkeypatch.setattr(generate, "_load", lambda name: (target, Chat()))

    def run(name="text.jsonl", **options):
        options = {"max_prompt_tokens": 6, "max_new_tokens": 9, "conversations": 7} | options
        path = tmp_path / name
        counts = write_text(DataConfig(output=str(path), **options))
        return path, counts

    return run


def rows(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_the_target_writes_prompt_and_answer(write, target):
    path, (count, tokens) = write()
    found = rows(path)
    assert count == len(found) >= 5
    assert tokens == sum(len(r["prompt"]) + len(r["response"]) for r in found)
    assert len({tuple(r["prompt"]) for r in found}) == len(found)
    for row in found:
        text = Chat().decode(row["prompt"])
        # At most six letters of its own between the template's.
        assert text.startswith("AB") and text.endswith("CD") and 5 <= len(text) <= 10
        want = target.generate(
            torch.tensor([row["prompt"]]), max_new_tokens=9, do_sample=False, pad_token_id=0
        )[0, len(row["prompt"]) :]
        assert row["response"] == want.tolist() and row["greedy"]
    assert [c.response for c in read_conversations(path)] == [r["response"] for r in found]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_batches_and_interruptions_change_nothing(write, temperature):
    path, _ = write(temperature=temperature, batch_size=3)
    whole = rows(path)
    assert rows(write("alone.jsonl", temperature=temperature, batch_size=1)[0]) == whole
    cut, _ = write("cut.jsonl", temperature=temperature, batch_size=2, conversations=4)
    # What an interruption in the middle of a line leaves.
    cut.write_text(cut.read_text() + '{"prompt": [1, 2')
    again, (count, _) = write("cut.jsonl", temperature=temperature, resume=True)
    assert rows(again) == whole and count == len([r for r in whole if r["index"] >= 4])
    assert whole[0]["greedy"] == (temperature == 0)
    other = rows(write("seed.jsonl", temperature=temperature, seed=100)[0])
    assert [r["prompt"] for r in other] != [r["prompt"] for r in whole]


def test_prompts_from_a_file_are_taken_in_turn(write, tmp_path):
    (tmp_path / "p.jsonl").write_text('{"prompt": "hey"}\n\n{"prompt": "you", "id": 3}\n')
    path, _ = write(prompts=str(tmp_path / "p.jsonl"), conversations=3)
    assert [Chat().decode(r["prompt"]) for r in rows(path)] == ["ABheyCD", "AByouCD", "ABheyCD"]


def test_a_file_with_text_needs_resume(write):
    write(conversations=2)
    with pytest.raises(FileExistsError, match="resume"):
        write()


@pytest.mark.parametrize(
    "text", ["notes without a line feed", '{"prompt": [1], "response": [2]}', '{"prompt": [1, 2']
)
@pytest.mark.parametrize("resume", [False, True])
def test_a_file_is_not_cut_but_where_an_interruption_did(write, tmp_path, text, resume):
    path = tmp_path / "text.jsonl"
    path.write_text(text)
    if resume and text.endswith("2"):
        assert len(rows(write(resume=True, conversations=1)[0])) == 1
        return
    with pytest.raises((ValueError, FileExistsError), match="output: "):
        write(resume=resume)
    assert path.read_text() == text


@pytest.mark.parametrize(
    ("text", "message"),
    [('{"prompt": "a"}\n[1]\n', "line 2: expected"), ("\n", "expected at least one")],
)
def test_prompts_that_cannot_be_read_are_named(write, tmp_path, text, message):
    (tmp_path / "p.jsonl").write_text(text)
    with pytest.raises(ValueError, match=f"prompts: .*{message}"):
        write(prompts=str(tmp_path / "p.jsonl"))


def test_another_file_is_not_continued(write, tmp_path):
    (tmp_path / "text.jsonl").write_text('{"prompt": [1], "response": [2]}\n')
    with pytest.raises(ValueError, match="output: expected lines that `eagle2 data` wrote"):
        write(resume=True)


@pytest.mark.parametrize(
    "options", [{"conversations": 0}, {"batch_size": 0}, {"max_new_tokens": 0}], ids=str
)
def test_counts_below_one_are_named(write, options):
    with pytest.raises(ValueError, match=f"{next(iter(options))}: expected at least 1, got 0"):
        write(**options)


def test_a_tokenizer_without_template_is_named(write, monkeypatch):
    monkeypatch.setattr(Chat, "chat_template", None)
    with pytest.raises(ValueError, match="chat template"):
        write()
