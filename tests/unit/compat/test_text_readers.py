from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from paddle_serving_app.reader import ChineseBertReader, IMDBDataset, LACReader, SentaReader
from paddle_serving_app.reader.batching import pad_batch_data, prepare_batch_data
from paddle_serving_app.reader.bert_base_reader import BertBaseReader
from paddle_serving_app.reader.lac_reader import load_kv_dict
from paddle_serving_app.reader.tokenization import (
    BasicTokenizer,
    CharTokenizer,
    FullTokenizer,
    WordpieceTokenizer,
    convert_to_unicode,
    load_vocab,
)

WIDE_ONE = "\uff11"
VOCABULARY = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "un", "##aff", "##able", "你", "好", ",", "cafe"]


@pytest.fixture
def vocabulary(tmp_path: Path) -> str:
    file = tmp_path / "vocab.txt"
    file.write_text("\n".join(VOCABULARY), encoding="utf-8")
    return str(file)


def test_bert_inputs_of_a_sentence(vocabulary: str) -> None:
    reader = ChineseBertReader({"vocab_file": vocabulary, "max_seq_len": 10})
    assert reader.process("Unaffable, 你好 café".encode()) == {
        "input_ids": [2, 5, 6, 7, 10, 8, 9, 11, 0, 0],
        "position_ids": [0, 1, 2, 3, 4, 5, 6, 7, 0, 0],
        "segment_ids": [0] * 10,
        "input_mask": [1] * 8 + [0] * 2,
    }
    assert reader.process("你" * 30)["input_ids"] == [2] + [8] * 8 + [0]
    reader.set_feed_keys(["a", "b", "c", "d"])
    assert list(reader.process("你")) == reader.get_feed_keys() == ["a", "b", "c", "d"]
    with pytest.raises(ValueError, match="needs a vocab_file"):
        ChineseBertReader()
    with pytest.raises(NotImplementedError):
        BertBaseReader().process("x")


def test_tokenizers_split_words_and_pieces(vocabulary: str) -> None:
    basic = BasicTokenizer()
    assert basic.tokenize("Café\t(你好)\x00 a-b\u00a0c\ufffd") == ["cafe", "(", "你", "好", ")", "a", "-", "b", "c"]
    assert BasicTokenizer(do_lower_case=False).tokenize("Café") == ["Café"]
    full = FullTokenizer(vocabulary)
    assert full.tokenize("unaff xyz 你") == ["un", "##aff", "[UNK]", "你"]
    assert full.convert_ids_to_tokens(full.convert_tokens_to_ids(["un", "你"])) == ["un", "你"]
    assert CharTokenizer(vocabulary).tokenize("UN 好") == ["un", "好"]
    assert WordpieceTokenizer({"a": 0, "##a": 1}, max_input_chars_per_word=3).tokenize("aaa aaaa") == [
        "a", "##a", "##a", "[UNK]"
    ]  # fmt: skip
    marked = WordpieceTokenizer({"\u2581ab": 0, "c": 1}, use_sentence_piece_vocab=True)
    assert marked.tokenize("abc") == ["\u2581ab", "c"]
    assert convert_to_unicode(b"a\xff") == "a"
    with pytest.raises(ValueError, match="str or bytes, got int"):
        convert_to_unicode(3)  # type: ignore[arg-type]


def test_vocabularies_may_have_numbers(tmp_path: Path) -> None:
    file = tmp_path / "vocab.txt"
    file.write_text("a\t7\nb\nc\t1\t2\nd\n")
    assert load_vocab(file) == {"a": 7, "b": 1}


def test_rows_are_padded() -> None:
    rows, positions, mask, longest, count, lengths = pad_batch_data([[1, 2], [3]], 9, 3, True, True, True, True, True)
    assert rows.tolist() == [[[1], [2], [9]], [[3], [9], [9]]]
    assert positions[:, :, 0].tolist() == [[0, 1, 9], [0, 9, 9]]
    assert mask[:, :, 0].tolist() == [[1, 1, 0], [1, 0, 0]]
    assert (longest, count, lengths.tolist()) == (3, 3, [[2], [1]])
    tokens, _, _, mask, labels = prepare_batch_data([([1, 2], [0, 0], [0, 1], 7), ([3], [0], [0], 8)], 3, 2)
    assert (tokens[:, :, 0].tolist(), mask.sum(), labels.tolist()) == ([[1, 2], [3, 0]], 3, [[7], [8]])
    assert pad_batch_data([[1]], max_seq_len=2).dtype == np.int64
    with pytest.raises(ValueError, match="max_seq_len is 1, got 2"):
        pad_batch_data([[1, 2]], max_seq_len=1)


def test_words_of_a_review(tmp_path: Path) -> None:
    (tmp_path / "imdb.vocab").write_text("the\nmovie\n,\ngood\n")
    dataset = IMDBDataset()
    dataset.load_resource(tmp_path / "imdb.vocab")
    assert dataset.get_words_only("The movie,<br />GOOD fun") == [0, 1, 2, 3, 4]
    assert dataset.get_words_and_label("the | movie | 1\n") == ([0, 4, 1], [1])
    assert list(dataset.generate_sample("good|0")()) == [(("words", [3]), ("label", [0]))]


def test_batches_of_reviews(tmp_path: Path) -> None:
    (tmp_path / "imdb.vocab").write_text("")
    for name, labels in (("a", range(5)), ("b", range(5, 7))):
        (tmp_path / name).write_text("".join(f"x|{label}\n" for label in labels))
    dataset = IMDBDataset()
    dataset.load_resource(tmp_path / "imdb.vocab")
    read = dataset.infer_reader([tmp_path / "a", tmp_path / "b"], batch=3, buf_size=4)
    for _ in range(2):
        batches = list(read())
        assert [len(batch) for batch in batches] == [3, 3, 1]
        assert sorted(label[0] for batch in batches for _, label in batch) == list(range(7))


def test_chinese_words_are_segmented(tmp_path: Path) -> None:
    (tmp_path / "word.dic").write_text("0\t你\n1\t好\n2\t1\n3\tOOV\n", encoding="utf-8")
    (tmp_path / "tag.dic").write_text("0\tn-B\n1\tn-I\n2\tO\n")
    (tmp_path / "q2b.dic").write_text(f"{WIDE_ONE}\t1\nno pair\n", encoding="utf-8")
    reader = LACReader(str(tmp_path))
    assert (reader.vocab_size, reader.num_labels) == (4, 3)
    assert reader.process(f" 你好{WIDE_ONE}x \n".encode()) == [0, 1, 2, 3]
    assert reader.label_to_ids(["n-I", "x"]) == [1, 2]
    assert reader.parse_result("你好世界", np.array([[0], [1], [0], [1]])) == ["你好", "世界"]
    assert reader.parse_result("你好世界", np.array([[0], [2], [2], [0]])) == ["你", "好世", "界"]
    (tmp_path / "tag.dic").write_text("0\tx\n0\ty\n")
    with pytest.raises(KeyError, match="the key '0' twice"):
        load_kv_dict(tmp_path / "tag.dic")
    with pytest.raises(FileNotFoundError, match=r"needs the folder .*nowhere with word\.dic"):
        LACReader(str(tmp_path / "nowhere"))


def test_unknown_words_have_the_number_after_the_vocabulary(tmp_path: Path) -> None:
    file = tmp_path / "senta.txt"
    file.write_text("你\t1\n0\n\n世界\t9\n", encoding="utf-8")
    assert SentaReader(str(file)).process(["世界", "你", "", "x", "<unk>"]) == [9, 1, 0, 4, 3]
    with pytest.raises(FileNotFoundError, match="needs the vocabulary"):
        SentaReader(str(tmp_path / "missing"))
