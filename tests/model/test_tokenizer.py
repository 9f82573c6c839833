"""Tokenizers and chat templates without a model; the embedded model's are tested in test_smollm2.py."""

import json

import pytest

from kvpilot.engine.errors import ModelError, RequestError
from kvpilot.engine.model.chat import ChatTemplate
from kvpilot.engine.model.gguf_tokenizer import gguf_tokenizer
from kvpilot.engine.model.load import read_checkpoint
from kvpilot.engine.model.tokenizer import byte_characters

BYTES = list(byte_characters().values())
USER = [{"role": "user", "content": "hi"}]


def byte_level(pre, merges=("q q",), specials=("<|im_end|>",), **extra):
    """GGUF metadata of a vocabulary of bytes, the merges' results from id 256, then the specials."""
    words = [merge.replace(" ", "") for merge in merges]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": [*BYTES, *words, *specials],
        "tokenizer.ggml.token_type": [1] * (256 + len(words)) + [3] * len(specials),
        "tokenizer.ggml.merges": list(merges),
        **extra,
    }


def sentence_piece(**extra):
    pieces = {"<unk>": 0.0, "<s>": 0.0, "</s>": 0.0}
    pieces |= {f"<0x{byte:02X}>": 0.0 for byte in range(256)}
    pieces |= {
        "\u2581": -10.0,
        "a": -11.0,
        "b": -12.0,
        "c": -13.0,
        "ab": -2.0,
        "bc": -1.0,
        "abc": -5.0,
        "\u2581a": -3.0,
    }
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": list(pieces),
        "tokenizer.ggml.scores": list(pieces.values()),
        "tokenizer.ggml.token_type": [2, 3, 3] + [6] * 256 + [1] * 8,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
        **extra,
    }


def pieces(tokenizer, text, **kwargs):
    return [tokenizer.decode([i]) for i in tokenizer.encode(text, **kwargs)]


@pytest.mark.parametrize(
    ("pre", "expected"),
    [
        ("gpt-2", ["12", "3", " ", " ", "4"]),
        ("smollm", ["1", "2", "3", " ", " ", "4"]),
        ("qwen2", ["1", "2", "3", " ", " ", "4"]),
        ("llama-bpe", ["12", "3", " ", " ", "4"]),
    ],
)
def test_pre_tokenizer_decides_whether_digits_merge(pre, expected):
    assert pieces(gguf_tokenizer(byte_level(pre, ["1 2"])), "123  4") == expected


def test_every_byte_survives():
    tokenizer = gguf_tokenizer(byte_level("smollm"))
    text = "".join(map(chr, range(0x300))) + "\u4f60\U0001f600"
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_special_tokens_have_ids_but_no_text():
    tokenizer = gguf_tokenizer(byte_level("smollm"))
    assert tokenizer.encode("a<|im_end|>")[1:] == [257]
    assert tokenizer.decode([257]) == ""
    assert tokenizer.eos_ids == {257}
    assert tokenizer.token_bytes(10**6) == b""


def test_user_defined_tokens_keep_their_text():
    metadata = byte_level("qwen2", specials=["<think>"])
    metadata["tokenizer.ggml.token_type"][-1] = 4
    tokenizer = gguf_tokenizer(metadata)
    assert tokenizer.encode("<think>") == [257]
    assert tokenizer.decode([257]) == "<think>"


@pytest.mark.parametrize(("flag", "expected"), [({}, False), ({"tokenizer.ggml.add_bos_token": True}, True)])
def test_beginning_of_text_is_added_where_the_checkpoint_asks(flag, expected):
    metadata = byte_level("smollm", **{"tokenizer.ggml.bos_token_id": 257}, **flag)
    tokenizer = gguf_tokenizer(metadata)
    assert (tokenizer.encode("a", add_special=True)[0] == 257) == expected
    assert tokenizer.encode("a")[0] != 257


def test_sentence_piece_merges_the_best_scoring_pair_first():
    tokenizer = gguf_tokenizer(sentence_piece())
    names = sentence_piece()["tokenizer.ggml.tokens"]
    assert [names[i] for i in tokenizer.encode("abc", add_special=True)] == ["<s>", "\u2581a", "bc"]
    assert [names[i] for i in tokenizer.encode("\u00e9")] == ["\u2581", "<0xC3>", "<0xA9>"]
    assert tokenizer.decode(tokenizer.encode("abc \u00e9")) == "abc \u00e9"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tokenizer.ggml.pre": "poro-chat"}, "pre='poro-chat' is not supported: expected smollm"),
        ({"tokenizer.ggml.pre": None}, "pre=None is not supported"),
        ({"tokenizer.ggml.model": "bert"}, "model='bert' is not supported"),
        ({"tokenizer.ggml.tokens": None}, "tokens is missing"),
        ({"tokenizer.ggml.merges": ["x y z w"]}, "merges do not fit"),
        ({"tokenizer.ggml.token_type": [1]}, "258 tokens but 1 token types"),
    ],
)
def test_unusable_vocabulary_is_refused(changes, message):
    with pytest.raises(ModelError, match=message):
        gguf_tokenizer(byte_level("smollm") | changes)


def test_lone_surrogate_is_the_clients_error():
    with pytest.raises(RequestError, match="not valid Unicode"):
        gguf_tokenizer(byte_level("smollm")).encode("a\ud800")


def test_template_sees_special_tokens_and_variables():
    template = ChatTemplate(
        "{{ bos_token }}{% for m in messages %}{{ m.content }}{% endfor %}{{ x }}", {"bos_token": "<s>"}
    )
    assert template.render(USER, x=3) == "<s>hi3"


def test_template_blocks_leave_no_white_space():
    template = ChatTemplate(
        "{% for m in messages %}\n    {% if true %}\n{{ m.role }}\n    {% endif %}\n{% endfor %}", {}
    )
    assert template.render(USER) == "user\n"


def test_template_writes_plain_json():
    assert ChatTemplate("{{ {'a': '<\u00e9>'} | tojson }}", {}).render(USER) == '{"a": "<\u00e9>"}'


@pytest.mark.parametrize(
    "source",
    [
        "{{ raise_exception('roles must alternate') }}",
        "{{ messages[5].content.upper() }}",
        "{{ messages[0].content + 1 }}",
        "{{ messages.append(1) }}",
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ 1 / 0 }}",
    ],
)
def test_refusal_of_a_template_is_the_clients_error(source):
    with pytest.raises(RequestError, match="chat template refuses the messages") as refusal:
        ChatTemplate(source, {}).render(USER)
    assert refusal.value.field == "messages"


def test_broken_template_is_the_models_error():
    with pytest.raises(ModelError, match="chat template is broken"):
        ChatTemplate("{% if %}", {})


def test_model_without_a_template_refuses_chats():
    with pytest.raises(RequestError, match="no chat template"):
        gguf_tokenizer(byte_level("smollm")).render_chat(USER)


@pytest.mark.parametrize("where", ["file", "string", "list"])
def test_directory_brings_tokenizer_and_template(tmp_path, write_checkpoint, where):
    directory = write_checkpoint(tmp_path / "model", architecture="llama")
    source = gguf_tokenizer(byte_level("smollm"))
    source._backend.save(str(directory / "tokenizer.json"))
    template = "{{ messages[0].content }}!"
    settings = {
        "file": {},
        "string": {"chat_template": template},
        "list": {
            "chat_template": [{"name": "tools", "template": "no"}, {"name": "default", "template": template}]
        },
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(settings[where]))
    if where == "file":
        (directory / "chat_template.jinja").write_text(template)
    tokenizer = read_checkpoint(directory).load_tokenizer()
    assert tokenizer.encode("x 1<|im_end|>") == source.encode("x 1<|im_end|>")
    assert tokenizer.eos_ids == {2, 257}
    assert tokenizer.render_chat(USER) == "hi!"


def test_broken_tokenizer_file_is_refused(tmp_path, write_checkpoint):
    directory = write_checkpoint(tmp_path / "model", architecture="llama")
    (directory / "tokenizer.json").write_text("{}")
    with pytest.raises(ModelError, match=r"tokenizer\.json cannot be read"):
        read_checkpoint(directory).load_tokenizer()
