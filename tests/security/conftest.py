"""The common parts of the security tests."""

from __future__ import annotations

import pytest

from tests.security.certificates import Certificates, make_certificates


@pytest.fixture(scope="session")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    """Made once; a test that adds one gives it a name of its own."""
    return make_certificates(tmp_path_factory.mktemp("certificates"))
