"""Functions for --custom-generate-function-path that go wrong on the prompt `003=`."""

import os
import signal
import time
from pathlib import Path

UNLUCKY = "003="


def is_unlucky(conversation):
    return conversation.tokenizer.decode(conversation.prompt_tokens) == UNLUCKY


async def dies(conversation):
    if is_unlucky(conversation):
        os.kill(os.getpid(), signal.SIGKILL)
    await conversation.sample()


async def hangs(conversation):
    if is_unlucky(conversation):
        time.sleep(1000)
    await conversation.sample()


async def tells_its_process_and_hangs(conversation):
    Path(os.environ["TALK_MARKER"]).write_text(str(os.getpid()))
    time.sleep(1000)


async def has_a_bug(conversation):
    if is_unlucky(conversation):
        raise ZeroDivisionError("oops")
    await conversation.sample()


async def tells_its_environment(conversation):
    Path(os.environ["TALK_MARKER"]).write_text("\n".join(os.environ))
    await conversation.sample()
