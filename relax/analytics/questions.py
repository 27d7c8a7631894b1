"""Questions worth keeping: a literal table of names and SQL over the views."""

from __future__ import annotations

from dataclasses import dataclass

from relax.errors import ConfigError
from relax.flags import nearest


@dataclass(frozen=True)
class Question:
    """One row: `{run}` stands for the column `run` where several runs are asked."""

    name: str
    asks: str
    query: str
    needs: str = ""
    """What a run must have for an answer with rows in it; empty: any run answers."""

    def sql(self, num_runs: int) -> str:
        """The question to `num_runs` runs."""
        return self.query.replace("{run}", "run, " if num_runs > 1 else "").strip()


NEWEST = "step > (SELECT max(step) FROM steps) - 10"

QUESTIONS = {
    row.name: row
    for row in (
        Question(
            "reward-by-step",
            "reward, length and truncation by step",
            "SELECT {run}step, reward, response_len, truncated FROM steps ORDER BY ALL",
        ),
        Question(
            "no-signal",
            "share of groups whose rewards are all equal, and of which kind, by step",
            """
SELECT {run}step, avg((NOT has_signal)::INT) AS no_signal,
       avg((NOT has_signal AND reward_max <= 0)::INT) AS all_wrong,
       avg((NOT has_signal AND reward_min > 0)::INT) AS all_right
FROM groups GROUP BY ALL ORDER BY ALL""",
        ),
        Question(
            "finish-reason",
            "reward and length by finish reason",
            """
SELECT {run}finish_reason, count(*) AS responses, avg(raw_reward) AS raw_reward,
       avg(response_len) AS response_len
FROM responses GROUP BY ALL ORDER BY ALL""",
        ),
        Question(
            "drift-by-position",
            "trainer against engine, by position of the valid tokens: the newest ten steps",
            f"""
SELECT {{run}}2 ** bucket - 1 AS from_token, count(*) AS tokens, avg(d) AS mean_drift,
       avg(abs(d)) AS abs_drift, max(abs(d)) AS max_drift
FROM (
    SELECT {{run}}unnest(old_logp) - unnest(rollout_logp) AS d, unnest(mask) AS valid,
           floor(log2(unnest(range(1, len(tokens) + 1))))::INT AS bucket
    FROM responses WHERE {NEWEST} AND old_logp IS NOT NULL
) WHERE valid GROUP BY ALL ORDER BY ALL""",
            needs="old_logp, which the stage score writes",
        ),
        Question(
            "drift-by-step",
            "trainer against engine by step, as the update measured it",
            """
SELECT {run}step, metric, avg(value) AS value FROM metrics
WHERE metric IN ('train/train_rollout_logprob_abs_diff', 'train/mismatch_kl',
                 'train/mismatch_k3_kl', 'train/tis_clipfrac')
GROUP BY ALL ORDER BY ALL""",
            needs="drift metrics of updates",
        ),
        Question(
            "longest-wrong",
            "the longest answers that earned nothing",
            """
SELECT {run}step, sample_id, response_len, finish_reason, prompt, label, response
FROM responses WHERE raw_reward <= 0 ORDER BY response_len DESC, sample_id LIMIT 10""",
        ),
        Question(
            "shortest-right",
            "the shortest answers that earned the most",
            """
SELECT {run}step, sample_id, response_len, prompt, label, response
FROM responses WHERE raw_reward > 0
ORDER BY raw_reward DESC, response_len, sample_id LIMIT 10""",
        ),
        Question(
            "never-solved",
            "prompts that were asked and never answered right",
            """
SELECT {run}prompt_id, count(*) AS times_asked, sum(responses) AS responses,
       max(step) AS last_step, any_value(prompt) AS prompt, any_value(label) AS label
FROM groups GROUP BY {run}prompt_id HAVING max(reward_max) <= 0
ORDER BY responses DESC, prompt_id LIMIT 20""",
        ),
        Question(
            "forgotten",
            "prompts solved once and not when last asked",
            """
SELECT {run}prompt_id, max(step) AS last_step, max_by(raw_reward, step) AS last_reward,
       max(raw_reward) AS best_reward, arg_max(step, raw_reward) AS best_step,
       any_value(prompt) AS prompt
FROM groups GROUP BY {run}prompt_id
HAVING max(raw_reward) > 0 AND max_by(reward_max, step) <= 0
ORDER BY best_reward DESC, prompt_id LIMIT 20""",
        ),
        Question(
            "clip-fraction",
            "clipped share of tokens and gradient norm, by optimizer step of the rollout",
            """
SELECT {run}step, optimizer_step,
       max(value) FILTER (metric = 'train/pg_clipfrac') AS clipped,
       max(value) FILTER (metric = 'train/silenced_frac') AS silenced,
       max(value) FILTER (metric = 'train/grad_norm') AS grad_norm
FROM metrics WHERE stage = 'update' GROUP BY ALL ORDER BY ALL""",
        ),
        Question(
            "clip-by-sign",
            "share of all tokens that were clipped, with an advantage above and below 0, by "
            "optimizer step of the rollout",
            """
SELECT {run}step, optimizer_step,
       max(value) FILTER (metric = 'train/pg_clipfrac_pos') AS positive,
       max(value) FILTER (metric = 'train/pg_clipfrac_neg') AS negative
FROM metrics WHERE metric IN ('train/pg_clipfrac_pos', 'train/pg_clipfrac_neg')
GROUP BY ALL ORDER BY ALL""",
            needs="clip metrics of updates",
        ),
        Question(
            "stage-seconds",
            "seconds of each stage: mean, longest and sum",
            """
SELECT {run}stage, count(*) AS times, avg(seconds) AS mean_s, max(seconds) AS longest_s,
       sum(seconds) AS total_s
FROM jobs WHERE committed GROUP BY ALL ORDER BY total_s DESC""",
        ),
        Question(
            "consumed-once",
            "each prompt once an epoch, filtered groups among them? `twice` and `gaps` must be 0",
            """
SELECT {run}epoch, count(*) AS drawn, count(*) - count(DISTINCT prompt_id) AS twice,
       max(cursor) - min(cursor) + 1 - count(DISTINCT cursor) AS gaps
FROM (
    SELECT {run}group_id, epoch, prompt_id, cursor FROM prompts
    UNION SELECT {run}group_id, epoch, prompt_id, cursor FROM candidates
) GROUP BY {run}epoch ORDER BY ALL""",
        ),
        Question(
            "held-out",
            "held-out reward by policy version and decoding",
            """
SELECT {run}eval_name, decoding, policy_version, count(*) AS answers, avg(reward) AS reward,
       avg(response_len) AS response_len
FROM evals GROUP BY ALL ORDER BY ALL""",
            needs="evaluation (eval_prompt_data)",
        ),
        Question(
            "cost-per-stage",
            "GPU hours and seconds in the queue, by stage",
            """
SELECT {run}stage, count(*) AS attempts, sum(seconds * gpus) / 3600 AS gpu_hours,
       avg(queue_s) AS queue_mean_s, max(queue_s) AS queue_longest_s, sum(restarts) AS restarts
FROM jobs WHERE job_id IS NOT NULL GROUP BY ALL ORDER BY gpu_hours DESC NULLS LAST""",
            needs="stages placed as jobs",
        ),
        Question(
            "idle-share",
            "share of the jobs' time outside their stages: start, imports, loading, end",
            """
SELECT {run}num_nodes, gpus, count(*) AS jobs, sum(run_s) AS run_s, sum(busy_s) AS busy_s,
       1 - sum(busy_s) / sum(run_s) AS idle_share
FROM (
    SELECT {run}job_id, num_nodes, gpus, any_value(run_s) AS run_s, sum(seconds) AS busy_s
    FROM jobs WHERE run_s IS NOT NULL GROUP BY ALL
) GROUP BY ALL ORDER BY ALL""",
            needs="stages placed as jobs",
        ),
        Question(
            "lost-attempts",
            "jobs that ended without making their stage, and the GPU seconds they took",
            """
SELECT {run}step, stage, attempt, job_id, state, gpu_s FROM jobs WHERE NOT committed
ORDER BY ALL""",
        ),
    )
}


def question(name: str) -> Question:
    """The question called `name`; ConfigError names the nearest."""
    if name not in QUESTIONS:
        raise ConfigError(
            f"--question {name}: no such question{nearest(name, QUESTIONS)}; "
            f"there are: {', '.join(QUESTIONS)}"
        )
    return QUESTIONS[name]
