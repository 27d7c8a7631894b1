import pytest

from relax.data.tasks import build_tokenizer


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory):
    directory = tmp_path_factory.mktemp("tokenizer")
    build_tokenizer(directory)
    return directory


@pytest.fixture
def tokenizer(model_dir):
    from relax.data.prompts import load_tokenizer

    return load_tokenizer(model_dir)
