"""What every recipe must get right and can easily get silently wrong.

One room per question; imports point down this list only (tests/test_house.py):

    cli                    from a command line to a running recipe
    run/                   the loop between two steps; folder, snapshots, stop and go on
    data/    training/     samples and batches; model, optimizer, gradients, evaluation
    group/                 devices, the rendezvous of the ranks, what they tell each other
    launch/                who am I; start, end and explain ranks
    errors options files machine seeds figure     (seeds: randomness, determinism, precision)

How to add a recipe, a data set or a launcher: CONTRIBUTING.md.
"""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
"""The repository, or the part of it that was copied into the image."""
