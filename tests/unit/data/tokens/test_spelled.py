from __future__ import annotations

from pretrainkit.data.tokens.spelled import SpelledTokens


def test_texts_that_spell_a_special_token_are_counted_once() -> None:
    tokens = ["<|end|>", "<|end_of_turn|>", "<s>", "[INST]", "\u2581x", ""]
    texts = [
        "plain",
        "a<|end|>b<s>",
        "<|end",
        "<|end_of_turn|>",
        "x<span>",
        "<s",
        "[INST",
        "[INST]",
        "日本\u2581x",
        "<|End|>",
    ]
    expected = [any(token and token in text for token in tokens) for text in texts]
    assert SpelledTokens(tokens).count(texts) == sum(expected) == 4
    assert SpelledTokens([]).count(texts) == 0
