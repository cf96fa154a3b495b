"""Common parts of the security tests."""

from __future__ import annotations

import pytest

from tests.security.certificates import Certificates, make_certificates


@pytest.fixture(scope="session")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    """Makes the certificates once for all tests. A test that adds one uses a name of its own."""
    return make_certificates(tmp_path_factory.mktemp("certificates"))
