"""The demo's questions: short and long, plain and odd, so that requests differ in length and ending."""

from __future__ import annotations

from mrv2.chat_template import Message

DEMO_CONVERSATIONS: list[list[Message]] = [
    [{"role": "user", "content": "What is the capital of Portugal?"}],
    [{"role": "user", "content": "Name three fruits that are red. Answer with a short list."}],
    [{"role": "user", "content": "Write one sentence about a lighthouse in a storm."}],
    [
        {"role": "system", "content": "You answer in one short sentence."},
        {"role": "user", "content": "Why does ice float on water?"},
    ],
    [{"role": "user", "content": "Write a Python function that returns the larger of two numbers."}],
    [{"role": "user", "content": "Übersetze ins Englische: Der Zug fährt um acht Uhr ab."}],
    [
        {"role": "user", "content": "My dog is called Biscuit and he loves the sea."},
        {"role": "assistant", "content": "Biscuit sounds like a happy dog! Does he swim?"},
        {"role": "user", "content": "He does. What was my dog's name again?"},
    ],
    [
        {
            "role": "user",
            "content": "Summarise in a few words: the ferry was late because of fog, so the market opened without "
            "its baker, and by noon every stall that sold cheese had sold its last cracker too.",
        }
    ],
]
