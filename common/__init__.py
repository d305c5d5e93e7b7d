"""What every recipe needs right and can easily get silently wrong.

One room per question; imports point down this list only (tests/test_house.py):

    cli                    from a command line to a running recipe
    run/                   what a run leaves, snapshots, stop and go on
    data/    training/     which samples; which model, optimizer and evaluation
    measure                time and memory
    group/                 devices, the meeting of the ranks, what they tell each other
    launch/                who am I; start, end and explain ranks
    errors files seeds figure
"""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
"""The repository, or in an image what was copied of it."""
