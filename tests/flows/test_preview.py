"""`--dry-run`: the plan and one script for each kind of job."""

from flows import evaluate, train
from flows.preview import preview
from flows.train import steps
from relax.flags import load_config
from tasks.stage import perform

PLACED = {
    "placement": "job",
    "executor": "slurm",
    "num_rollout": 3,
    "reward_placement": "inline",
    "rollout_allocation": "gpu",
    "advantage_allocation": "gpu",
    "update_allocation": "gpu",
    "allocations": {"gpu": {"partition": "a100", "cpus_per_task": 6, "minutes": 30}},
}


def test_plan_and_scripts(tmp_path):
    said = preview(load_config(None, {**PLACED, "run_dir": str(tmp_path / "demo")}), steps)
    plan, *scripts = said.split("# --- ")
    assert plan.splitlines() == [
        f"plan of {tmp_path}/demo: 3 steps",
        "  in the flow's process: reward, 3 times",
        "  job by slurm (allocation gpu): rollout, steps 0 to 2",
        "  job by slurm (allocation gpu): advantage + update, steps 0 to 2",
        "",
    ]
    assert [script.split("\n", 1)[0] for script in scripts] == ["rollout", "advantage + update"]
    for script in scripts:
        assert "#SBATCH --partition=a100" in script
        assert " --cpus-per-task=6 " in script.split("\nsrun", 1)[1]
    assert "#SBATCH --job-name=demo/000000/advantage" in scripts[1]
    assert not (tmp_path / "demo").exists()


def test_jobs_submitted_ahead_name_the_job_before(tmp_path):
    given = {**PLACED, "submit_ahead": True, "run_dir": str(tmp_path / "demo")}
    apart = {"reward_placement": "job"}
    for more, lines in (({}, [False, False]), (apart, [False, True, True])):
        said = preview(load_config(None, {**given, **more}), steps)
        scripts = said.split("# --- ")[1:]
        wanted = "#SBATCH --dependency=afterok:ID_OF_THE_JOB_BEFORE\n"
        assert [wanted in script for script in scripts] == lines


def test_local_jobs_have_no_script(tmp_path):
    given = {**PLACED, "executor": "local", "run_dir": str(tmp_path / "demo")}
    assert "# 1 process(es) of this machine" in preview(load_config(None, given), steps)


def test_an_evaluation_has_a_plan_too(settings, max3):
    given = {**settings, "eval_prompt_data": str(max3.held_out), "num_rollout": 1}
    train.run(load_config(None, given), perform)
    said = preview(load_config(None, given), evaluate.steps)
    assert "  in the flow's process: evaluate, 1 times" in said.splitlines()
