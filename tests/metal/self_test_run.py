"""Runs the engine's self-test on an emulated Mac: `python -m tests.metal.self_test_run DIR [options of the self-test]`.

The last line of the output is the number of calls of each kernel, as JSON.
"""

import json
import sys
from pathlib import Path

from tests.metal import emulator

if __name__ == "__main__":
    emulator.install(Path(sys.argv.pop(1)) / "kernels", on_gpu=True)
    from engine.__main__ import main

    sys.argv[1:1] = ["--self-test"]
    status = main()
    sys.stdout.write(f"\n{json.dumps(emulator.num_calls)}\n")
    sys.exit(status)
