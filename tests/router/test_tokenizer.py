"""Tokens to text and back, exactly, for the fake model and for real tokenizers of both families."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import decoders, models, pre_tokenizers, trainers

from proto import inference_pb2
from proto.errors import InvalidRequest
from router.detokenizer import Detokenizer
from router.model import ModelError
from router.tokenizer import FakeTokenizer, HFTokenizer, Tokenizer, load_tokenizer

TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'bad' %}{{ raise_exception('no bad role') }}{% endif %}"
    "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SAMPLES = [
    "hello world",
    "naïve café",
    "你好,世界",
    "👩‍👩‍👧 flags 🇩🇪",
    "  spaces\n\ttabs",
    "<|im_end|> inside",
    "e\u0301",
]


def stream(tokenizer: Tokenizer, ids: list[int]) -> str:
    detokenizer = Detokenizer(tokenizer.token_bytes)
    return "".join(map(detokenizer.push, ids)) + detokenizer.flush()


def save(directory: Path, tokenizer: tokenizers.Tokenizer, template: str | None = TEMPLATE) -> Path:
    directory.mkdir(exist_ok=True)
    tokenizer.save(str(directory / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>"}
    (directory / "tokenizer_config.json").write_text(
        json.dumps(config | ({"chat_template": template} if template else {}))
    )
    return directory


def byte_level() -> tokenizers.Tokenizer:
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<|im_start|>", "<|im_end|>"],
        show_progress=False,
    )
    tokenizer.train_from_iterator(SAMPLES * 3, trainer)
    tokenizer.add_tokens(["plain added"])
    return tokenizer


def sentencepiece_like() -> tokenizers.Tokenizer:
    """Llama 2's family: U+2581 for spaces, a byte token for what the vocabulary lacks."""
    pieces = ["<unk>", *(f"<0x{n:02X}>" for n in range(256)), "▁", "a", "b", "▁a", "ab", "<|im_end|>"]
    vocab = {piece: number for number, piece in enumerate(pieces)}
    model = models.BPE(vocab=vocab, merges=[("▁", "a"), ("a", "b")], unk_token="<unk>", byte_fallback=True)
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never", split=False)
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    tokenizer.add_special_tokens(["<|im_end|>"])
    return tokenizer


@pytest.fixture(scope="module")
def byte_level_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tmp_path_factory.mktemp("bytes"), byte_level())


@pytest.fixture(scope="module")
def hf(byte_level_dir: Path) -> HFTokenizer:
    tokenizer = load_tokenizer(str(byte_level_dir))
    assert isinstance(tokenizer, HFTokenizer)
    return tokenizer


@pytest.mark.parametrize("text", SAMPLES)
def test_byte_level_round_trip(hf: HFTokenizer, byte_level_dir: Path, text: str) -> None:
    raw = tokenizers.Tokenizer.from_file(str(byte_level_dir / "tokenizer.json"))
    ids = hf.encode(text)
    assert stream(hf, ids) == raw.decode(ids, skip_special_tokens=True)
    if "<|" not in text:
        assert stream(hf, ids) == text


@given(ids=st.lists(st.integers(2, 299), max_size=30))
def test_any_ids_read_as_the_library_reads_them(hf: HFTokenizer, byte_level_dir: Path, ids: list[int]) -> None:
    """Also where they are no UTF-8."""
    raw = tokenizers.Tokenizer.from_file(str(byte_level_dir / "tokenizer.json"))
    assert stream(hf, ids) == raw.decode(ids)


def test_special_tokens_add_no_text_but_have_a_name(hf: HFTokenizer) -> None:
    end = hf.encode("<|im_end|>")
    assert len(end) == 1
    assert (hf.token_bytes(end[0]), hf.token_label(end[0])) == (b"", b"<|im_end|>")
    added = hf.encode("plain added")
    assert [hf.token_bytes(i) for i in added] == [b"plain added"]
    assert hf.token_bytes(100_000) == b"", "padding of the vocabulary"


@pytest.mark.parametrize("text", ["ab a b", " aab", "你好 a", "a\U0001f600b"])
def test_byte_fallback_round_trip(tmp_path: Path, text: str) -> None:
    tokenizer = HFTokenizer(save(tmp_path / "sp", sentencepiece_like()))
    assert stream(tokenizer, tokenizer.encode(text)) == text


def test_chat_goes_through_the_template(hf: HFTokenizer) -> None:
    messages = [inference_pb2.ChatMessage(role="user", content="hello world")]
    ids = hf.encode(hf.render_chat(messages), rendered=True)
    label = b"".join(map(hf.token_label, ids)).decode()
    assert label == "<|im_start|>user\nhello world<|im_end|>\n<|im_start|>assistant\n"
    with pytest.raises(InvalidRequest, match="no bad role"):
        hf.render_chat([inference_pb2.ChatMessage(role="bad", content="x")])


def test_without_a_template_there_is_no_chat(tmp_path: Path) -> None:
    tokenizer = HFTokenizer(save(tmp_path / "plain", byte_level(), template=None))
    with pytest.raises(InvalidRequest, match="no chat template"):
        tokenizer.render_chat([inference_pb2.ChatMessage(role="user", content="x")])


def test_what_cannot_be_loaded_says_so(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"cannot load the tokenizer of .*: tokenizer\.json is missing"):
        load_tokenizer(str(tmp_path))
    wordpiece = byte_level()
    wordpiece.decoder = decoders.WordPiece()
    with pytest.raises(ModelError, match=r"decoder \['WordPiece'\]"):
        load_tokenizer(str(save(tmp_path / "wp", wordpiece)))


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("tokenizer.json", "{}", r"cannot load the tokenizer of .*m: KeyError\('added_tokens'\)"),
        ("tokenizer.json", "{", "cannot load the tokenizer of .*m: Expecting"),
        ("tokenizer.json", "[]", "cannot load the tokenizer of .*m: "),
        ("chat_template.jinja", "{% for %}", "the chat template of .*m is broken: line 1: "),
    ],
)
def test_a_damaged_file_gives_one_line(name: str, content: str, message: str, tmp_path: Path) -> None:
    directory = save(tmp_path / "m", byte_level())
    (directory / name).write_text(content)
    with pytest.raises(ModelError, match=message) as caught:
        load_tokenizer(str(directory))
    assert "\n" not in str(caught.value)


def test_a_prompt_beyond_the_tokenizer_s_own_length_is_not_warned_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    directory = save(tmp_path / "short", byte_level())
    config = json.loads((directory / "tokenizer_config.json").read_text())
    (directory / "tokenizer_config.json").write_text(json.dumps(config | {"model_max_length": 4}))
    library = logging.getLogger("transformers")
    library.addHandler(caplog.handler)
    try:
        assert len(HFTokenizer(directory).encode("hello world" * 5)) > 4
    finally:
        library.removeHandler(caplog.handler)
    assert caplog.messages == []


def test_the_fake_tokenizer() -> None:
    fake = FakeTokenizer()
    assert fake.encode("é") == [0xC3, 0xA9]
    assert stream(fake, [0xC3, 0xA9, 300, 65, 511]) == "é<300>A"
    assert fake.token_label(511) == b"<end>"
    messages = [inference_pb2.ChatMessage(role="user", content="hi")]
    assert bytes(fake.encode(fake.render_chat(messages), rendered=True)) == b"user: hi\nassistant: "


def test_a_character_is_held_back_until_it_is_whole() -> None:
    detokenizer = Detokenizer(FakeTokenizer().token_bytes)
    assert [detokenizer.push(byte) for byte in "👍".encode()] == ["", "", "", "👍"]
    assert detokenizer.push(0xF0) == ""
    assert detokenizer.flush() == "\ufffd"
