"""What happens in which order. No torch, no submitit, no sbatch.

Prefect reads its settings when it is imported, so its quiet defaults are set here, before that.
"""

import os

QUIET = {
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    "DO_NOT_TRACK": "1",
    "PREFECT_CLI_PROMPT": "false",
    # The terminal alone: an error is one line of ours there, and Prefect would add its traceback.
    # The flow run's log at the server has it all, also what jobs write.
    "PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL": "CRITICAL",
    "PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS": "120",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
}
for _name, _value in QUIET.items():
    os.environ.setdefault(_name, _value)
