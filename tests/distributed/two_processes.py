"""Run functions in two processes that form a gloo group on the loopback interface.

The processes are forks of a server that has imported torch and Slipstream, because importing them takes seconds.
"""

import os
import pickle
import traceback

import torch

from ports import free_port


def _child(rank, port, folder, functions, world, environ):
    torch.set_num_threads(1)
    os.environ.clear()
    os.environ.update(
        environ,
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(world),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
    )
    answers = {}
    for function in functions:
        own = folder / function.__name__
        try:
            answers[function.__name__] = function(own)
        except Exception:
            answers[function.__name__] = traceback.format_exc()
            break  # the other process may be waiting for this one, so later results are not reliable
    (folder / f"{rank}.pkl").write_bytes(pickle.dumps(answers))


def run_in_two(functions, folder, timeout=60, world=2, start_method="forkserver"):
    """Call each `function(folder / function.__name__)` in both processes. Return {name: [result of each rank]}.

    If a function raises an error, its result is the traceback, and the process does not call the remaining functions.
    `world` sets the number of processes and results. With `start_method="spawn"`, each process imports torch itself.
    Use it to test environment variables that torch reads when it is imported.
    """
    ranks = range(world)
    context = torch.multiprocessing.get_context(start_method)
    if start_method == "forkserver":
        context.set_forkserver_preload(["torch._dynamo", "slipstream.runner"])
    # The server keeps the environment variables with which it was started, so the current ones are passed.
    arguments = (free_port(), folder, functions, world, dict(os.environ))
    children = [context.Process(target=_child, args=(rank, *arguments)) for rank in ranks]
    try:
        for child in children:
            child.start()
        for child in children:
            child.join(timeout)
    finally:
        for child in children:
            if child.is_alive():
                child.kill()
            child.join()
    parts = [folder / f"{rank}.pkl" for rank in ranks]
    answers = [pickle.loads(part.read_bytes()) if part.exists() else {} for part in parts]
    nothing = "no answer: an earlier function or the other process failed, or the processes timed out"
    return {f.__name__: [answer.get(f.__name__, nothing) for answer in answers] for f in functions}
