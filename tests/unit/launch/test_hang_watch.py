"""Stacks as faulthandler and py-spy write them."""

from __future__ import annotations

from pretrainkit.launch.hang_watch import main_frames

FAULTHANDLER = """Thread 0x00007f00000000aa (most recent call first):
  File "/x/threading.py", line 324 in wait

Current thread 0x00007f00000000bb (most recent call first):
  File "/x/data.py", line 5 in read
  File "/x/train.py", line 9 in <module>
"""
PY_SPY = """Process 7: python train.py
Python v3.11.7 (/usr/bin/python3.11)

Thread 7 (idle): "MainThread"
    read (data.py:5)
    <module> (train.py:9)
Thread 8 (idle): "progress"
    _watch (progress.py:3)
"""


def test_the_frames_of_the_main_thread_are_shown() -> None:
    frames = main_frames(FAULTHANDLER, "0x00007f00000000bb")
    assert frames == ['File "/x/data.py", line 5 in read', 'File "/x/train.py", line 9 in <module>']
    assert main_frames(PY_SPY, "0x00007f00000000bb") == ["read (data.py:5)", "<module> (train.py:9)"]
    assert main_frames("", "") == []
