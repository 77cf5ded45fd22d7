import pytest


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory, monkeypatch):
    """A cache of its own for each test, and no data but what the test names."""
    cache = tmp_path_factory.mktemp("cache")
    monkeypatch.setenv("FASTRPB_CACHE", str(cache))
    monkeypatch.delenv("FASTRPB_DATA", raising=False)
    return cache
