"""A process that only plans with cuDNN. It is a script and is never imported.

usage: planner.py CUDA_LIBRARY

planning_process.py starts it where there is no CUDA driver. cuDNN then plans with stand-ins, which
have the names of real libraries and would conflict with those in the user's process. Each line of
JSON on stdin, [function of CUDA_LIBRARY, arguments], is answered by a line on stdout: {"value": …},
or {"error": name of the exception, "message": …, "code": …}.

It imports nothing from this package, and nothing slow, so that it starts in milliseconds.
"""

import json
import os
import sys
from importlib.machinery import ExtensionFileLoader, ModuleSpec
from importlib.util import module_from_spec
from types import ModuleType


def load(path: str) -> ModuleType:
    """The extension module at this path, without the package that it belongs to."""
    loader = ExtensionFileLoader("_cuda", path)
    module = module_from_spec(ModuleSpec("_cuda", loader, origin=path))
    loader.exec_module(module)
    return module


def answer(backend: ModuleType, line: str | bytes) -> dict[str, object]:
    try:
        function, arguments = json.loads(line)
        return {"value": getattr(backend, function)(*arguments)}
    except Exception as error:
        message = error.args[0] if isinstance(error, KeyError) else str(error)
        code = getattr(error, "code", "")
        return {"error": type(error).__name__, "message": message, "code": code}


def main():
    # cuDNN may print to stdout, which must carry only answers.
    with os.fdopen(os.dup(1), "w") as answers:
        os.dup2(2, 1)
        backend = load(sys.argv[1])
        backend.end_with_parent()
        for line in sys.stdin:
            answers.write(json.dumps(answer(backend, line)) + "\n")
            answers.flush()


if __name__ == "__main__":
    main()
    # Skips the destructors of cuDNN's static objects: nothing is left to do.
    os._exit(0)
