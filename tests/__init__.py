"""Laws of the code; helpers/ holds what they share."""

import pytest

pytest.register_assert_rewrite("tests.helpers")
