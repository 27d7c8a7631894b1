"""Decoded tokens per second of the sampling engines, as ratios to plain `generate` and to TRL.

    OMP_NUM_THREADS=1 python benchmarks/rollout.py [--engines transformers vllm] [--policy DIR]
    OMP_NUM_THREADS=1 python benchmarks/rollout.py --trl DIRECTORY

Without --policy, a random Qwen3 (hidden 64, 2 layers, head_dim 32) is made. Each engine and
`generate` sample the same prompts in turns; the best of --repeats counts, because other work on
the machine only ever slows a run down.

With --trl, the engine `transformers` against the generation phase of TRL's GRPOTrainer
(`_generate`), on the model, the prompts and the settings of benchmarks/step.py: texts in, texts and
tokens out, each side in its own process, in turns. DIRECTORY is as told there.
"""

import argparse
import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import step
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


def generation(side: str, policy: Path, repeats: int) -> dict[str, float]:
    """Least CPU seconds of one side's generation phase."""
    texts = [text for text in step.prompts()[: step.NUM_PROMPTS] for _ in range(step.GROUP)]
    run = {"ours": our_generation, "trl": trl_generation}[side](policy)
    times = []
    for _ in range(repeats + 1):
        start = time.process_time()
        tokens = run(texts)
        times.append(time.process_time() - start)
        assert [len(one) for one in tokens] == [step.LENGTH] * len(texts)
    return {"seconds": min(times[1:])}


def our_generation(policy: Path) -> Callable[[list[str]], list]:
    from relax.data.prompts import load_tokenizer

    torch.set_num_threads(1)
    engine, tokenizer = open_engine("transformers"), load_tokenizer(policy)
    engine.load(policy)
    params = SamplingParams(max_response_len=step.LENGTH, ignore_eos=True)

    def run(texts: list[str]) -> list:
        prompts = tokenizer(texts)["input_ids"]
        requests = [Request(tuple(tokens), seed=i) for i, tokens in enumerate(prompts)]
        tokens = [response.tokens for response in engine.sample(requests, params)]
        tokenizer.batch_decode(tokens, skip_special_tokens=True)
        return tokens

    return run


def trl_generation(policy: Path) -> Callable[[list[str]], list]:
    from trl import GRPOTrainer

    trainer = step.make_trainer(policy, GRPOTrainer)
    return lambda texts: trainer._generate(texts)[1]


def against_trl(directory: str) -> None:
    """Print both sides and their ratio, the best of three rounds."""
    seconds: dict[str, list[float]] = {"ours": [], "trl": []}
    with tempfile.TemporaryDirectory() as policy:
        step.make_policy(Path(policy))
        for _ in range(3):
            for side, found in seconds.items():
                extra = directory if side == "trl" else ""
                found.append(step.run_child(__file__, side, Path(policy), extra)["seconds"])
    num_responses = step.NUM_PROMPTS * step.GROUP
    for side, found in seconds.items():
        rate = num_responses * step.LENGTH / min(found)
        print(f"{side:5} {num_responses} x {step.LENGTH}: {rate:,.0f} tok/s of CPU time")
    print(f"ours / TRL: {min(seconds['trl']) / min(seconds['ours']):.2f} x its tokens per second")


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
    parser.add_argument("--trl", default="", help="directory where TRL is installed")
    parser.add_argument("--side", choices=("ours", "trl"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.side:
        print(json.dumps(generation(options.side, options.policy, options.repeats)))
        return
    if options.trl:
        against_trl(options.trl)
        return
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
