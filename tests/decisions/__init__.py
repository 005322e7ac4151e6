"""Decision rules: a package of its own, so that its conftest is not taken for that of all tests."""
