import hashlib

from relax.data.seeds import response_seed


def test_the_seed_is_the_first_63_bits_of_sha256():
    digest = hashlib.sha256(b"relax/response/7/12/345/6").hexdigest()
    assert response_seed(7, 12, 345, 6) == int(digest[:16], 16) // 2


def test_the_value_is_frozen():
    assert response_seed(1, 2, 3, 4) == 5586292967530901559


def test_each_number_counts_and_numbers_do_not_run_together():
    seeds = {
        response_seed(*numbers)
        for numbers in [(1, 2, 3, 4), (2, 2, 3, 4), (1, 3, 3, 4), (1, 2, 4, 4), (1, 2, 3, 5)]
    }
    assert len(seeds) == 5
    assert response_seed(1, 11, 0, 0) != response_seed(11, 1, 0, 0)
    assert response_seed(0, 0, 1, 11) != response_seed(0, 0, 11, 1)


def test_ten_thousand_seeds_are_distinct_and_fill_63_bits():
    seeds = [response_seed(0, step, prompt, 0) for step in range(100) for prompt in range(100)]
    assert len(set(seeds)) == 10_000
    assert 0 <= min(seeds) < 2**50
    assert 2**63 - 2**51 < max(seeds) < 2**63
