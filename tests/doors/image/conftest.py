"""One engine and one image for all their tests."""

from collections.abc import Iterator

import pytest

from tests.helpers.engine import IMAGE, Engine


@pytest.fixture(scope="session")
def engine() -> Iterator[Engine]:
    """The machine's engine, or one brought up here."""
    running = Engine()
    yield running
    running.close()


@pytest.fixture(scope="session")
def image(engine: Engine) -> Iterator[str]:
    """The image of the default stack, built by `make image` from the shipped Dockerfile."""
    build = " ".join(engine.build_arguments())
    engine.call("make", "image", f"IMAGE={IMAGE}", f"BUILD={build}", timeout_s=1500)
    yield IMAGE
    if not engine.own:  # ours keeps its cache for the next run
        engine.run("image", "rm", "--force", IMAGE, f"{IMAGE}-development")
