"""Texts that the release gate runs both models on: short and long, several languages, code."""

from __future__ import annotations

SHORT = {
    "English": "The quick brown fox jumps over the lazy dog. In 1969, people first walked on the Moon, and",
    "Japanese": "吾輩は猫である。名前はまだ無い。どこで生れたか頓と見当がつかぬ。東京の天気は",
    "Chinese": "人工智慧的發展改變了許多產業。今天天气很好，我们一起去公园散步，然后",
    "Korean": "대한민국의 수도는 서울이다. 기계 학습 모델을 훈련하려면 많은 데이터가 필요하며,",
    "code": "def fibonacci(n: int) -> int:\n    a, b = 0, 1\n    for _ in range(n):\n        a, b = b, a + b\n",
    "numbers": "3.14159 26535 89793 23846; 2 + 2 = 4; 7 * 8 = 56; 0x1F600 \U0001f600 \t\n\n  £€¥ ©",
}
"""Name -> prompt."""


def long_text() -> str:
    """About 400,000 characters of English: the chapters of the language reference that ship with Python."""
    import pydoc_data.topics

    return "\n\n".join(text for _, text in sorted(pydoc_data.topics.topics.items()))
