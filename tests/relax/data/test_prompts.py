import json
import subprocess
import sys
from decimal import Decimal
from pathlib import Path

import pytest

from relax.data.prompts import Prompt, keep_short, load_tokenizer, read_prompts
from relax.errors import ArtifactError, ConfigError

GSM8K = Path(__file__).parents[3] / "../shared/data/gsm8k"


def load_prompts(path, tokenizer, *, max_prompt_len, overlong, **settings):
    prompts = read_prompts(path, tokenizer, **settings)
    return keep_short(path, prompts, max_prompt_len=max_prompt_len, overlong=overlong)


def load(tmp_path, tokenizer, rows, **changes):
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    arguments = {
        "input_key": "input",
        "label_key": "label",
        "apply_chat_template": False,
        "max_prompt_len": 16,
        "overlong": "drop",
        "prompt_template": None,
    }
    return load_prompts(path, tokenizer, **(arguments | changes))


def error_of(tmp_path, tokenizer, rows, **changes):
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, tokenizer, rows, **changes)
    assert "\n" not in str(caught.value)
    return str(caught.value).removeprefix(f"{tmp_path}/a.jsonl: ")


def user(content):
    return {"role": "user", "content": content}


def test_plain_prompts(tmp_path, tokenizer):
    rows = [{"input": "381=", "label": "8"}, {"input": "a b", "label": " 7 "}]
    source = load(tmp_path, tokenizer, rows)
    assert source.prompts == (
        Prompt(prompt_id=0, text="381=", tokens=(6, 11, 4, 44), label="8"),
        Prompt(prompt_id=1, text="a b", tokens=(13, 39, 14), label=" 7 "),
    )
    assert source.dropped == 0


def test_long_prompts_are_dropped_and_counted_and_ids_stay(tmp_path, tokenizer):
    rows = [{"input": text, "label": "x"} for text in ("12345", "1234", "123456", "1")]
    source = load(tmp_path, tokenizer, rows, max_prompt_len=4)
    assert [(p.prompt_id, p.text) for p in source.prompts] == [(1, "1234"), (3, "1")]
    assert source.dropped == 2


def test_long_prompts_are_an_error_by_choice(tmp_path, tokenizer):
    rows = [{"input": "1", "label": "x"}, {"input": "12345", "label": "x"}]
    assert error_of(tmp_path, tokenizer, rows, max_prompt_len=4, overlong="error") == (
        "row 1: prompt length = 5 tokens; --rollout-max-prompt-len = 4: raise it, or "
        "set --overlong-prompt drop"
    )
    assert len(load(tmp_path, tokenizer, rows, max_prompt_len=5, overlong="error").prompts) == 2


def test_all_dropped(tmp_path, tokenizer):
    rows = [{"input": "123", "label": "x"}, {"input": "12345", "label": "x"}]
    assert error_of(tmp_path, tokenizer, rows, max_prompt_len=2) == (
        "--rollout-max-prompt-len = 2 drops all 2 prompts; the shortest has 3 tokens"
    )


def test_chat_template_of_a_string_and_of_messages(tmp_path, tokenizer):
    tokenizer.chat_template = (
        "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
        "{% if add_generation_prompt %}[assistant]{% endif %}"
    )
    chat = [
        {"role": "system", "content": "add"},
        user("1+1"),
        {"role": "assistant", "content": "2"},
    ]
    rows = [{"input": "1+1", "label": "2"}, {"input": [*chat, user("2+2")], "label": "4"}]
    source = load(tmp_path, tokenizer, rows, apply_chat_template=True, max_prompt_len=99)
    assert [prompt.text for prompt in source.prompts] == [
        "[user]1+1[assistant]",
        "[system]add[user]1+1[assistant]2[user]2+2[assistant]",
    ]
    assert tokenizer.decode(source.prompts[0].tokens) == "[user]1+1[assistant]"


def test_prompt_template_wraps_the_string_or_the_last_user_message(tmp_path, tokenizer):
    template = "{input}\nput it in \\boxed{{}}."
    rows = [{"input": "{1}+1", "label": "2"}]
    source = load(tmp_path, tokenizer, rows, prompt_template=template, max_prompt_len=99)
    assert source.prompts[0].text == "{1}+1\nput it in \\boxed{}."
    chat = [user("1+1"), {"role": "assistant", "content": "2"}, user("2+2")]
    rows = [{"input": chat, "label": "4"}]
    changes = {"apply_chat_template": True, "prompt_template": "q: {input}?", "max_prompt_len": 99}
    assert load(tmp_path, tokenizer, rows, **changes).prompts[0].text == "1+12<eos>q: 2+2?"
    rows = [{"input": [{"role": "system", "content": "x"}], "label": "4"}]
    assert error_of(tmp_path, tokenizer, rows, **changes) == (
        "row 0: prompt_template is set, but the chat holds no user message"
    )


@pytest.mark.parametrize(
    "template", ["no field", "{input} {label}", "{input", "{}", "\\boxed{}{input}", "{input.x}"]
)
def test_unusable_prompt_templates(tmp_path, tokenizer, template):
    rows = [{"input": "1", "label": "x"}]
    assert error_of(tmp_path, tokenizer, rows, prompt_template=template) == (
        f"--prompt-template = {template!r}; it must hold {{input}} and no other field, "
        "and literal braces doubled: {{ }}"
    )


def test_only_plain_text_gets_the_tokenizers_special_tokens(tmp_path, tokenizer):
    from tokenizers.processors import TemplateProcessing

    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<eos> $A", special_tokens=[("<eos>", 1)]
    )
    rows = [{"input": "12", "label": "x"}]
    assert load(tmp_path, tokenizer, rows).prompts[0].tokens == (1, 4, 5)
    chat = load(tmp_path, tokenizer, rows, apply_chat_template=True)
    assert chat.prompts[0].tokens == (4, 5)


def test_missing_keys(tmp_path, tokenizer):
    rows = [{"input": "1", "label": "2"}, {"inputs": "1", "answer": "2"}]
    assert error_of(tmp_path, tokenizer, rows) == (
        "row 1: no input_key = 'input'; keys: inputs, answer; did you mean inputs?"
    )
    rows = [{"input": "1", "answer": "2"}]
    assert error_of(tmp_path, tokenizer, rows) == (
        "row 0: no label_key = 'label'; keys: input, answer"
    )
    assert error_of(tmp_path, tokenizer, [{}]) == "row 0: no input_key = 'input'; keys: none"


def test_numbers_as_labels_are_turned_to_strings(tmp_path, tokenizer):
    numbers = [8, -3, 0.5, 10**30]
    rows = [{"input": "1", "label": number} for number in numbers]
    labels = [prompt.label for prompt in load(tmp_path, tokenizer, rows).prompts]
    assert labels == ["8", "-3", "0.5", "1" + "0" * 30]


def test_decimal_labels_of_parquet(tmp_path, tokenizer):
    import pyarrow as pa
    import pyarrow.parquet

    table = pa.table({"input": ["1"], "label": [Decimal("1.50")]})
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    source = load_prompts(
        tmp_path / "a.parquet", tokenizer, input_key="input", label_key="label",
        apply_chat_template=False, max_prompt_len=8, overlong="drop",
    )  # fmt: skip
    assert source.prompts[0].label == "1.50"


@pytest.mark.parametrize("label", [None, True, ["8"], {"a": 1}, float("nan"), float("inf")])
def test_other_labels_are_refused(tmp_path, tokenizer, label):
    rows = [{"input": "1", "label": "x"}, {"input": "1", "label": label}]
    assert error_of(tmp_path, tokenizer, rows) == (
        f"row 1: label label = {label!r}; a string or a finite number is needed"
    )


def test_unusable_inputs(tmp_path, tokenizer):
    rows = [{"input": [user("1")], "label": "x"}]
    assert error_of(tmp_path, tokenizer, rows) == (
        "row 0: input = [{'role': 'user', 'content': '1'}]; "
        "without apply_chat_template a string is needed"
    )
    for given in (None, 3, [], ["hi"], [{"role": "user"}], [{"role": "user", "content": 1}]):
        rows = [{"input": given, "label": "x"}]
        assert error_of(tmp_path, tokenizer, rows, apply_chat_template=True) == (
            f"row 0: input = {given!r}; a string, or a list of chat messages "
            '{"role": ..., "content": ...} of strings, is needed'
        )
    rows = [{"input": "", "label": "x"}]
    assert error_of(tmp_path, tokenizer, rows) == "row 0: the prompt renders to no tokens"


def test_chat_template_is_missing_or_refuses(tmp_path, tokenizer):
    rows = [{"input": "1", "label": "x"}]
    tokenizer.chat_template = "{{ raise_exception('roles must alternate') }}"
    assert error_of(tmp_path, tokenizer, rows, apply_chat_template=True) == (
        "row 0: the chat template refuses it: roles must alternate"
    )
    tokenizer.chat_template = None
    assert error_of(tmp_path, tokenizer, rows, apply_chat_template=True) == (
        f"{tokenizer.name_or_path}: apply_chat_template = true, but the tokenizer has no chat "
        "template; use an instruct model or set it to false"
    )


def test_load_tokenizer_names_what_it_looked_for(tmp_path):
    with pytest.raises(ArtifactError) as caught:
        load_tokenizer(tmp_path / "gone")
    assert str(caught.value).startswith(f"{tmp_path}/gone: no such model directory; ")
    (tmp_path / "config.json").write_text('{"model_type": "qwen3"}')
    with pytest.raises(ArtifactError) as caught:
        load_tokenizer(tmp_path)
    assert str(caught.value) == (
        f"{tmp_path}: no tokenizer; looked for tokenizer.json, tokenizer.model, vocab.json, "
        "vocab.txt, spiece.model: copy the model's tokenizer files there"
    )
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ArtifactError, match="the tokenizer cannot be loaded: ") as caught:
        load_tokenizer(tmp_path)
    assert "\n" not in str(caught.value)


def test_gsm8k(tokenizer):
    if not GSM8K.is_dir():
        pytest.skip(f"{GSM8K}: download GSM8K train.jsonl and test.jsonl there")
    source = load_prompts(
        GSM8K / "test.jsonl", tokenizer, input_key="question", label_key="answer",
        apply_chat_template=True, max_prompt_len=200, overlong="drop",
    )  # fmt: skip
    lines = (GSM8K / "test.jsonl").read_text().splitlines()
    short = [row for row in map(json.loads, lines) if len(row["question"]) <= 200]
    assert [prompt.text for prompt in source.prompts] == [row["question"] for row in short]
    assert [prompt.label for prompt in source.prompts] == [row["answer"] for row in short]
    assert source.dropped == 1319 - len(short)


def test_importing_the_rooms_stays_light():
    code = (
        "import sys, relax.data.prompts, relax.data.tasks, relax.data.order, relax.rewards\n"
        "heavy = {'torch', 'transformers', 'tokenizers', 'pyarrow', 'jinja2'}\n"
        "print(sorted(heavy & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
