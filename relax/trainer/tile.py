"""How much of the [tokens, vocabulary] logits exists at once. Loads nothing heavy."""


def logit_tile(num_tokens: int, num_words: int, kind: str) -> tuple[int, int]:
    """Tokens and words of one float32 tile of logits.

    On the CPU a tile of 1 MiB stays in the second-level cache; a GPU needs enough work in one
    kernel and gets 256 MiB. Fastest of {128, 256, 512} x {512, 1024, 2048} on a CPU core.
    """
    tokens, budget = (256, 2**20) if kind == "cpu" else (4096, 2**28)
    tokens = max(tokens, budget // 4 // num_words)
    tokens = max(1, min(tokens, num_tokens))
    return tokens, max(1, min(num_words, budget // 4 // tokens))
