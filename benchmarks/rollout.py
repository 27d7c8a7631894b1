"""Decoded tokens per second of the sampling engines, as ratios to plain `generate`.

    OMP_NUM_THREADS=1 python benchmarks/rollout.py [--engines transformers vllm] [--policy DIR]

Without --policy, a random Qwen3 (hidden 64, 2 layers, head_dim 32) is made. Each engine and
`generate` sample the same prompts in turns; the best of --repeats counts, because other work on
the machine only ever slows a run down.
"""

import argparse
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM

from relax.engines import Request, SamplingParams, open_engine


def make_policy(directory: Path) -> Path:
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=512,
        hidden_size=64,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=512,
        tie_word_embeddings=False,
        eos_token_id=1,
        bos_token_id=None,
        pad_token_id=0,
    )
    Qwen3ForCausalLM(config).save_pretrained(directory)
    return directory


def make_requests(num_prompts: int, group_size: int, prompt_len: int, kind: str) -> list[Request]:
    lengths = [
        prompt_len if kind == "equal" else prompt_len // 2 + i * prompt_len // num_prompts
        for i in range(num_prompts)
    ]
    prompts = [
        tuple(2 + (7 * i + j) % 500 for j in range(length)) for i, length in enumerate(lengths)
    ]
    return [
        Request(prompt, seed=1000 * i + sample)
        for i, prompt in enumerate(prompts)
        for sample in range(group_size)
    ]


def plain_generate(policy: Path, requests: list[Request], response_len: int) -> Callable[[], None]:
    model = AutoModelForCausalLM.from_pretrained(policy, dtype=torch.float32).eval()
    width = max(len(request.prompt_tokens) for request in requests)
    padding = [width - len(request.prompt_tokens) for request in requests]
    token_BT = torch.tensor(
        [[0] * n + list(r.prompt_tokens) for n, r in zip(padding, requests, strict=True)]
    )
    mask_BT = torch.tensor([[0] * n + [1] * (width - n) for n in padding])

    def run() -> None:
        model.generate(
            input_ids=token_BT,
            attention_mask=mask_BT,
            do_sample=True,
            top_k=0,
            max_new_tokens=response_len,
            min_new_tokens=response_len,
            pad_token_id=0,
        )

    return run


def best_in_turns(runs: dict[str, Callable[[], object]], repeats: int) -> dict[str, float]:
    """Least seconds of each run, after one run to warm up."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(repeats + 1):
        for name, run in runs.items():
            start = time.perf_counter()
            run()
            times[name].append(time.perf_counter() - start)
    return {name: min(taken[1:]) for name, taken in times.items()}


def load_times(engine, policy: Path) -> tuple[float, float]:
    """Seconds to start with a policy and to swap the weights of another version in."""
    start = time.perf_counter()
    engine.load(policy)
    started = time.perf_counter() - start
    return started, best_in_turns({"swap": lambda: engine.load(policy)}, 3)["swap"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--engines", nargs="+", default=["transformers"])
    parser.add_argument("--policy", type=Path)
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--group", type=int, default=8)
    parser.add_argument("--prompt-len", type=int, default=16)
    parser.add_argument("--response-len", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=7)
    options = parser.parse_args()
    engines = {name: open_engine(name) for name in options.engines}
    with tempfile.TemporaryDirectory() as directory:
        policy = options.policy or make_policy(Path(directory))
        for name, engine in engines.items():
            started, swapped = load_times(engine, policy)
            print(f"{name}: start {started:.2f} s, swap {swapped:.3f} s ({swapped / started:.1%})")
        params = SamplingParams(max_response_len=options.response_len, ignore_eos=True)
        for kind in ("equal", "ragged"):
            requests = make_requests(options.prompts, options.group, options.prompt_len, kind)
            num_tokens = len(requests) * options.response_len
            runs = {
                name: lambda engine=engine, requests=requests: engine.sample(requests, params)
                for name, engine in engines.items()
            }
            plain = plain_generate(policy, requests, options.response_len)
            seconds = best_in_turns({"generate": plain, **runs}, options.repeats)
            for name, engine_s in seconds.items():
                print(
                    f"{name}, {kind} prompts, {len(requests)} x {options.response_len}: "
                    f"{num_tokens / engine_s:,.0f} tok/s, "
                    f"{seconds['generate'] / engine_s:.2f} x generate"
                )
    for engine in engines.values():
        engine.close()


if __name__ == "__main__":
    main()
